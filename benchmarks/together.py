"""Seeds of one run played together: how much longer eight take than one.

    python -m benchmarks.together
    python -m benchmarks.together --device cuda --runs 8 --meetings 1 2 4

Every seed has its own task: the same random samples, other devices. "C.2, 10" is the run of the
paper on FedAvg (cohorts of 10, 600 samples a device, minibatches of 10, 5 epochs), "C.2, 32" the
same with minibatches of 32, "C.3" a run of many small orders (cohorts of 50, 50 samples,
minibatches of 10, 1 epoch). A round of all runs lies between two results of the
last run; nobody waits for the accelerator in between, so that runs may overlap. "Idle" are the
milliseconds of the same rounds with a trainer that returns at once: what the host does for all
runs, one after the other. The target is about the ratio to a single run, played by `play`.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from benchmarks.measuring import (
    WORKLOADS,
    Cell,
    Options,
    Rounds,
    Table,
    Timing,
    Workload,
    attempted,
    built,
    experiment,
    given_options,
    parser,
    report,
    times_of,
    verdict,
)
from benchmarks.overhead import idle

from anyfleet.core.method import Method
from anyfleet.experiment import Prepared, prepare
from anyfleet.methods import fedavg
from anyfleet.together import MEETINGS, play_together

TARGET = 2.0  # times a single run, that eight may take
HEAD = ("work", "runs", "meetings", "ms a round", "lowest", "highest", "first, s", "idle, ms")


@dataclass(frozen=True)
class Case:
    """A workload, and the epochs of an order."""

    work: Workload
    epochs: int


_USUAL = replace(WORKLOADS["C.2"], users=100, cohort=10, samples=600)
CASES = {
    "C.2, 10": Case(replace(_USUAL, batch=10), 5),
    "C.2, 32": Case(replace(_USUAL, batch=32), 5),
    "C.3": Case(WORKLOADS["C.3"], 1),
}


def method(case: Case) -> Method:
    """Return FedAvg with the settings of a case."""
    work = case.work
    return fedavg(count=work.cohort, lr=work.lr, batch_size=work.batch, epochs=case.epochs)


def seeds(case: Case, count: int, options: Options, how: Method) -> list[Prepared]:
    """Return so many runs, each with a task of its own."""
    task = built(case.work, options.device)
    found = []
    for seed in range(count):
        rows = (*task.train_rows[seed:], *task.train_rows[:seed])
        own = replace(task, train_rows=rows)
        found.append(prepare(replace(experiment(how, own, options), seed=seed), own))
    return found


def rounds_alone(run: Prepared) -> Rounds:
    """Yield the seconds and the result of every round of a run, played by `play`."""
    before = time.perf_counter()
    for result in run.play():
        now = time.perf_counter()
        yield now - before, result
        before = now


def rounds_together(runs: Sequence[Prepared], meetings: int) -> Rounds:
    """Yield the seconds between two results of the last run, and that result."""
    before, last = time.perf_counter(), len(runs) - 1
    for number, result in play_together(runs, [None] * len(runs), meetings=meetings):
        if number == last:
            now = time.perf_counter()
            yield now - before, result
            before = now


def times(case: Case, count: int, meetings: int, options: Options, how: Method) -> Timing:
    """Return how long rounds of so many runs take; without meetings, of one run alone."""
    runs = seeds(case, count, options, how)
    rounds = rounds_together(runs, meetings) if meetings else rounds_alone(runs[0])
    found = times_of(rounds, options, seconds=60.0, replies=case.work.cohort)
    rounds.close()  # type: ignore[attr-defined]
    if options.cuda:
        torch.cuda.empty_cache()
    return found


def table(
    names: Sequence[str], counts: Sequence[int], meetings: Sequence[int], options: Options
) -> Table:
    """Measure single runs, and so many runs together."""
    head, found = (*HEAD, "× one run", "target"), []
    for name in names:
        case, single = CASES[name], [float("nan")]

        def row(count: int, many: int, case: Case = case, single: list[float] = single) -> Row:
            took = times(case, count, many, options, method(case))
            without = times(case, count, many, options, idle(method(case)))
            if not many:
                single[0] = took.ms
            ratio = took.ms / single[0]
            told = verdict(ratio, TARGET) if many else ""
            return took.ms, took.low, took.high, took.first, without.ms, ratio, told

        for count, many in ((1, 0), *((n, m) for n in counts for m in meetings)):
            cells = attempted(partial(row, count, many), len(head), name, count, many)
            found.append(cells)
            text = " ".join(f"{x:.1f}" if isinstance(x, float) else str(x) for x in cells)
            print(f"    {time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
    usual = f"on a GPU {MEETINGS} unless told otherwise, on a CPU always one"
    notes = (
        "A round is one of every run. No meeting: a single run, played by itself.",
        f"Meetings are those that runs are divided into; {usual}.",
    )
    return Table("together", "Seeds of one run, played together", head, tuple(found), notes)


Row = tuple[Cell, ...]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    read = parser(__doc__)
    read.add_argument("--works", nargs="+", choices=CASES, default=tuple(CASES))
    read.add_argument("--runs", type=int, nargs="+", default=(8,), help="that are played together")
    read.add_argument("--meetings", type=int, nargs="+", help="that they are divided into")
    given = read.parse_args(arguments)
    options = given_options(given)
    meetings = given.meetings or ((1, 2, 4) if options.cuda else (1,))
    report("together", [table(given.works, given.runs, meetings, options)], options, given.out)


if __name__ == "__main__":
    main()
