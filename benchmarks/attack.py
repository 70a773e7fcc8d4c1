"""Every aggregate under attack, on the demo's task: who still learns, and how well.

    python benchmarks/attack.py --jobs 16                       # all of it, about five minutes
    python benchmarks/attack.py --only Mean --rounds 2 --seeds 1     # a look
    python benchmarks/attack.py --page                          # docs/robustness.md and its picture

Ten devices share the embedded data unequally and train in every round; one or two of them send what
they like instead of what they trained. Their training is honest, so the attack is put on the reply
where it leaves the device. Every run is repeated with several seeds. The first form writes
benchmarks/attack.json and prints the table; the last makes the page's table and picture of it.
"""

import argparse
import json
import math
import multiprocessing
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from anyfleet.arrays import join
from anyfleet.core.device_states import DeviceStates
from anyfleet.core.messages import Params
from anyfleet.core.objectives import Task
from anyfleet.core.slots import Aggregate
from anyfleet.core.stacks import Replies, Stack
from anyfleet.experiment import Experiment, build, play
from anyfleet.methods import fedavg
from anyfleet.methods.fedavg import Training
from anyfleet.parts.aggregate import (
    Aio,
    AngleWeighted,
    Clipped,
    CoordinateMedian,
    Diagnosed,
    ErrorWeighted,
    Mean,
    ServerAdam,
    ServerOptimised,
    ServerSgd,
    Subset,
    TrimmedMean,
)
from anyfleet.parts.select import Everyone
from anyfleet.runtime import Limits, Sequential
from anyfleet.runtime.simulated.engines import Assignment, Engine, Executed, Executor
from anyfleet.tasks import Dirichlet, Embedded
from anyfleet.world import levels

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "attack.json"
PAGE, PICTURE = ROOT / "docs" / "robustness.md", ROOT / "docs" / "pictures" / "attack.svg"
BEGIN, END = "<!-- attack table -->", "<!-- end of the attack table -->"
# The demo's task, training and fleet, with ten devices. (Its module needs a terminal's libraries.)
TASK = Embedded(devices=10, limit=6000, partition=Dirichlet(0.5))
SGD: Training = {"lr": 0.05, "momentum": 0.9}
FLEET = levels(speeds=(2e9, 1e9, 5e8, 2.5e8))
AGGREGATES: Mapping[str, Aggregate] = {
    "Mean": Mean(),
    "Mean, equal": Mean("equal"),
    "ErrorWeighted": ErrorWeighted(),
    "Aio": Aio(),
    "AngleWeighted": AngleWeighted(),
    "Subset": Subset(),
    "Diagnosed": Diagnosed(),
    "ServerOptimised, SGD": ServerOptimised(optimiser=ServerSgd(1.0, 0.5)),
    "ServerOptimised, Adam": ServerOptimised(optimiser=ServerAdam(0.01)),
    "Clipped": Clipped(),
    "TrimmedMean": TrimmedMean(0.2),
    "CoordinateMedian": CoordinateMedian(),
}
# What a device sends instead of its change of a tensor.
ATTACKS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "huge": lambda change: torch.full_like(change, 3.4e38),
    "NaN": lambda change: torch.full_like(change, math.nan),
    "flipped": lambda change: -change,
    "flipped × 10": lambda change: -10 * change,
}
UNLIMITED = "huge, no limit"  # the same as huge, with limits.growth = inf
NONE = "none"


@dataclass(frozen=True)
class Attacked(Engine):
    """The first `bad` devices send something else than they trained."""

    attack: str
    bad: int
    inner: Engine = field(default_factory=Sequential)

    def start(self, task: Task, limits: Limits) -> Executor:
        return Attacking(self.inner.start(task, limits), self)

    def sent(self, honest: Replies) -> Replies:
        """Return what a device sends instead of a single reply."""
        if honest.device[0] >= self.bad:
            return honest
        trees, change = honest.trees_of(0), ATTACKS[self.attack]
        false: Params = {name: change(value) for name, value in trees["delta"].items()}
        stack = Stack.of_one(
            {**trees, "delta": false},
            symbols=honest.symbols_of(0),
            masks=honest.masks_of(0),
            kept=honest.kept_of(0),
            report=honest.report_of(0),
        )
        first = np.zeros(1, dtype=np.int64)
        return replace(honest, stacks=(stack,), stack_index=first, place=first)


@dataclass(frozen=True)
class Attacking:
    """An attacked engine at work."""

    inner: Executor
    engine: Attacked

    def execute(self, given: Assignment, states: DeviceStates) -> Executed:
        done = self.inner.execute(given, states)
        return replace(done, replies=join([self.engine.sent(r) for r in done.replies.rows()]))


@dataclass(frozen=True)
class Case:
    """One run: which aggregate, what some devices send, how many they are."""

    aggregate: str
    attack: str
    bad: int
    seed: int
    rounds: int


@dataclass(frozen=True)
class Result:
    """What came of a run."""

    case: Case
    accuracy: tuple[float, ...]  # after every round
    refused: int  # replies
    held: int  # rounds whose model was not finite


@lru_cache(maxsize=2)
def _task(seed: int) -> Task:
    return build(_experiment(Case("Mean", NONE, 0, seed, 1)))


