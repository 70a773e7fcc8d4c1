"""What it costs to ask 100 devices of a fleet of thousands to a million: time and memory.

    python benchmarks/fleet.py                  # 1e3 to 1e6 devices, everything: some minutes
    python benchmarks/fleet.py --devices 1000000 --select Everyone --rounds 5

The fleet is on the move: devices change places in a cell with Shannon links, or have bit rates
that wander (AR(1)); they come and go by the hour or at random; batteries run down and recharge;
load and free memory are drawn anew each round. The server, the loop's bookkeeping and the simulated
runtime are the real ones. Only training is left out: an engine replies at once, and with nothing.

"ask" is the time from `Server.issue` to the moment when the orders are handed to the runtime:
selection, plans, menus and choices, slices, orders, what travels down. "rest" is everything else of
the round: charging, the clock, replies, aggregation and the snapshot. Both are medians over
rounds, in milliseconds of CPU time: with one thread that is the time on the clock of a machine that
has nothing else to do. Each fleet and selection has a process of its own, whose peak memory is that
of all its planners; what Python and torch take before there is a fleet is given apart.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from anyfleet import world as worlds
from anyfleet.core.device_states import Remembered
from anyfleet.core.orders import Cohort
from anyfleet.core.server import Server
from anyfleet.core.signals import HeldResults, Signal
from anyfleet.core.slots import Choose, Plan, Select
from anyfleet.core.stacks import Replies, Stack
from anyfleet.core.view import Request, View
from anyfleet.methods import fedavg
from anyfleet.parts import choose
from anyfleet.parts import plan as sizes
from anyfleet.parts import select as selections
from anyfleet.parts.aggregate import Subset
from anyfleet.parts.codec import Hq
from anyfleet.parts.schedule import Synchronous
from anyfleet.parts.select.learned import Chances
from anyfleet.runtime import Simulated
from anyfleet.runtime.simulated.engines import Assignment, Engine, Executed
from anyfleet.tasks import Data, Split, Task
from anyfleet.tasks.partition import Iid
from anyfleet.tasks.zoo import cnn_mnist

COHORT = 100
SIZES = (1_000, 10_000, 100_000, 1_000_000)
SEED = 7


@dataclass(frozen=True)
class Learned(selections.Learned):
    """As after many rounds: no two devices have the same chance."""

    def init(self, view: View) -> Chances:
        even = super().init(view)
        chances = np.arange(1.0, len(view.devices) + 1)
        return even._replace(probability=chances / chances.sum())


SELECTORS: Mapping[str, Callable[[int], Select]] = {
    "Everyone": lambda _: selections.Everyone(),
    "Uniform(count)": lambda _: selections.Uniform(COHORT),
    "Uniform(fraction)": lambda devices: selections.Uniform(fraction=COHORT / devices),
    "Quota": lambda _: selections.Quota(COHORT),
    "Learned": lambda _: Learned(COHORT),
    "Largest": lambda _: selections.Largest(COHORT, COHORT // 2),
    "InOrder": lambda _: selections.InOrder(COHORT),
}
FIRST = choose.First()
PLANNERS: Mapping[str, tuple[Plan, Choose]] = {
    "WholeModel": (sizes.WholeModel(), FIRST),
    "WidthByLevel": (sizes.WidthByLevel(), FIRST),
    "WidthMenu, First": (sizes.WidthMenu(), FIRST),
    "WidthMenu, LargestInTime": (sizes.WidthMenu(), choose.LargestInTime(60.0)),
    "TargetSeconds, FisherUtility": (
        sizes.TargetSeconds(sizes.WidthMenu(capped=True)),
        choose.FisherUtility(),
    ),
    "WidthMenu, MostGain": (sizes.WidthMenu(), choose.MostGain(60.0)),
    "JustInTime": (sizes.JustInTime(60.0, sizes.WidthByLevel()), FIRST),
    "SentFractionByLevel": (sizes.SentFractionByLevel((1 / 8, 1 / 32)), FIRST),
    "SentFractionByLink": (sizes.SentFractionByLink(), FIRST),
    "TrainedLayersByLevel": (sizes.TrainedLayersByLevel(4), FIRST),
    "TrainedLayersMenu": (sizes.TrainedLayersMenu(4), choose.LargestInTime(60.0)),
    "Assigned": (sizes.Assigned(sizes.WidthMenu(), choose.LargestInTime(60.0)), FIRST),
    "LocalStepsWithin": (sizes.LocalStepsWithin(60.0, inner=sizes.WidthByLevel()), FIRST),
    "LargestFitting": (sizes.LargestFitting(), FIRST),
    "WorkByLevel": (sizes.WorkByLevel((32, 16, 8), (3, 2, 1), inner=sizes.WidthByLevel()), FIRST),
}


def fleet() -> worlds.Fleet:
    """Return four kinds of devices; everything that can change does."""
    phone = worlds.Group(
        name="phones",
        speed=worlds.Uniform(1e9, 4e9),
        load=worlds.Redrawn(worlds.LogNormal(1.2, 0.3, low=1.0, high=8.0)),
        memory=worlds.Redrawn(worlds.Uniform(5e7, 2e9)),
        link=worlds.Shannon(fading=True),
        distance=worlds.Redrawn(worlds.Disc(550.0)),
        battery=worlds.Uniform(2e4, 5e4),
        charge=worlds.Uniform(0.05, 1.0),
        recharge=2.0,
        availability=worlds.Diurnal(),
    )
    wandering = worlds.Steady(
        worlds.Wandering(2e7), worlds.Wandering(2e7), send_power=1.2, receive_power=1.0
    )
    nearby = worlds.Steady(
        worlds.Wandering(8e7), worlds.Wandering(8e7), send_power=0.8, receive_power=0.6
    )
    by_minute, by_round = worlds.Intermittent(0.3, every=60.0), worlds.Intermittent(0.6)
    return worlds.Fleet(
        groups=(
            phone,
            replace(phone, name="tablets", link=wandering, distance=100.0),
            replace(phone, name="laptops", link=nearby, availability=by_minute),
            replace(phone, name="cars", availability=by_round, battery=1e5, recharge=50.0),
        )
    )


@dataclass(frozen=True)
class Idle(Engine):
    """An engine that trains nothing: every order gets a reply, with an empty report."""

    bits: float = 1e6

    def start(self, task: object, limits: object) -> "Idle":
        return self

    def execute(self, given: Assignment, states: object) -> Executed:
        orders, count = given.orders, len(given.orders)
        replies = Replies(
            order=orders.id,
            device=orders.device,
            samples=np.ones(count, dtype=np.int64),
            bits=np.full(count, self.bits),
            delivered_width=np.ones(count),
            stack_index=np.zeros(count, dtype=np.int64),
            place=np.arange(count),
            stacks=(Stack(),),
        )
        return Executed(replies, Remembered.of(orders))


@dataclass(frozen=True)
class Handful(Synchronous):
    """A cohort of `COHORT` devices, whatever the selection names.

    Only asking is measured, so it may promise to any selection that results wait on the devices.
    """

    provides: ClassVar[frozenset[Signal]] = frozenset({HeldResults()})

    def start(self, view: View) -> tuple[Request, ...]:
        return tuple(replace(request, count=COHORT) for request in super().start(view))


class Watched(Simulated):
    """A simulated runtime that notes what it was handed, and when."""

    handed_at = float("nan")
    orders = 0

    def submit(self, orders: Cohort) -> None:
        self.handed_at, self.orders = time.process_time(), len(orders)
        super().submit(orders)


@dataclass(frozen=True)
class Rounds:
    """How many count, after some that only fill the caches of what slices cost."""

    rounds: int = 15
    warm: int = 2


@dataclass(frozen=True)
class Built:
    """What a fleet is before anybody is asked."""

    devices: int
    seconds: float
    bytes_per_device: float


@dataclass(frozen=True)
class Measured:
    """One selector with one planner: medians over rounds."""

    plan: str
    ask: float  # milliseconds
    rest: float  # milliseconds
    orders: float  # handed to the runtime in a round
    clock: float  # simulated seconds at the end


def build(devices: int) -> tuple[Task, worlds.World, Built]:
    """Return a task whose devices all hold the same data, its world, and what that took."""
    # A million references to the same rows.
    one, shared = _one(), _one().train_rows * devices
    task = replace(one, train_rows=shared, test_rows=one.test_rows * devices)
    samples = np.full(devices, len(one.data(0)), dtype=np.int64)
    began = time.process_time()
    world = fleet().build(samples, SEED)
    took = time.process_time() - began
    arrays = (world.declared.level, world.declared.samples, world.group, world.link)
    return task, world, Built(devices, took, sum(array.nbytes for array in arrays) / devices)


@lru_cache(maxsize=1)
def _one() -> Task:
    rows = Data(torch.zeros(60, 1, 28, 28), torch.arange(60) % 10)
    split = Split(devices=1, partition=Iid(samples=25), test_share=0.2, server=20, seed=1)
    return Task.of(cnn_mnist(), rows, rows, split=split)


def measure(task: Task, world: worlds.World, select: str, plan: str, counted: Rounds) -> Measured:
    """Run some rounds of FedAvg with another selection and another planner.

    The codec follows planned sent fractions; nobody trains, so it costs nothing here.
    """
    runtime = Watched(task, world, engine=Idle())
    base = replace(
        fedavg(), schedule=Handful(), aggregate=Subset(), uplink=Hq(sent_fraction=1 / 32)
    )
    who, (size, choose) = SELECTORS[select](task.devices), PLANNERS[plan]
    server = Server(replace(base, select=who, plan=size, choose=choose), task, runtime, SEED)
    asks, rests, orders = [], [], []
    for number in range(counted.warm + counted.rounds):
        asked, took = one_round(server, runtime)
        if number >= counted.warm:
            asks.append(asked)
            rests.append(took - asked)
            orders.append(runtime.orders)
    asking, rest = (1e3 * statistics.median(times) for times in (asks, rests))
    return Measured(plan, asking, rest, statistics.median(orders), runtime.now())


def one_round(server: Server, runtime: Watched) -> tuple[float, float]:
    """Run one round; return the seconds until the orders were handed over, and in all."""
    schedule = server.method.schedule
    began = time.process_time()
    server.issue()
    view = server.view()
    while not schedule.ready(view):
        server.receive(runtime.wait(schedule.alarm(view), schedule.enough(view)))
        view = server.view()
    server.finish_round()
    return runtime.handed_at - began, time.process_time() - began


def peak() -> float:
    """Return the most memory that this process has had, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def child(devices: int, select: str, counted: Rounds) -> None:
    """Measure one fleet with one selection; print JSON."""
    _one()
    before = peak()
    task, world, built = build(devices)
    rows = [asdict(measure(task, world, select, plan, counted)) for plan in PLANNERS]
    print(json.dumps({"built": asdict(built), "rows": rows, "before": before, "peak": peak()}))


