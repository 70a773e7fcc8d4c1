"""What unequal devices cost: mixed widths, mixed depths, and every method's milliseconds a round.

    python -m benchmarks.hetero --precision tf32
    python -m benchmarks.hetero --tables methods --cohort 20

Widths: cohorts of 50 and 500 with as many devices of each of five widths (HeteroFL) beside as many
devices that all have the one width whose FLOP are the cohort's mean. Depths: FedPMT's cohorts that
train all layers, only the last ones, and all depths mixed. Methods: every method of the package
with cohorts of 50 on C.3. "Stacked" says how many stacks a round trained, and where devices are
trained one by one why; "host" are the milliseconds of a round in which nothing is trained (on a
GPU: in which no kernel runs).
"""

import inspect
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from benchmarks.kernels import busy
from benchmarks.measuring import (
    WORKLOADS,
    Cell,
    Options,
    Rounds,
    Table,
    Workload,
    attempted,
    built,
    counted_starts,
    given_options,
    parser,
    play_rounds,
    report,
    timed,
    times_of,
    verdict,
)
from benchmarks.overhead import shares

from anyfleet import elastic, methods
from anyfleet.core.method import Method
from anyfleet.parts.plan import TrainedLayersByLevel
from anyfleet.parts.select import Quota

WIDTHS: tuple[float, ...] = (1, 1 / 2, 1 / 4, 1 / 8, 1 / 16)
CLIENTS = (50, 500)
GOALS = {50: 1.3, 500: 1.0}
TABLES = ("widths", "depths", "methods")


def flops(task: Any, width: float) -> int:
    """Return the FLOP of one sample at a width, forward and backward."""
    return elastic.cost(task.blueprint, task.blueprint.prefix(width)).flops


def equivalent(task: Any) -> float:
    """Return the one width whose FLOP are nearest to the mean of the five."""
    mean = sum(flops(task, width) for width in WIDTHS) / len(WIDTHS)
    low, high = min(WIDTHS), 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if flops(task, middle) < mean else (low, middle)
    return min((low, high), key=lambda width: abs(flops(task, width) - mean))


def resized(work: Workload, cohort: int) -> Workload:
    """Return the workload with another cohort, of no more than all devices."""
    return replace(work, cohort=cohort, users=max(work.users, cohort))


def mixed(work: Workload, widths: tuple[float, ...]) -> Method:
    """Return HeteroFL with as many devices of each level."""
    made = methods.heterofl(
        widths=widths, count=work.cohort, lr=work.lr, batch_size=work.batch, epochs=1
    )
    return replace(made, select=Quota(work.cohort))


WIDTHS_HEAD = ("clients", "cohort", "GFLOP", "ms a round", "lowest", "highest", "first, s")


def widths(options: Options, clients: Sequence[int] = CLIENTS) -> Table:
    """Measure cohorts of five widths, after their equivalents of one width."""
    head = (*WIDTHS_HEAD, "× equivalent", "target")
    found: list[tuple[Cell, ...]] = []
    for count in clients:
        work = resized(WORKLOADS["C.3"], count)
        task = built(work, options.device)
        same = equivalent(task)
        kinds: dict[str, tuple[float, ...]] = {
            f"all of width {same:.3g}": (same,) * 5,
            "all of width 1": (1.0,) * 5,
            "five widths": WIDTHS,
        }
        known: list[float] = []
        for text, own in kinds.items():
            run = partial(_width_row, work, task, options, own, known)
            found.append(attempted(run, len(head), count, text))
            _say(*found[-1])
    return Table("widths", "Five widths in one cohort (C.3)", head, tuple(found))


def _width_row(
    work: Workload, task: Any, options: Options, own: tuple[float, ...], known: list[float]
) -> tuple[Cell, ...]:
    """Return the row of one cohort; `known` has the milliseconds of those before it."""
    count = work.cohort
    each = timed(mixed(work, own), task, options, seconds=30.0, replies=count)
    known.append(each.ms)
    done = sum(flops(task, width) for width in own) / len(own) * count * work.samples
    ratio = each.ms / known[0] if own is WIDTHS else None
    told = verdict(ratio, GOALS.get(count, 1.3)) if ratio else ""
    return done / 1e9, each.ms, each.low, each.high, each.first, ratio, told


