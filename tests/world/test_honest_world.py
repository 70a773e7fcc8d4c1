"""The whole world at once: books that balance, bytes that were charged, policies that see no truth.

Every property holds for random fleets with numbers of every kind, times schedules, times methods.
"""

import ast
import math
from collections import defaultdict
from dataclasses import dataclass, fields, replace
from itertools import islice, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import anyfleet
from anyfleet.core.loop import Round, run
from anyfleet.core.messages import Hyperparameters
from anyfleet.core.method import Method
from anyfleet.core.orders import Cohort
from anyfleet.core.slots import Schedule
from anyfleet.core.stacks import Replies
from anyfleet.methods import fedavg, fedprox, heterofl
from anyfleet.parts.choose import LargestInTime
from anyfleet.parts.norm import OnDevice, PerWidth, Tracked
from anyfleet.parts.plan import LocalStepsWithin, WidthMenu
from anyfleet.parts.schedule import (
    Buffered,
    Deadline,
    HoldAndFetch,
    Overselected,
    Surveyed,
    Synchronous,
    Tiers,
)
from anyfleet.parts.select import Everyone, Largest
from anyfleet.parts.select import Uniform as Draw
from anyfleet.runtime import Sequential, Simulated, Stacked, Threads
from anyfleet.runtime.simulated import engines
from anyfleet.runtime.simulated.engines import Engine
from anyfleet.tasks import Dirichlet
from anyfleet.wire import decode_order
from anyfleet.wire.inbox import Inbox
from anyfleet.world import (
    Categorical,
    ColumnLoss,
    Diurnal,
    Fleet,
    Group,
    Intermittent,
    LogNormal,
    Normal,
    Redrawn,
    Replayed,
    Reports,
    Shannon,
    Steady,
    Uniform,
    Wandering,
    When,
    World,
)
from tests.helpers import small
from tests.helpers.messages import charged, taken_apart

TRACE, TRACE_MOST = Path(__file__).parent / "trace.csv", 40e6
GAPS = TRACE.with_name("gaps.csv")
PERIODS = (0.07, 3.0)  # of what changes with time
REASONS = {
    "",
    "no link",
    "out of memory",
    "died",
    "battery empty",
    "went offline",
    "nothing came through",
    "too late",
    "stale",
    "refused",
}
BASE = heterofl(widths=(1.0, 0.5), lr=0.1, batch_size=8)
SCHEDULES: dict[str, Schedule] = {
    "synchronous": Synchronous(),
    "deadline": Deadline(0.6),
    "late": Deadline(0.4, late="counted", staleness=2),
    "first of": Overselected(2),
    "two phases": HoldAndFetch(),
    "buffered": Buffered(concurrency=4, buffer_size=2, staleness=1),
    "tiers": Tiers(),
    "impatient tiers": Tiers(staleness=0),
    "surveyed": Surveyed(Deadline(0.6)),
}
METHODS: dict[str, Method] = {
    "fedavg": fedavg(lr=0.1, batch_size=8),
    "heterofl": BASE,
    "fedprox": fedprox(mu=0.1, seconds=0.5, lr=0.1, batch_size=8),
    "menu": replace(
        fedavg(lr=0.1, batch_size=8),
        plan=WidthMenu((1.0, 0.5, 0.25)),
        choose=LargestInTime(0.5),
        norm=Tracked(),
    ),
    "weights": small.padded(BASE),
    "tracked": replace(BASE, norm=Tracked(), cache=True),
    "on device": replace(BASE, norm=OnDevice()),
    "per width": replace(BASE, norm=PerWidth()),
}
LOSSY = Group(
    speed=1e8,
    link=Steady(
        bit_rate_up=Wandering(3e5, every=0.1), bit_rate_down=1e6, send_power=0.5, receive_power=0.25
    ),
    column_loss=ColumnLoss(error=0.1),
    battery=1e4,
)


# --- books ------------------------------------------------------------------------------------


def closed(steps: list[Round]) -> list[SimpleNamespace]:
    return [row for step in steps for row in small.rows(step)]


