"""What a round costs beside training: microseconds of the host for each order, by stage.

    python -m benchmarks.overhead                                # all cohorts, worlds and methods
    python -m benchmarks.overhead --cohorts 100 1000 --methods fedavg

The network has 778 parameters, and a trainer of this benchmark returns at once: what is left is
selecting, planning, cutting, the clock, launching, codecs, collecting, screening, aggregating and
the ledger. Whole rounds are timed first. Then the same rounds run again under an interval timer
that looks, about every millisecond, at which file of the package is at work; a stage's share of
the time between looks, times the time of a round, is its column. A look inside a file that serves
many stages counts for the stage that called it.

The target is 3 ms + 1.5 ms for each shape + 20 µs for each order, three times that where links and
loads change within an order. In asynchronous rounds the orders of a round are those it closes.
On a CPU the order of minibatches and the mapping of devices are the work of training, even of one
that trains nothing; they are given apart and do not count. On a GPU they are part of a graph, and
to launch it counts.
"""

import signal
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.measuring import (
    WORKLOADS,
    Cell,
    Options,
    Rounds,
    Table,
    attempted,
    built,
    given_options,
    parser,
    play_rounds,
    report,
    times_of,
    verdict,
)

import anyfleet
from anyfleet import methods, world
from anyfleet.core.method import Method
from anyfleet.parts.schedule import Buffered
from anyfleet.parts.train import Gradient
from anyfleet.runtime.simulated.captured_training import CapturedTraining

COHORTS = (10, 100, 1_000, 10_000)
PACKAGE = str(Path(anyfleet.__file__).parent) + "/"
EVERY = 0.001  # seconds between two looks

# The first that fits a file's path counts; a file that fits none leaves the look to its caller.
STAGES = (
    ("select", ("parts/select/",)),
    ("codec", ("parts/codec/", "core/codec_calls")),
    ("aggregate", ("parts/aggregate/",)),
    ("ledger", ("core/ledger",)),
    ("screen", ("core/screening", "core/return_checks")),
    (
        "plan",
        (
            *("parts/plan/", "parts/choose/", "parts/extract/"),
            *("core/plan", "core/choosing", "core/check_in"),
        ),
    ),
    (
        "train launch",
        (
            *("core/local_training", "core/client", "core/residuals", "core/reports"),
            *("parts/train/", "parts/norm/", "elastic/execution/", "measure/"),
            *("runtime/simulated/engine", "runtime/simulated/captured", "runtime/simulated/stack"),
            "runtime/simulated/recorded",
        ),
    ),
    ("clock", ("runtime/", "world/", "core/time_and_energy", "core/training_work")),
    ("collect", ("core/replies", "core/updates", "core/delivery", "core/messages")),
    ("cut and send", ("core/orders", "core/layout", "core/message_size")),
    ("server and loop", ("core/", "parts/", "experiment.py")),
)
REST = "rest"


@dataclass(frozen=True)
class Idle(Gradient):
    """A trainer that trains nothing: the model comes back as it was."""

    def step(self, context: Any, state: Any, batch: Any, hyperparameters: Any, draw: Any) -> Any:
        return state


def idle(method: Method) -> Method:
    """Return the method without training."""
    trainer = getattr(method.train, "inner", method.train)
    if not isinstance(trainer, Gradient):
        trainer = Gradient()
    own = {each.name: getattr(trainer, each.name) for each in fields(Gradient)}
    return replace(method, train=Idle(**own))


@dataclass(frozen=True)
class Case:
    """A method whose rounds are timed, and how many shapes of sub-models it has."""

    make: Callable[[int], Method]
    shapes: int
    orders: Callable[[int], int]  # that a round closes, by the size of the cohort