def report(devices: int, select: str, counted: Rounds) -> None:
    """Measure in a process of its own, and print a table."""
    arguments = ["--child", "--devices", devices, "--select", select]
    arguments += ["--rounds", counted.rounds, "--warm", counted.warm]
    command = [sys.executable, str(Path(__file__)), *map(str, arguments)]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found = json.loads(printed)
    built = found["built"]
    print(
        f"\n{devices:,} devices, {select}: built in {built['seconds']:.2f} s, "
        f"{built['bytes_per_device']:.0f} bytes each; peak memory {found['peak'] / 1e6:.0f} MB, "
        f"of which {found['before'] / 1e6:.0f} MB without a fleet",
        flush=True,
    )
    print(f"  {'planner':<20} {'ask, ms':>8} {'rest, ms':>9} {'orders':>7} {'clock, s':>9}")
    for row in found["rows"]:
        times = f"{row['ask']:>8.1f} {row['rest']:>9.1f}"
        print(f"  {row['plan']:<20} {times} {row['orders']:>7.0f} {row['clock']:>9.0f}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every fleet with every selection, and print the tables."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--devices", type=int, nargs="+", default=SIZES)
    parser.add_argument("--select", nargs="+", choices=SELECTORS, default=list(SELECTORS))
    parser.add_argument("--rounds", type=int, default=15, help="that count, of each pair")
    parser.add_argument("--warm", type=int, default=2, help="rounds before, that do not count")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    show = child if given.child else report
    for devices in given.devices:
        for select in given.select:
            show(devices, select, Rounds(given.rounds, given.warm))


if __name__ == "__main__":
    main()