def depths(options: Options, cohort: int = 50) -> Table:
    """Measure cohorts of FedPMT that train all layers, the last ones, and all depths mixed."""
    work = resized(WORKLOADS["C.3"], cohort)
    task = built(work, options.device)
    layers = len(task.blueprint.layers)
    head = ("trained layers", "ms a round", "lowest", "highest", "share of all layers")
    found: list[tuple[Cell, ...]] = []
    plans: dict[str, tuple[int, ...]] = {
        f"last {count} of {layers}" if count < layers else "all": (count,)
        for count in range(layers, 0, -1)
    }
    plans["every depth, mixed"] = tuple(range(layers, 0, -1))
    whole: list[float] = []
    for text, trained in plans.items():
        made = methods.fedpmt(count=cohort, lr=work.lr, batch_size=work.batch, epochs=1)
        method = replace(made, plan=TrainedLayersByLevel(trained_layers=trained))

        def row(method: Method = method) -> tuple[Cell, ...]:
            each = timed(method, task, options, seconds=20.0, replies=cohort)
            whole.append(each.ms)
            return each.ms, each.low, each.high, each.ms / whole[0]

        found.append(attempted(row, len(head), text))
        _say(*found[-1])
    return Table("depths", f"FedPMT's depths (C.3, cohorts of {cohort})", head, tuple(found))


# -- every method


Maker = Callable[[Workload], Method]


def every(cohort: int) -> dict[str, tuple[Maker, bool]]:
    """Return how to make every method for a cohort, and whether it asks every device."""

    def maker(name: str) -> tuple[Maker, bool]:
        make = getattr(methods, name)
        own: dict[str, Any] = {}
        names = inspect.signature(make).parameters
        if "count" in names:
            own["count"] = cohort
        if name == "bn2":
            own = {"draw": cohort, "keep": cohort // 2}
        if name == "anycost":
            own["seconds"] = 1e6  # so that everybody takes part

        def made(work: Workload) -> Method:
            found: Method = make(lr=work.lr, batch_size=work.batch, epochs=1, **own)
            return found

        return made, not own

    names = sorted(methods.__all__, key=lambda name: (name != "fedavg", name))
    return {name: maker(name) for name in names}


HEAD = ("method", "orders", "ms a round", "lowest", "highest", "host, ms", "× FedAvg", "stacked")


def all_methods(options: Options, cohort: int = 50, work_name: str = "C.3") -> Table:
    """Measure every method; "centralised" trains all data of one device."""
    found: list[tuple[Cell, ...]] = []
    plain: list[float] = []
    for name, (make, everyone) in every(cohort).items():
        alone = name == "centralised"
        users = 1 if alone else cohort if everyone else WORKLOADS[work_name].users
        work = replace(WORKLOADS[work_name], users=users, cohort=cohort)

        def row(make: Maker = make, work: Workload = work) -> tuple[Cell, ...]:
            task, method = built(work, options.device), make(work)
            rounds = play_rounds(method, task, options)
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                each = times_of(rounds, options, seconds=12.0)
                text = stacked(rounds, method, [str(one.message) for one in said])
            plain.append(each.ms)
            host = host_ms(rounds, options, each.ms)
            ratio = each.ms / plain[0]
            return each.replies, each.ms, each.low, each.high, host, ratio, text

        found.append(attempted(row, len(HEAD), name))
        _say(*found[-1])
    title = f"Every method ({work_name}, cohorts of {cohort})"
    fleets = f"Methods that ask every device have a fleet of {cohort}, the others one of 1,000;"
    notes = (
        f"Orders are those of a round that counted. {fleets} centralised has one device.",
        "FedResCuE must take at most 6 times as long as FedAvg.",
    )
    return Table("methods", title, HEAD, tuple(found), notes)


def stacked(rounds: Rounds, method: Method, said: Sequence[str]) -> str:
    """Return how the devices of one more round are trained; `said` are the warnings so far."""
    calls = [0]
    with counted_starts(method.train, calls):
        _, result = next(rounds)
    orders = len(result.round.ledger.failure)
    if calls[0] == 0:
        return "stacked, replayed"
    if orders > 1 and calls[0] >= orders:
        why = next((each for each in said if "stack" in each), "trained one by one")
        return f"no: {why}"
    return f"stacked ({calls[0]} for {orders} orders)" if orders > 1 else "one device"


def host_ms(rounds: Rounds, options: Options, ms: float) -> float:
    """Return the milliseconds of a round in which nothing is trained."""
    if options.cuda:
        return max(0.0, ms - busy(rounds)[0])
    return ms * (1 - shares(rounds, 1.0).get("train launch", 0.0))


def _say(*row: Cell) -> None:
    text = " ".join(f"{each:.2f}" if isinstance(each, float) else str(each or "") for each in row)
    print(f"    {time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    read = parser(__doc__)
    read.add_argument("--tables", nargs="+", choices=TABLES, default=TABLES)
    read.add_argument("--clients", type=int, nargs="+", default=CLIENTS, help="of the widths")
    read.add_argument("--cohort", type=int, default=50, help="of depths and methods")
    read.add_argument("--work", choices=WORKLOADS, default="C.3", help="of the methods")
    given = read.parse_args(arguments)
    options = given_options(given)
    made = {
        "widths": lambda: widths(options, given.clients),
        "depths": lambda: depths(options, given.cohort),
        "methods": lambda: all_methods(options, given.cohort, given.work),
    }
    report("hetero", [made[name]() for name in given.tables], options, given.out)
    if options.cuda:
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
