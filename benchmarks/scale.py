"""How time and memory grow: with the cohort, the fleet, the model and the threads of a CPU.

    python -m benchmarks.scale
    python -m benchmarks.scale --tables cohort --cohorts 10 100 1000 10000

Cohorts train on C.3 (on a CPU on C.2) with 10 samples a device. Fleets are of up to a million
devices, of which 100 are asked in a round. Models are perceptrons of up to ten million parameters.
"Ratios" holds FedAdp with 1,000 devices and FedResCuE beside FedAvg. The peak of the process's
memory is that since its start, so rows are measured from the smallest to the largest.
"""

import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from benchmarks.measuring import (
    WORKLOADS,
    Cell,
    Options,
    Table,
    Workload,
    attempted,
    built,
    given_options,
    parser,
    report,
    timed,
    verdict,
)
from torch import nn

from anyfleet import methods
from anyfleet.core.method import Method

COHORTS = (10, 100, 1_000, 10_000)
FLEETS = (1_000, 10_000, 100_000, 1_000_000)
SIZES = (10_000, 100_000, 1_000_000, 10_000_000)
TABLES = ("cohort", "fleet", "model", "threads", "ratios")


def peaks(options: Options) -> tuple[float | None, float]:
    """Return the most memory of the accelerator, if there is one, and of this process, in MB."""
    unit = 1 if sys.platform == "darwin" else 1024
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6
    return torch.cuda.max_memory_allocated() / 1e6 if options.cuda else None, own


def fedavg(work: Workload) -> Method:
    """Return FedAvg with the settings of a workload."""
    return methods.fedavg(count=work.cohort, lr=work.lr, batch_size=work.batch, epochs=1)


def row(
    work: Workload,
    options: Options,
    make: Callable[[Workload], Method] = fedavg,
    seconds: float = 20.0,
) -> tuple[float, float, float, float, float | None, float]:
    """Return milliseconds of rounds, microseconds of an order, and peaks of memory in MB."""
    if options.cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    task = built(work, options.device)
    each = timed(make(work), task, options, seconds=seconds, replies=work.cohort)
    per_order = 1e3 * each.ms / work.cohort
    return each.ms, each.low, each.high, per_order, *peaks(options)


TIMES = ("ms a round", "lowest", "highest", "µs an order", "accelerator, MB", "process, MB")


def measured(
    name: str, title: str, first: str, cases: Sequence[tuple[Cell, Callable[[], tuple[Cell, ...]]]]
) -> Table:
    """Return the table of some cases."""
    head, found = (first, *TIMES), []
    for label, run in cases:
        found.append(attempted(run, len(head), label))
        text = " ".join(f"{x:.1f}" if isinstance(x, float) else str(x) for x in found[-1])
        print(f"    {time.strftime('%H:%M:%S')} {name} {text}", file=sys.stderr, flush=True)
    return Table(name, title, head, tuple(found))


def cohorts(options: Options, counts: Sequence[int] = COHORTS) -> Table:
    """Measure cohorts of growing size."""
    base = replace(WORKLOADS["C.3" if options.cuda else "C.2"], samples=10)
    cases = [
        (count, partial(row, replace(base, cohort=count, users=max(1000, count)), options))
        for count in counts
    ]
    return measured("cohort", f"Size of the cohort ({base.name}, 10 samples)", "cohort", cases)


def fleets(options: Options, sizes: Sequence[int] = FLEETS) -> Table:
    """Measure cohorts of 100 out of growing fleets; the network has 778 parameters."""
    base = replace(WORKLOADS["tiny"], cohort=100)
    cases = [(size, partial(row, replace(base, users=size), options)) for size in sizes]
    return measured("fleet", "Size of the fleet (cohorts of 100)", "devices", cases)


def sized(size: int) -> nn.Module:
    """Return a perceptron with two hidden layers and about so many parameters."""
    hidden = max(4, round(((794**2 + 4 * size) ** 0.5 - 794) / 2))
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(784, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, 10),
    )


