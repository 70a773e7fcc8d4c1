"""Whole cohorts in arrays against one order at a time in plain numbers: the very same bits."""

import math
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from anyfleet.arrays import Arrays
from anyfleet.core.device_states import DeviceStates
from anyfleet.core.messages import Kind
from anyfleet.core.orders import Cohort
from anyfleet.core.stacks import Replies
from anyfleet.methods import heterofl
from anyfleet.runtime.simulated.charging import demand
from anyfleet.runtime.simulated.phases import Phases
from anyfleet.runtime.simulated.timing import begin, with_uploads
from anyfleet.runtime.simulated.transfers import event_keys
from anyfleet.runtime.simulated.under_way import UnderWay
from anyfleet.world import (
    Disc,
    Diurnal,
    Fleet,
    Group,
    Intermittent,
    Redrawn,
    Replayed,
    Shannon,
    Steady,
    Uniform,
    Wandering,
)
from anyfleet.world.quantities import When
from tests.core.test_local_training import orders
from tests.helpers import one_order, small

TASK = small.task(equal=False, devices=10)
SIZES = np.array([TASK.size(device) for device in range(10)])
# Its link carries nothing at times.
GAPS = Replayed(Path(__file__).parents[2] / "world" / "gaps.csv", "rate", every=0.6, scale=0.02)
LINK = Steady(
    Wandering(1e5, every=0.33),
    Redrawn(Uniform(4e4, 2e5), every=0.47),
    send_power=0.5,
    receive_power=0.25,
)
GROUPS = (
    Group(speed=1e7, link=Steady(1e5, 1e5, send_power=0.5, receive_power=0.25)),
    Group(speed=Wandering(1e7, every=0.41), load=Redrawn(Uniform(1, 3), every=0.25), link=LINK),
    Group(speed=2e7, battery=Uniform(0.1, 4.0), energy=1e-25, link=LINK, mortality=0.3),
    Group(speed=1e7, memory=Uniform(1e4, 1e6), availability=Intermittent(0.9, every=0.3)),
    Group(speed=3e6, availability=Diurnal(mean=0.8, every=0.5, period=20.0), link=LINK),
    Group(speed=1e7, link=Shannon(band=1e5, shared=True), distance=Redrawn(Disc(500.0), every=0.2)),
    Group(speed=1e7, link=Steady(GAPS, GAPS, send_power=0.3), exponent=1.5, fixed=0.2),
    Group(speed=1e7, link=Steady(Redrawn(Uniform(1e4, 1e5)), Wandering(1e5))),
)


def cohort(seed: int) -> Cohort:
    """Return orders of unequal slices for all devices."""
    method = heterofl(widths=(1.0, 0.5, 0.25), lr=0.1, batch_size=8)
    made = orders(method, TASK, list(range(10)))
    drawn = np.random.default_rng(seed)
    slices = tuple(TASK.blueprint.prefix(width) for width in (1.0, 0.5, 0.25))
    index = drawn.integers(3, size=10)
    numbers = made.hyperparameters.changed(
        frequency=drawn.choice([np.nan, 3e8, 1e9], 10), epochs=drawn.integers(1, 4, size=10)
    )
    return replace(
        made,
        slices=slices,
        slice_index=index,
        width=np.array([1.0, 0.5, 0.25])[index],
        hyperparameters=numbers,
        bits=drawn.uniform(1e3, 1e5, 10),
    )


def phase(phases: Phases, row: int) -> one_order.Phase:
    """Return one phase of the table as the reference has it."""
    first = int(phases.first[row])
    inner = phases.points[first : first + int(phases.changes[row])].tolist()
    end = float(phases.seconds[row]), 1.0, float(phases.joules[row])
    points = ((0.0, 0.0, 0.0), *inner, end)
    return one_order.Phase(tuple(one_order.Progress(*point) for point in points))


def trained(rows: UnderWay, bits: float) -> UnderWay:
    """Return orders that were carried out, with replies of so many bits; one is refused."""
    count = len(rows)
    sizes = (bits + 1e3 * np.arange(count)).astype(np.float64)
    replies: Replies = replace(rows.replies, bits=sizes)
    detail = np.where(np.arange(count) % 4 == 3, 0, -1)
    return replace(rows, replies=replies, detail=detail, details=("refused: why",))