def buffered(count: int) -> Method:
    """Return FedAvg with `count` orders under way; a fifth makes a round, and is asked anew."""
    size = max(1, count // 5)
    schedule = Buffered(concurrency=count, buffer_size=size, refill=size)
    return replace(methods.fedavg(count=count), schedule=schedule)


def anycost(count: int) -> Method:
    """Return AnycostFL with so much time that every device takes part."""
    made = methods.anycost(count=count)
    return replace(made, choose=replace(made.choose, seconds=1000.0))  # type: ignore[type-var]


CASES = {
    "fedavg": Case(lambda count: methods.fedavg(count=count), 1, lambda count: count),
    "heterofl": Case(lambda count: methods.heterofl(count=count), 5, lambda count: count),
    "stc": Case(lambda count: methods.stc(count=count), 1, lambda count: count),
    "anycost": Case(anycost, 5, lambda count: count),
    "buffered": Case(buffered, 1, lambda count: max(1, count // 5)),
}


def changing() -> world.Fleet:
    """Return devices whose loads and links change within an order; some die, some leave."""
    busy = world.Redrawn(world.LogNormal(median=1.0, sigma=0.4, low=0.2, high=5.0), every=0.02)
    link = world.Steady(
        world.Wandering(2e6, every=0.02),
        world.Wandering(4e6, every=0.02),
        send_power=0.3,
        receive_power=0.2,
    )
    return world.Fleet(
        groups=tuple(
            world.Group(
                name=f"level {i}",
                speed=2e6 / (i + 1),
                load=busy,
                link=link,
                battery=1e6,
                charge=0.9,
                recharge=0.02,
                mortality=0.02,
                availability=world.Intermittent(0.95, every=0.05),
            )
            for i in range(5)
        )
    )


WORLDS: dict[str, Callable[[], world.Fleet]] = {"steady": world.Fleet, "changing": changing}


def target(cohort: int, shapes: int, kind: str) -> float:
    """Return the milliseconds that a round may take beside training."""
    return (3 + 1.5 * shapes + 0.02 * cohort) * (3 if kind == "changing" else 1)


# -- stages


def stage(frame: FrameType | None) -> str:
    """Return the stage that is at work: of the innermost file that belongs to one."""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(PACKAGE):
            found = stage_of(name.removeprefix(PACKAGE))
            if found != REST:
                return found
        frame = frame.f_back
    return REST


def stage_of(path: str) -> str:
    """Return the stage that a file of the package belongs to, or the rest."""
    for name, starts in STAGES:
        if path.startswith(starts):
            return name
    return REST


@contextmanager
def looking(seen: dict[str, float]) -> Iterator[None]:
    """Add up the seconds of each stage, by looking at the main thread every millisecond."""
    last = time.perf_counter()

    def look(_: int, frame: FrameType | None) -> None:
        nonlocal last
        now = time.perf_counter()
        # Not a look each: during one long call of torch nobody can look.
        seen[stage(frame)] += now - last
        last = now

    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, EVERY, EVERY)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def shares(rounds: Rounds, seconds: float) -> dict[str, float]:
    """Return the share of each stage in some more rounds."""
    seen: defaultdict[str, float] = defaultdict(float)
    began = time.monotonic()
    with looking(seen):
        while time.monotonic() - began < seconds or not seen:
            next(rounds)
    total = sum(seen.values())
    return {name: spent / total for name, spent in seen.items()}


def processed(rounds: Rounds, spent: list[float]) -> Rounds:
    """Yield the rounds, and note the seconds that the processor spent on each."""
    while True:
        began = time.process_time()
        each = next(rounds)
        spent.append(time.process_time() - began)
        yield each


@contextmanager
def training_timed(spent: list[float]) -> Iterator[None]:
    """Add up, in the first entry, the seconds of the calls of local training."""
    train = CapturedTraining.__call__

    def timed(*given: Any, **named: Any) -> Any:
        began = time.perf_counter()
        try:
            return train(*given, **named)
        finally:
            spent[0] += time.perf_counter() - began

    CapturedTraining.__call__ = timed  # type: ignore[method-assign]
    try:
        yield
    finally:
        CapturedTraining.__call__ = train  # type: ignore[method-assign]


def row(name: str, kind: str, cohort: int, options: Options, seconds: float) -> tuple[Cell, ...]:
    """Return a row of the table: the whole round, its target, and microseconds by stage."""
    case, fleet = CASES[name], WORLDS[kind]()
    task = built(replace(WORKLOADS["tiny"], users=2 * cohort, cohort=cohort), options.device)
    method = idle(case.make(cohort))
    rounds, spent = play_rounds(method, task, options, fleet), list[float]()
    found = times_of(processed(rounds, spent), options, seconds=seconds)
    processor = 1e3 * statistics.median(spent[-found.rounds :])
    trained, begun = [0.0], time.perf_counter()
    with training_timed(trained):
        for _ in range(found.rounds):
            next(rounds)
    # The same part of the time in which these rounds were timed before.
    part = 0.0 if options.cuda else trained[0] / (time.perf_counter() - begun)
    training = part * found.ms
    split = shares(rounds, min(seconds, 2.0))
    orders, aim = case.orders(cohort), target(case.orders(cohort), case.shapes, kind)
    each = [1e3 * found.ms * split.get(stage, 0.0) / orders for stage in NAMES]
    host = found.ms - training
    told = verdict(host, aim, " ms")
    return (found.rounds, found.ms, training, host, processor, 1e3 * host / orders, *each, told)


NAMES = (*(name for name, _ in STAGES), REST)
TIMES = ("rounds", "ms a round", "training, ms", "host, ms", "processor, ms", "µs an order")
HEAD = ("method", "world", "cohort", *TIMES, *NAMES, "target")


def tables(
    options: Options,
    cohorts: Sequence[int] = COHORTS,
    names: Sequence[str] = tuple(CASES),
    kinds: Sequence[str] = tuple(WORLDS),
    seconds: float = 8.0,
) -> list[Table]:
    """Measure every method in every world with every size of the cohort."""
    rows = []
    for kind in kinds:
        for name in names:
            for cohort in cohorts:
                rows.append(
                    attempted(
                        lambda: row(name, kind, cohort, options, seconds),  # noqa: B023 - called here
                        len(HEAD),
                        name,
                        kind,
                        cohort,
                    )
                )
                last = rows[-1]
                ms = f"{last[6]:9.1f} ms" if isinstance(last[6], float) else "        -   "
                print(f"    {name:9} {kind:9} {cohort:6} {ms}  {last[-1]}", file=sys.stderr)
    notes = (
        "Columns from select on are microseconds of the host for each order of a round.",
        "The host's time is that of the round without training; the target is about it.",
        "Processor time, training included, is what a round takes where nothing else runs.",
        "The network has 778 parameters and nothing is trained; codecs, checks and ledger are on.",
    )
    return [Table("overhead", "Host time of a round by stage", HEAD, tuple(rows), notes)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    read = parser(__doc__)
    read.add_argument("--cohorts", type=int, nargs="+", default=COHORTS)
    read.add_argument("--methods", nargs="+", choices=CASES, default=tuple(CASES))
    read.add_argument("--worlds", nargs="+", choices=WORLDS, default=tuple(WORLDS))
    read.add_argument("--seconds", type=float, default=8.0, help="of each row, about")
    given = read.parse_args(arguments)
    options = given_options(given)
    found = tables(options, given.cohorts, given.methods, given.worlds, given.seconds)
    report("overhead", found, options, given.out)


if __name__ == "__main__":
    main()