def check_books(steps: list[Round]) -> None:
    """Every order once, time goes on, seconds add up to it, nobody does two things at once."""
    seen = [row.order for row in closed(steps)]
    last = steps[-1].snapshot
    open_orders = (last.under_way.order.tolist(), last.waiting.orders.order.tolist())
    assert sorted([*seen, *open_orders[0], *open_orders[1]]) == list(range(last.issued))
    times = [0.0, *(step.time for step in steps)]
    assert all(a <= b for a, b in pairwise(times))
    busy = defaultdict(list)
    for step, before in zip(steps, times, strict=False):
        for row in small.rows(step):
            check_row(row, step.time)
            assert row.issued_round <= row.round_index == step.index
            assert row.began >= before or row.issued_round < step.index
            busy[row.device].append(
                (
                    row.began,
                    row.began + row.download_seconds + row.compute_seconds + row.upload_seconds,
                )
            )
    for spans in busy.values():
        assert all(b <= c + 1e-9 for (_, b), (c, _) in pairwise(sorted(spans)))


# Not a number where nobody said or asked.
UNKNOWN = ("loss", "frequency", "utility", "norm", "fisher", "sent_fraction")
# Not a number where no training result came in; otherwise shares.
RESULT = ("measured_sent_fraction", "channel_share", "trained_share")


def check_row(row: SimpleNamespace, end: float) -> None:
    assert row.failure.partition(":")[0] in REASONS
    for name, value in vars(row).items():
        if name in RESULT:
            assert math.isnan(value) or 0 <= value <= 1, name
        elif name == "distortion":
            assert math.isnan(value) or 0 <= value < math.inf
        elif name not in ("kind", "failure", "choice", "local_steps", "epochs", *UNKNOWN):
            assert 0 <= value < math.inf, name
    total = (
        row.began
        + row.download_seconds
        + row.compute_seconds
        + row.upload_seconds
        + row.wait_seconds
    )
    assert total == pytest.approx(end, rel=1e-9, abs=1e-9)
    assert 0 <= row.delivered_down <= 1
    assert 0 <= row.delivered_up <= 1
    if not row.failure and row.kind in ("train", "fetch"):
        assert row.bits_up > 0
        assert row.delivered_up > 0


def check_joules(steps: list[Round], runtime: Simulated, start: "np.ndarray[Any, Any]") -> None:
    """Joules are watts times seconds of work, and batteries lost what the ledger says."""
    world, spent = runtime._world, np.zeros(len(start))
    for row in closed(steps):
        own = world.conditions(np.array([row.device]), When(row.began, row.issued_round), 1)
        ends = np.cumsum([row.began, row.download_seconds, row.compute_seconds, row.upload_seconds])
        down, computing, up = (spans(a, b) for a, b in pairwise(ends.tolist()))
        receiving, sending = (carried(world, row, each) for each in (down, up))
        assert row.download_joules == pytest.approx(own.receive_power[0] * receiving[1], abs=1e-9)
        assert row.upload_joules == pytest.approx(own.send_power[0] * sending[0], abs=1e-9)
        assert row.compute_joules == pytest.approx(worked(world, row, computing), abs=1e-9)
        spent[row.device] += row.download_joules + row.compute_joules + row.upload_joules
    waiting = steps[-1].snapshot.waiting  # has been paid for, and is told in a later step
    paid = waiting.charges
    joules = paid.download_joules + paid.compute_joules + paid.upload_joules
    np.add.at(spent, waiting.replies.device, joules)
    everybody = np.arange(len(start))
    left = runtime._batteries.charge(everybody, runtime.now())
    on_mains = np.isinf(start)
    assert (on_mains == np.isinf(left)).all()
    used = start[~on_mains] - left[~on_mains]
    assert used == pytest.approx(spent[~on_mains], rel=1e-9, abs=1e-9)