@given(
    st.lists(st.sampled_from(GROUPS), min_size=1, max_size=4),
    st.integers(0, 50),
    st.floats(0, 30),
    st.integers(0, 3),
)
# Without shrinking: plain numbers take their time.
@settings(max_examples=15, deadline=None, phases=(Phase.explicit, Phase.generate))
def test_a_cohort_in_arrays_is_its_orders_one_by_one(
    groups: list[Group], seed: int, now: float, later: int
) -> None:
    """Phases, failures, and what was done at any time; the upload in the same or a later round."""
    world = Fleet(tuple(groups)).build(SIZES, seed)
    made, when = cohort(seed), When(now, 2)
    active = world.sharing(made.device, made.device) if world.shares_bands else np.ones(10, int)
    own = world.conditions(made.device, when, active)
    rows = begin(made, when, own, active, world=world, task=TASK, states=DeviceStates(TASK))
    fits = rows.take(rows.events.training)
    both = with_uploads(trained(fits, 2e4), 2 + later, world) if len(fits) else fits
    need = demand(made, SIZES, TASK, "flops", DeviceStates(TASK))
    fatal = world.dies(made.device, event_keys(made, seed, "death"), when)
    for row in range(10):
        one = one_order.OneOrder(world, row, when, own.take([row]), int(active[row]))
        part, frequency = need.take([row]), float(made.hyperparameters.frequency[row])
        down = one.transfer(float(made.bits[row]), "down", when)
        took = down.end.seconds
        begun = When(now + (took if math.isfinite(took) else 0.0), 2)
        work = one.compute(part.effort, frequency, begun)
        assert (phase(rows.download, row), phase(rows.compute, row)) == (down, work)
        total, room = took + work.end.seconds, float(own.memory[row])
        battery = float(own.battery[row])
        reasons = [
            (one_order.battery_empty((down, work), battery), "battery empty"),
            (took + work.end.seconds / 2 if fatal[row] else math.inf, "died"),
            (0.0 if math.isinf(took) else math.inf, "no link"),
            (took if part.memory[0] > room else math.inf, "out of memory"),
        ]
        end = min(total, one_order.earliest(reasons)[0])
        failure = one_order.earliest([*reasons, (one.offline(when, end), "went offline")])
        check_failure(rows, row, failure)
        phases = [down, work]
        if not failure[1]:
            place = int(np.flatnonzero(both.device == row)[0])
            begins = When(now + total, 2 + later)
            up = one.transfer(2e4 + 1e3 * place, "up", begins)
            assert phase(both.upload, place) == up
            left = battery - (down.end.joules + work.end.joules)
            reasons = [
                (one_order.battery_empty((up,), left), "battery empty"),
                (0.0 if math.isinf(up.end.seconds) else math.inf, "no link"),
                (up.end.seconds if place % 4 == 3 else math.inf, "refused: why"),
            ]
            end = min(up.end.seconds, one_order.earliest(reasons)[0])
            gone = one.offline(When(begins.now, 2), end)
            after, why = one_order.earliest([*reasons, (gone, "went offline")])
            check_failure(both, place, (total + after, why))
            ends = begins.now + (after if why else up.end.seconds)
            assert both.events.ends[place] == ends
            phases.append(up)
        check_charges(rows if failure[1] else both, row, phases)


def check_failure(rows: UnderWay, row: int, failure: tuple[float, str]) -> None:
    after, why = failure
    assert rows.failed_after[row] == after
    found = rows.why()[row]
    assert found.startswith(why) if why == "out of memory" else found == why


def check_charges(rows: UnderWay, device: int, phases: list[one_order.Phase]) -> None:
    """Compare what was done at several times of an order."""
    row = int(np.flatnonzero(rows.device == device)[0])
    order = replace(rows.take([row]), uploading=np.array([len(phases) == 3]))
    names = ("download", "compute", "upload")
    edges = [0.0, *accumulate(each.end.seconds for each in phases)]
    finite = [edge for edge in edges if math.isfinite(edge)]
    for elapsed in (*finite, *(0.37 * edge for edge in finite), math.inf):
        charges = order.charges(np.array([elapsed]))
        for name, found in zip(names, one_order.progress(phases, elapsed), strict=False):
            spent = (getattr(charges, f"{name}_{unit}")[0] for unit in ("seconds", "joules"))
            assert tuple(spent) == (found.seconds, found.joules)
            amount, planned = {
                "download": (charges.bits_down, order.bits_down),
                "compute": (charges.flops, order.flops),
                "upload": (charges.bits_up, order.bits_up),
            }[name]
            assert amount[0] == planned[0] * found.done
        if len(phases) < 3:
            assert charges.upload_seconds == charges.bits_up == charges.delivered_up == 0


@pytest.mark.parametrize("kind", [Kind.TRAIN, Kind.EVALUATE, Kind.STATISTICS, Kind.REPORT])
def test_the_work_of_a_cohort_is_that_of_its_orders(kind: Kind) -> None:
    made = replace(cohort(5), kind=kind)
    whole = demand(made, SIZES, TASK, "flops", DeviceStates(TASK))
    for row, order in enumerate(made.rows()):
        alone = demand(order, SIZES[[row]], TASK, "flops", DeviceStates(TASK))
        assert_same(whole.take([row]), alone)


def assert_same(one: Arrays, other: Arrays) -> None:
    for name, value in vars(one).items():
        if isinstance(value, Arrays):
            assert_same(value, getattr(other, name))
        else:
            assert value.tolist() == getattr(other, name).tolist()