def models(options: Options, sizes: Sequence[int] = SIZES) -> Table:
    """Measure cohorts of 50 that train models of growing size."""
    cases = []
    for size in sizes:
        net = partial(sized, size)
        work = Workload(f"{size:,} parameters", net, (1, 28, 28))
        exact = sum(each.numel() for each in net().parameters())
        cases.append((exact, partial(row, work, options)))
    return measured("model", "Size of the model (cohorts of 50)", "parameters", cases)


def threads(options: Options, counts: Sequence[int] = ()) -> Table:
    """Measure C.1 to C.4 on a CPU with one thread of torch, with two, and so on."""
    own = replace(options, device="cpu", precision="float32", compile=False)
    most, before = torch.get_num_threads(), torch.get_num_threads()
    counts = counts or sorted({1, 2, most})

    def run(work: Workload, count: int) -> tuple[Cell, ...]:
        torch.set_num_threads(count)
        try:
            return row(work, own)
        finally:
            torch.set_num_threads(before)

    cases: list[tuple[Cell, Callable[[], tuple[Cell, ...]]]] = [
        (f"{name}, {count}", partial(run, replace(WORKLOADS[name], users=100, cohort=10), count))
        for name in ("C.1", "C.2", "C.3", "C.4")
        for count in counts
    ]
    return measured("threads", "Threads of a CPU (cohorts of 10)", "work, threads", cases)


def ratios(options: Options, everyone: int = 1000, cohort: int = 50) -> Table:
    """Measure FedAdp with all of 1,000 devices, and FedResCuE, beside FedAvg."""
    work = WORKLOADS["C.3"]
    large = replace(work, cohort=everyone, users=everyone)
    usual = replace(work, cohort=cohort)

    def adaptive(own: Workload) -> Method:
        return methods.fedadp(lr=own.lr, batch_size=own.batch, epochs=1)

    def resilient(own: Workload) -> Method:
        return methods.fedrescue(count=own.cohort, lr=own.lr, batch_size=own.batch, epochs=1)

    head = ("method", "devices", "ms a round", "lowest", "highest", "× FedAvg", "target")
    found: list[tuple[Cell, ...]] = []
    for own, name, make, goal in (
        (large, "fedadp", adaptive, 1.5),
        (usual, "fedrescue", resilient, 6.0),
    ):
        plain: list[float] = []

        def run(
            own: Workload = own,
            make: Callable[[Workload], Method] = fedavg,
            goal: float = 0.0,
            plain: list[float] = plain,
        ) -> tuple[Cell, ...]:
            ms, low, high, *_ = row(own, options, make, seconds=30.0)
            plain.append(ms)
            ratio = ms / plain[0]
            return ms, low, high, ratio, verdict(ratio, goal) if goal else ""

        found.append(attempted(run, len(head), "fedavg", own.cohort))
        run_other = partial(run, make=make, goal=goal)
        if plain:
            found.append(attempted(run_other, len(head), name, own.cohort))
        print("   ", *found[-1], file=sys.stderr, flush=True)
    return Table("ratios", "FedAdp and FedResCuE beside FedAvg (C.3)", head, tuple(found))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    read = parser(__doc__)
    read.add_argument("--tables", nargs="+", choices=TABLES, default=TABLES)
    read.add_argument("--cohorts", type=int, nargs="+", default=COHORTS)
    read.add_argument("--fleets", type=int, nargs="+", default=FLEETS)
    read.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="of models")
    read.add_argument("--counts", type=int, nargs="+", default=(), help="of threads")
    read.add_argument("--everyone", type=int, default=1000, help="devices of FedAdp")
    given = read.parse_args(arguments)
    options = given_options(given)
    made = {
        "cohort": lambda: cohorts(options, given.cohorts),
        "fleet": lambda: fleets(options, given.fleets),
        "model": lambda: models(options, given.sizes),
        "threads": lambda: threads(options, given.counts),
        "ratios": lambda: ratios(options, given.everyone),
    }
    report("scale", [made[name]() for name in given.tables], options, given.out)


if __name__ == "__main__":
    main()