def _experiment(case: Case) -> Experiment:
    method = replace(fedavg(**SGD), select=Everyone(), aggregate=AGGREGATES[case.aggregate])
    attack = case.attack.partition(",")[0]
    return Experiment(
        task=TASK,
        method=method,
        fleet=FLEET,
        engine=Attacked(attack, case.bad) if case.bad else Sequential(),
        limits=Limits(growth=math.inf) if case.attack == UNLIMITED else Limits(),
        rounds=case.rounds,
        seed=case.seed,
    )


def played(case: Case) -> Result:
    """Run one case."""
    torch.set_num_threads(1)
    results = list(play(_experiment(case), _task(case.seed)))
    return Result(
        case,
        tuple(result.record.accuracy for result in results),
        sum(why.startswith("refused") for result in results for why in result.round.ledger.failure),
        sum("held" in result.record.diagnostics for result in results),
    )


def cases(names: Sequence[str], rounds: int, seeds: int) -> list[Case]:
    """Return all cases of these aggregates: without attack, then by attack and by how many."""
    kinds = [(NONE, 0), *((a, bad) for a in (*ATTACKS, UNLIMITED) for bad in (1, 2))]
    return [
        Case(name, attack, bad, seed, rounds)
        for seed in range(seeds)
        for name in names
        for attack, bad in kinds
    ]


def run(some: Sequence[Case], jobs: int) -> list[Result]:
    """Run the cases, so many at the same time."""
    if jobs < 2:
        return [played(case) for case in some]
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(played, some))


# --- results as text and as a picture ---------------------------------------------------------


def write(results: Sequence[Result], path: Path) -> None:
    """Write the results as JSON, one run a line."""
    lines = ",\n".join(json.dumps(asdict(each), ensure_ascii=False) for each in results)
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def read(path: Path) -> list[Result]:
    """Return the results in a file that `write` made."""
    return [
        Result(Case(**each.pop("case")), tuple(each.pop("accuracy")), **each)
        for each in json.loads(path.read_text(encoding="utf-8"))
    ]


def table(results: Sequence[Result]) -> Iterator[str]:
    """Yield a table in Markdown: the last accuracy in per cent, mean and deviation over seeds."""
    columns = list(dict.fromkeys((each.case.attack, each.case.bad) for each in results))
    heads = [attack if attack == NONE else f"{attack}, {bad}" for attack, bad in columns]
    yield f"| aggregate | {' | '.join(heads)} |"
    yield f"| --- |{' ---: |' * len(heads)}"
    for name in dict.fromkeys(each.case.aggregate for each in results):
        cells = [_cell([e for e in results if _kind(e) == (name, *kind)]) for kind in columns]
        yield f"| {name} | {' | '.join(cells)} |"


def _kind(result: Result) -> tuple[str, str, int]:
    return result.case.aggregate, result.case.attack, result.case.bad


def _cell(runs: Sequence[Result]) -> str:
    found = [100 * each.accuracy[-1] for each in runs]
    if not found:
        return ""
    deviation = f" ±{statistics.stdev(found):.1f}" if len(found) > 1 else ""
    return f"{statistics.fmean(found):.1f}{deviation}"


def draw(results: Sequence[Result], path: Path) -> None:
    """Draw a panel for each aggregate: accuracy by round, dashed for one attacker of ten."""
    import matplotlib as mpl  # an extra, and not needed to run

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "anyfleet"  # the same bytes every time
    from matplotlib import pyplot as plt

    names = list(dict.fromkeys(each.case.aggregate for each in results))
    across = min(4, len(names))
    down = -(-len(names) // across)
    size = (3.1 * across, 2.5 * down + 0.6)
    figure, axes = plt.subplots(down, across, figsize=size, sharex=True, sharey=True, squeeze=False)
    shades = ("black", *mpl.color_sequences["tab10"])
    colours = dict(zip((NONE, *ATTACKS, UNLIMITED), shades, strict=False))
    for panel, name in zip(axes.flat, names, strict=False):
        panel.set_title(name, fontsize=10)
        for attack, bad in dict.fromkeys((e.case.attack, e.case.bad) for e in results):
            runs = [each.accuracy for each in results if _kind(each) == (name, attack, bad)]
            means = [100 * statistics.fmean(each) for each in zip(*runs, strict=True)]
            panel.plot(
                range(1, len(means) + 1),
                means,
                color=colours[attack],
                linestyle="--" if bad == 1 else "-",
                linewidth=2 if attack == NONE else 1.2,
                label=None if bad == 1 else attack,
            )
    for panel in axes[-1]:
        panel.set_xlabel("round")
    for panel in axes[:, 0]:
        panel.set_ylabel("accuracy %")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(labels), fontsize=9)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def paste(results: Sequence[Result], page: Path) -> None:
    """Put the table into the page, between its two marks."""
    text = page.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    made = "\n".join(table(results))
    page.write_text(f"{before}{BEGIN}\n\n{made}\n\n{END}{after}", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run everything, or make the page of what was run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--only", nargs="*", choices=list(AGGREGATES), default=list(AGGREGATES))
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the JSON lies")
    parser.add_argument(
        "--page", action="store_true", help="make the page of the JSON; run nothing"
    )
    given = parser.parse_args(arguments)
    if given.page:
        results = read(given.results)
        paste(results, PAGE)
        draw(results, PICTURE)
        return
    results = run(cases(given.only, given.rounds, given.seeds), given.jobs)
    write(results, given.results)
    print("\n".join(table(results)))


if __name__ == "__main__":
    main()