def spans(start: float, end: float) -> list[tuple[float, float]]:
    """The middle and the length of every piece of time in which no number changes."""
    counted = (np.arange(start // every + 1, end / every) * every for every in PERIODS)
    edges = [start, *sorted(t for ts in counted for t in ts.tolist() if start < t < end), end]
    return [((a + b) / 2, b - a) for a, b in pairwise(edges)]


def carried(
    world: World, row: SimpleNamespace, pieces: list[tuple[float, float]]
) -> tuple[float, float]:
    """Seconds in which the link carries something, up and down."""
    found = np.zeros(2)
    for middle, length in pieces:
        rates = world.bit_rates(np.array([row.device]), When(middle, row.issued_round), 1)
        found += length * np.array([rates.up[0] > 0, rates.down[0] > 0])
    return float(found[0]), float(found[1])


def worked(world: World, row: SimpleNamespace, pieces: list[tuple[float, float]]) -> float:
    """Joules: eps f³ watts, for the order's own part of the time."""
    joules, devices = 0.0, np.array([row.device])
    for middle, length in pieces:
        own = world.conditions(devices, When(middle, row.issued_round), 1)
        joules += length * float(own.coefficient[0] * own.fastest[0] ** 3 / own.load[0])
    return joules


def begun(problem: Any, fleet: Fleet, seed: int, engine: Engine | None = None) -> Simulated:
    return Simulated(problem, small.world(problem, fleet, seed), engine=engine)


def charge(runtime: Simulated) -> "np.ndarray[Any, Any]":
    devices = np.arange(len(runtime.devices()))
    return runtime._batteries.charge(devices, runtime.now())


@pytest.mark.parametrize("name", SCHEDULES)
def test_seconds_and_joules_add_up_to_clock_and_meters(name: str) -> None:
    task = small.task()
    groups = (
        replace(LOSSY, speed=2e8, mortality=0.1),
        replace(LOSSY, speed=3e7, availability=Intermittent(0.8, every=0.5)),
        replace(LOSSY, battery=0.4, energy=1e-26, load=Redrawn(Uniform(1.0, 3.0), every=0.07)),
        replace(LOSSY, link=Steady(3e5, Replayed(GAPS, "rate", every=0.07), receive_power=0.25)),
    )
    method = small.padded(replace(BASE, schedule=SCHEDULES[name], select=Draw(5)))
    runtime = begun(task, Fleet(groups=groups), 1)
    start = charge(runtime)
    steps = list(islice(run(method, task, runtime, 1), 4))
    check_books(steps)
    check_joules(steps, runtime, start)
    assert (
        len({row.failure for row in closed(steps)}) > 1
    )  # something went wrong, or it shows little


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_replies_that_grow_too_old_are_told_in_the_step_that_ends(stop: int) -> None:
    """Or a run that is resumed there would know nothing of them."""
    task = small.task()
    fleet = Fleet(groups=(Group(speed=1e9), Group(speed=Uniform(2e6, 2e8))))
    method = replace(BASE, schedule=Tiers(staleness=0), select=Draw(3))
    whole = small.steps(method, task, 5, fleet=fleet)
    assert any(row.failure == "stale" for row in closed(whole))
    runtime, other = (begun(task, fleet, 0) for _ in range(2))
    half = list(islice(run(method, task, runtime, 0), stop))
    other.restore(runtime.save())
    rest = list(islice(run(method, task, other, 0, resume=half[-1].snapshot), 5 - stop))
    check_books([*half, *rest])
    assert repr(closed([*half, *rest])) == repr(closed(whole))


def test_what_nobody_will_fetch_any_more_is_forgotten() -> None:
    method = replace(BASE, schedule=HoldAndFetch(), select=Largest(4, 1))
    for step in small.steps(method, small.task(), 3):
        assert sum(row.kind == "hold" for row in small.rows(step)) == 4
        assert not step.snapshot.holding


# --- bytes ------------------------------------------------------------------------------------


def weigh(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[int, int]]:
    """Bits that really come out of the `Threads` engine's links, by order."""
    came: dict[str, dict[int, int]] = {"down": {}, "up": {}}

    def weighed_order(data: bytes, *around: Any) -> Cohort:
        order = decode_order(data, *around)
        came["down"][int(order.id[0])] = 8 * charged(data)
        return order

    class Weighed(Inbox):
        def receive(self, data: bytes, sender: int) -> Replies:
            came["up"][taken_apart(data)[0]["order"]] = 8 * charged(data)
            return super().receive(data, sender)

    monkeypatch.setattr(engines, "decode_order", weighed_order)
    monkeypatch.setattr(engines, "Inbox", Weighed)
    return came


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        *((name, Synchronous()) for name in METHODS),
        *((name, HoldAndFetch()) for name in ("heterofl", "tracked", "menu")),
    ],
)
def test_charged_bits_are_the_bytes_of_the_threads_engine_order_by_order(
    name: str, schedule: Schedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Links fail both ways; and what comes out is bit for bit what the reference computes."""
    task = small.task(devices=6, partition=Dirichlet(0.3))
    fleet = Fleet(
        groups=(LOSSY, replace(LOSSY, column_loss=ColumnLoss(error=0.3, column_width=0.2)))
    )
    method = small.padded(replace(METHODS[name], schedule=schedule, select=Everyone()))
    one = small.steps(method, task, 2, fleet=fleet)
    sent = weigh(monkeypatch)
    two = small.steps(method, task, 2, fleet=fleet, engine=Threads())
    assert small.identical(one[-1].params, two[-1].params)
    assert small.identical(one[-1].buffers, two[-1].buffers)
    assert repr([small.rows(s) for s in one]) == repr([small.rows(s) for s in two])
    counted = [row for row in closed(two) if not row.failure]
    assert any(row.delivered_down < 1 for row in counted)
    assert any(row.delivered_up < 1 for row in counted)
    for row in closed(two):
        extra = 64 if row.kind == "fetch" else 0  # the number of the order, in the header
        assert row.bits_down == sent["down"][row.order] + extra
        if row.kind == "hold":
            assert sent["up"][row.order] == 0  # a few numbers, in the header
        else:
            # What it chose is in the header, too.
            chosen = 32 if row.kind == "train" and row.choice >= 0 and row.bits_up else 0
            assert row.bits_up == sent["up"][row.order] + chosen


@pytest.mark.parametrize("name", ["heterofl", "tracked"])
def test_stacks_under_loss_are_the_reference_up_to_rounding(name: str) -> None:
    task = small.task(devices=6, dtype=torch.float64, equal=False)
    method = small.padded(METHODS[name])
    one, two = (
        small.steps(method, task, 3, fleet=Fleet(groups=(LOSSY,)), engine=engine)
        for engine in (Sequential(), Stacked())
    )
    assert small.distance(one[-1].params, two[-1].params) < 1e-10
    assert [step.time for step in one] == [step.time for step in two]
    assert any(row.delivered_up < 1 for row in closed(one))


# --- what policies see ------------------------------------------------------------------------


class Recording(Simulated):
    """Notes what the server decided: who is asked for what."""

    def submit(self, orders: Cohort) -> None:
        self.decided = [*getattr(self, "decided", []), decision(orders)]
        super().submit(orders)


def decision(orders: Cohort) -> tuple[Any, ...]:
    numbers = tuple(
        tuple(getattr(orders.hyperparameters, f.name).tolist()) for f in fields(Hyperparameters)
    )
    return (
        orders.round_index,
        orders.device.tolist(),
        orders.visit.tolist(),
        orders.key.tolist(),
        orders.slices,
        orders.menus,
        orders.bits.tolist(),
        repr(numbers),
    )


def decisions(fleet: Fleet, method: Method, steps: int) -> list[tuple[Any, ...]]:
    task = small.task(devices=4)
    runtime = Recording(task, small.world(task, fleet))
    list(islice(run(small.padded(method), task, runtime, 0), steps))
    return list(runtime.decided)


@dataclass(frozen=True)
class Hidden:
    """A world whose numbers are those of a file, and what nobody is told."""

    speeds: tuple[float, ...]
    mortality: float = 0.0
    error: float = 0.0

    def fleet(self, folder: Path, reports: Reports) -> Fleet:
        file = folder / f"{hash((self.speeds, self.mortality, self.error))}.csv"
        rows = (f"{speed},{speed / 50},{speed / 100}" for speed in self.speeds)
        file.write_text("speed,up,memory\n" + "\n".join(rows))

        def column(name: str) -> Replayed:
            return Replayed(file, name, shift=False)

        group = Group(
            speed=column("speed"),
            memory=column("memory"),
            link=Steady(bit_rate_up=column("up"), bit_rate_down=column("up")),
            mortality=self.mortality,
            column_loss=ColumnLoss(error=self.error),
        )
        return Fleet(groups=(group, group), reports=reports)


TOLD = Hidden((5e7,) * 9)
TRUTHS = {
    "faster": Hidden((5e7, *(2e8,) * 8)),
    "slower": Hidden((5e7, *(2e7,) * 8)),
    "no room": Hidden((5e7, *(1e4,) * 8)),
    "mortal": Hidden((5e7,) * 9, mortality=0.5),
    "failing": Hidden((5e7,) * 9, error=0.3),
}
DECIDING = {
    "steps": replace(BASE, plan=LocalStepsWithin(0.2), select=Draw(2)),
    "steps of slices": replace(BASE, plan=LocalStepsWithin(0.15, inner=BASE.plan), select=Draw(2)),
    "menu": replace(METHODS["menu"], choose=fedavg().choose, select=Draw(2)),
}


@pytest.mark.parametrize("method", DECIDING)
@pytest.mark.parametrize("truth", TRUTHS)
def test_equal_reports_and_another_truth_give_identical_decisions(
    truth: str, method: str, tmp_path: Path
) -> None:
    """Reports are three steps old: all of these four steps, devices say what was true at first."""
    old = Reports(rounds=3)
    one = decisions(TOLD.fleet(tmp_path, old), DECIDING[method], 4)
    two = decisions(TRUTHS[truth].fleet(tmp_path, old), DECIDING[method], 4)
    assert one == two


@pytest.mark.parametrize("truth", ["faster", "slower"])
def test_with_fresh_reports_the_truth_decides(truth: str, tmp_path: Path) -> None:
    """Or the test above would show nothing."""
    one, two = (
        decisions(hidden.fleet(tmp_path, Reports()), DECIDING["steps"], 3)
        for hidden in (TOLD, TRUTHS[truth])
    )
    assert one[0] == two[0]
    assert one[1:] != two[1:]


@pytest.mark.parametrize(
    "package", ["aggregate", "codec", "extract", "plan", "schedule", "select", "train"]
)
def test_no_policy_can_reach_the_truth(package: str) -> None:
    folder = Path(anyfleet.__file__).parent / "parts" / package
    found = set()
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module)
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
    assert found
    banned = ("anyfleet.world", "anyfleet.runtime", "anyfleet.core.server", "anyfleet.core.loop")
    assert not [name for name in found if name.startswith(banned)]


# --- anything at all --------------------------------------------------------------------------


def laws(low: float, high: float) -> st.SearchStrategy[Any]:
    """A law of every kind between two ends."""
    middle = (low + high) / 2
    return st.sampled_from(
        [
            Uniform(low, high),
            Normal(middle, (high - low) / 4, low, high),
            LogNormal(middle, 0.5, low, high),
            Categorical((low, high), (1, 3)),
        ]
    )


def numbers(low: float, high: float) -> st.SearchStrategy[Any]:
    """A number of every kind between two ends."""
    middle = (low + high) / 2
    every = st.sampled_from([None, *PERIODS])
    return st.one_of(
        st.just(middle),
        laws(low, high),
        st.builds(Redrawn, laws(low, high), every),
        st.builds(Wandering, st.just(middle), spread=st.just(0.3), every=every),
        st.builds(Replayed, st.just(TRACE), st.just("rate"), every, st.just(high / TRACE_MOST)),
    )


PERIODICALLY = st.sampled_from(PERIODS)
LINKS = st.one_of(
    # With steps, a link that is down would stay so: nobody could say when it was up.
    st.builds(
        Steady,
        st.builds(Replayed, st.just(GAPS), st.just("rate"), PERIODICALLY),
        st.builds(Replayed, st.just(GAPS), st.just("rate"), PERIODICALLY),
        send_power=st.floats(0, 1),
        receive_power=st.floats(0, 1),
    ),
    st.builds(
        Steady,
        numbers(1e5, 1e7),
        numbers(2e5, 4e7),
        send_power=st.floats(0, 1),
        receive_power=st.floats(0, 1),
        shared=st.booleans(),
    ),
    st.builds(Shannon, fading=st.booleans(), shared=st.booleans(), receive_power=st.floats(0, 1)),
)
GROUPS = st.builds(
    Group,
    speed=numbers(2e7, 2e9),
    overhead=numbers(1e-5, 1e-2),
    latency=numbers(1e-7, 1e-5),
    bandwidth=st.sampled_from([math.inf, 1e9]),
    fixed=st.sampled_from([0.0, 0.05, 1.0]),
    exponent=st.sampled_from([None, 1.0, 1.7]),
    load=numbers(1.0, 3.0),
    memory=numbers(4e4, 3e5),
    energy=numbers(1e-27, 1e-25),
    link=LINKS,
    distance=numbers(50, 600),
    column_loss=st.sampled_from(
        [
            ColumnLoss(),
            ColumnLoss(error=0.2),
            ColumnLoss(0.3, Uniform(0.0, 0.4)),
            ColumnLoss(minimum_bit_rate=2e5),
        ]
    ),
    battery=st.one_of(st.just(math.inf), st.just(10.0), laws(0.5, 20)),
    charge=st.one_of(st.just(1.0), laws(0.3, 0.9)),
    reserve=st.sampled_from([0.0, 0.1, 0.5]),
    recharge=st.one_of(st.just(0.0), st.just(0.0), laws(0.1, 0.5)),
    availability=st.sampled_from(
        [
            Group().availability,
            Intermittent(0.7),
            Intermittent(0.7, 0.4),
            Diurnal(every=0.5, period=5),
        ]
    ),
    mortality=st.one_of(st.just(0.0), numbers(0.01, 0.15)),
)
FLEETS = st.builds(
    Fleet,
    groups=st.lists(GROUPS, min_size=1, max_size=3).map(tuple),
    reports=st.builds(
        Reports,
        rounds=st.integers(0, 2),
        seconds=st.sampled_from([0.0, 1.0]),
        noise=st.sampled_from([0.0, 0.5]),
    ),
)


# Without shrinking: a case is a whole run, and a smaller one takes minutes to find.
@settings(max_examples=8, phases=[Phase.explicit, Phase.generate])
@given(
    FLEETS, st.sampled_from(sorted(SCHEDULES)), st.sampled_from(sorted(METHODS)), st.integers(0, 3)
)
def test_in_any_world_the_books_balance_and_a_run_can_be_resumed(
    fleet: Fleet, schedule: str, name: str, seed: int
) -> None:
    task = small.task(devices=6)
    method = replace(METHODS[name], schedule=SCHEDULES[schedule], select=Draw(4))
    if any(group.column_loss.lossy for group in fleet.groups):
        method = small.padded(method)
    runtime = begun(task, fleet, seed)
    start = charge(runtime)
    whole = list(islice(run(method, task, runtime, seed), 4))
    check_books(whole)
    if all(group.recharge == 0 for group in fleet.groups):
        check_joules(whole, runtime, start)
    # Stopped after two steps, orders in flight; resumed elsewhere, with real bytes.
    first = begun(task, fleet, seed)
    half = list(islice(run(method, task, first, seed), 2))
    other = begun(task, fleet, seed, Threads())
    other.restore(first.save())
    rest = list(islice(run(method, task, other, seed, resume=half[-1].snapshot), 2))
    both = [small.rows(step) for step in (*half, *rest)]
    assert repr(both) == repr([small.rows(step) for step in whole])
    assert [step.time for step in (*half, *rest)] == [step.time for step in whole]
    assert small.identical(rest[-1].params, whole[-1].params)
    assert small.identical(rest[-1].buffers, whole[-1].buffers)
    assert (charge(other) == charge(runtime)).all()
