"""Quartet and its four parents, for the same simulated time and for the same energy.

    python benchmarks/quartet.py --device cuda --jobs 14        # an H200: about ten minutes
    python benchmarks/quartet.py --rounds 3 --seeds 1           # a look, on a processor

Fashion-MNIST (from the folder that ANYFLEET_DATA names), network C.4, AnycostFL's cell: sixty
devices of about a thousand pictures (Dirichlet 0.5), fifteen a round, five seconds and 1.5 to 4.5
joules for each, 2.1 million cycles a picture. Both readings of the path loss: slow links (40 dB at
one metre) and fast ones (0 dB). The parents are as fair as they can be: who plans no frequency runs
as slowly as is in time, HeteroFL picks the largest of four sizes that time and energy allow, and
who sends everything sends it like QSGD. The small version of all this lies in recipes/quartet.
"""

import argparse
import multiprocessing
import statistics
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import torch

from anyfleet.analysis.equal_budgets import (
    UNITS,
    Resource,
    Within,
    common_amount,
    first_after,
    within,
)
from anyfleet.analysis.units import quantity
from anyfleet.core.method import Method
from anyfleet.experiment import Experiment, RoundRecord, play
from anyfleet.methods import anycost, fedadp, heterofl, stc
from anyfleet.methods.fedavg import Training
from anyfleet.names import Factory
from anyfleet.parts.aggregate import AngleWeighted
from anyfleet.parts.choose import MostGain
from anyfleet.parts.codec import ErrorFeedback, Fgc, Qsgd, TopK
from anyfleet.parts.plan import JustInTime, WidthMenu
from anyfleet.parts.select import Uniform as Some
from anyfleet.runtime import Stacked
from anyfleet.tasks import Dirichlet, FashionMnist, zoo
from anyfleet.world import Redrawn, Shannon, Uniform, cell

SECONDS = 5.0
COUNT = 15
SGD: Training = {"lr": 0.03, "batch_size": 32}
SIZES = (1.0, 0.866, 0.7071, 0.5)  # alpha of 1, 3/4, 1/2, 1/4
LOSSES = (40.0, 0.0)  # dB at one metre
TASK = FashionMnist(
    model=Factory.of(zoo.mcmahan_cnn), devices=60, partition=Dirichlet(0.5), server=500
)


def methods() -> Mapping[str, Method]:
    """Return the methods by name: the mixture first, then its parents."""
    like_qsgd, paced = TopK(0.15, Qsgd()), JustInTime(SECONDS)
    budgeted = anycost(seconds=SECONDS, count=COUNT, **SGD)
    return {
        "Quartet": replace(
            anycost(seconds=SECONDS, count=COUNT, masked=True, label_rows=True, **SGD),
            uplink=ErrorFeedback(Fgc()),
            aggregate=AngleWeighted(),
        ),
        "AnycostFL": budgeted,
        "STC": replace(stc(keep=1 / 40, count=COUNT, **SGD), plan=paced),
        "HeteroFL": replace(
            heterofl(count=COUNT, **SGD),
            plan=WidthMenu(SIZES),
            choose=MostGain(SECONDS),
            uplink=like_qsgd,
        ),
        "FedAdp": replace(fedadp(**SGD), select=Some(COUNT), plan=paced, uplink=like_qsgd),
    }


@dataclass(frozen=True)
class Job:
    """One run."""

    method: str
    loss: float
    seed: int
    rounds: int
    device: str
    limit: int | None = None  # of the pictures, for a quick look


def played(job: Job) -> tuple[RoundRecord, ...]:
    """Run one job; return its records, a round each."""
    torch.set_num_threads(1)
    fleet = cell(
        flops_per_cycle=35.0,  # 73.6 million FLOP of a picture take 2.1 million cycles
        budget=Redrawn(Uniform(1.5, 4.5)),
        link=Shannon(ref_loss_db=job.loss),
    )
    spec = replace(TASK, limit=job.limit)
    experiment = Experiment(
        spec,
        methods()[job.method],
        fleet,
        engine=Stacked(),
        device=job.device,
        rounds=job.rounds,
        seed=job.seed,
    )
    return tuple(result.record for result in play(experiment))


Runs = Mapping[str, Sequence[Sequence[RoundRecord]]]


def table(runs: Runs, resource: Resource) -> Iterator[str]:
    """Yield the accuracy of all methods for the least that any run used of a resource."""
    amount = common_amount([records for group in runs.values() for records in group], resource)
    yield f"for {quantity(amount, UNITS[resource])}:"
    heads = f"{'accuracy %':>12} {'best %':>8} {'rounds':>8} {'s':>7} {'J':>8} {'MB up':>7}"
    yield f"  {'':<10} {heads}"
    for name, group in runs.items():
        found = [within(records, resource, amount) for records in group]
        pairs = zip(group, found, strict=True)
        known = [(records[each.spent.rounds - 1], each) for records, each in pairs if each.spent]
        short = [each for each in found if each.spent is None]
        if short:
            yield f"  {name:<10} {len(short)} of {len(found)} {first_after(short)}"
        if known:
            yield f"  {name:<10} {_row(known)}"


def _row(known: Sequence[tuple[RoundRecord, Within]]) -> str:
    """Return means over the runs that were evaluated for the amount, as of that evaluation."""
    scores = [100 * each.accuracy for _, each in known]
    deviation = statistics.stdev(scores) if len(scores) > 1 else 0.0
    mean = statistics.mean
    return (
        f"{mean(scores):>6.1f} ± {deviation:<3.1f} {100 * mean(e.best for _, e in known):>8.1f} "
        f"{mean(record.round_index + 1 for record, _ in known):>8.1f} "
        f"{mean(record.time for record, _ in known):>7.0f} "
        f"{mean(record.joules for record, _ in known):>8.0f} "
        f"{mean(record.up for record, _ in known) / 1e6:>7.1f}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all methods, and print a table for each path loss and resource."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--limit", type=int, help="use only so many pictures")
    given = parser.parse_args(arguments)
    rest = given.rounds, given.device, given.limit
    jobs = [
        Job(name, loss, seed, *rest)
        for seed in range(given.seeds)
        for loss in LOSSES
        for name in methods()
    ]
    if given.jobs > 1:
        # Fresh processes: a GPU cannot be shared with a copy of this one.
        with ProcessPoolExecutor(given.jobs, multiprocessing.get_context("spawn")) as pool:
            done = dict(zip(jobs, pool.map(played, jobs), strict=True))
    else:
        done = {job: played(job) for job in jobs}
    for loss in LOSSES:
        runs = {
            name: [done[job] for job in jobs if (job.method, job.loss) == (name, loss)]
            for name in methods()
        }
        print(f"\n{loss:g} dB at one metre")
        for resource in ("time", "energy"):
            print("\n".join(table(runs, resource)))


if __name__ == "__main__":
    main()
