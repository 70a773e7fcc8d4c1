"""How orders end early; by hand."""

import math

import numpy as np
import pytest

from anyfleet.arrays import Flags, Floats
from anyfleet.runtime.simulated.failures import REASONS, battery_empty, earliest, offline, when
from anyfleet.runtime.simulated.phases import Phases
from anyfleet.world import Fleet, Group, Intermittent, World
from anyfleet.world.quantities import Moments, When


def phase(seconds: float, joules: float, *points: tuple[float, float, float]) -> Phases:
    count, none = np.array([len(points)]), np.zeros(1, dtype=np.int64)
    inner = np.array(points, dtype=np.float64).reshape(-1, 3)
    return Phases(np.array([seconds]), np.array([joules]), count, none, inner)


def charged(joules: float) -> Floats:
    return np.array([joules], dtype=np.float64)


def test_the_earliest_failure_counts_and_of_equals_the_first_by_name() -> None:
    failures = {
        "no link": np.array([2.0, 5.0, math.inf]),
        "died": np.array([3.0, 5.0, math.inf]),
        "went offline": np.array([1.0, 6.0, math.inf]),
    }
    after, which = earliest(failures)
    assert after.tolist() == [1.0, 5.0, math.inf]
    assert [REASONS[place] for place in which[:2]] == ["went offline", "died"]
    assert which[2] == -1
    assert list(REASONS) == sorted(REASONS)


def test_what_does_not_happen_has_no_time() -> None:
    assert when(np.array([True, False]), 3.0).tolist() == [3.0, math.inf]


@pytest.mark.parametrize(
    ("charge", "after"),
    [(0.0, 0.0), (1.0, 2.0), (2.0, 4.0), (5.0, 7.0), (7.99, 9.99)],
)
def test_a_battery_is_empty_at_the_second_at_which_its_joules_are_spent(
    charge: float, after: float
) -> None:
    parts = phase(4.0, 2.0), phase(6.0, 6.0)
    assert battery_empty(parts, charged(charge)) == pytest.approx([after])


@pytest.mark.parametrize("charge", [8.0, 9.0, math.inf])
def test_a_battery_that_lasts_has_no_failure(charge: float) -> None:
    parts = phase(4.0, 2.0), phase(6.0, 6.0)
    assert battery_empty(parts, charged(charge)) == [math.inf]


def test_an_empty_battery_does_what_costs_nothing() -> None:
    assert battery_empty((phase(4.0, 0.0), phase(6.0, 6.0)), charged(0.0)) == [4.0]


def test_a_battery_is_not_used_while_a_link_is_down() -> None:
    """A joule, three seconds of nothing, another joule."""
    parts = phase(2.0, 3.0), phase(5.0, 2.0, (1.0, 0.5, 1.0), (4.0, 0.5, 1.0))
    for charge, after in ((1.5, 1.0), (3.5, 2.5), (4.0, 6.0), (4.5, 6.5), (5.0, math.inf)):
        assert battery_empty(parts, charged(charge)) == pytest.approx([after])


def away() -> tuple[World, Flags]:
    """A device, and whether it is there in each ten seconds."""
    groups = (Group(availability=Intermittent(0.5, every=10.0)),)
    world = Fleet(groups=groups).build(np.array([5]), 4)
    there = [world.online(np.array([0]), When(10.0 * i, 0))[0] for i in range(200)]
    return world, np.array(there)


def test_a_device_goes_offline_at_the_moment_it_does() -> None:
    world, there = away()
    runs = np.array([i for i in range(190) if there[i] and there[i + 1] and not there[i + 2]])
    assert len(runs)
    device, rounds = np.zeros(len(runs), dtype=np.int64), np.zeros(len(runs), dtype=np.int64)
    begun = Moments(10.0 * runs + 3.0, rounds)
    assert offline(world, device, begun, np.full(len(runs), 100.0)) == pytest.approx(17.0)
    # Done just before.
    assert np.isinf(offline(world, device, begun, np.full(len(runs), 17.0))).all()
    # Done with one part just then, it is away when the next begins.
    later = Moments(10.0 * (runs + 2), rounds)
    assert not offline(world, device, later, np.full(len(runs), 1.0)).any()


def test_a_step_alone_drives_nobody_away() -> None:
    groups = (Group(availability=Intermittent(0.5)),)
    world = Fleet(groups=groups).build(np.array([5]), 0)
    only = np.array([0])
    step = next(s for s in range(50) if world.online(only, When(0.0, s))[0])
    now = Moments(np.zeros(1), np.array([step]))
    assert offline(world, only, now, np.array([1e9])) == [math.inf]
