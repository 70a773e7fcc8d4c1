"""How orders end early; by hand."""

import math

import numpy as np
import pytest

from anyfleet.arrays import Flags
from anyfleet.runtime.simulated.failures import (
    PossibleFailure,
    battery_failures,
    earliest,
    offline_failures,
)
from anyfleet.runtime.simulated.phases import Phase, Progress
from anyfleet.world import Fleet, Group, Intermittent, World
from anyfleet.world.quantities import When


def phase(seconds: float, joules: float) -> Phase:
    return Phase((Progress(0.0, 0.0, 0.0), Progress(seconds, 1.0, joules)))


def test_the_earliest_failure_counts() -> None:
    assert earliest([]) is None
    assert earliest(
        [PossibleFailure(3.0, "a"), PossibleFailure(1.0, "b"), PossibleFailure(2.0, "c")]
    ) == PossibleFailure(1.0, "b")


@pytest.mark.parametrize(
    ("charge", "after"),
    [(0.0, 0.0), (1.0, 2.0), (2.0, 4.0), (5.0, 7.0), (7.99, 9.99)],
)
def test_a_battery_is_empty_at_the_second_at_which_its_joules_are_spent(
    charge: float, after: float
) -> None:
    parts = phase(4.0, 2.0), phase(6.0, 6.0)
    (fate,) = battery_failures(parts, charge)
    assert fate.after == pytest.approx(after)
    assert fate.reason == "battery empty"


@pytest.mark.parametrize("charge", [8.0, 9.0, math.inf])
def test_a_battery_that_lasts_has_no_fate(charge: float) -> None:
    assert not list(battery_failures((phase(4.0, 2.0), phase(6.0, 6.0)), charge))


def test_an_empty_battery_does_what_costs_nothing() -> None:
    (fate,) = battery_failures((phase(4.0, 0.0), phase(6.0, 6.0)), 0.0)
    assert fate.after == 4.0


def test_a_battery_is_not_used_while_a_link_is_down() -> None:
    """A joule, three seconds of nothing, another joule."""
    knots = (
        Progress(0.0, 0.0, 0.0),
        Progress(1.0, 0.5, 1.0),
        Progress(4.0, 0.5, 1.0),
        Progress(5.0, 1.0, 2.0),
    )
    parts = phase(2.0, 3.0), Phase(knots)
    for charge, after in ((1.5, 1.0), (3.5, 2.5), (4.0, 6.0), (4.5, 6.5)):
        (fate,) = battery_failures(parts, charge)
        assert fate.after == pytest.approx(after)
    assert not list(battery_failures(parts, 5.0))


def away() -> tuple[World, Flags]:
    """A device, and whether it is there in each ten seconds."""
    groups = (Group(availability=Intermittent(0.5, every=10.0)),)
    world = Fleet(groups=groups).build(np.array([5]), 4)
    there = [world.online(np.array([0]), When(10.0 * i, 0))[0] for i in range(200)]
    return world, np.array(there)


def test_a_device_goes_offline_at_the_moment_it_does() -> None:
    world, there = away()
    runs = [i for i in range(190) if there[i] and there[i + 1] and not there[i + 2]]
    assert runs
    for i in runs:
        when = When(10.0 * i + 3.0, 0)
        (fate,) = offline_failures(world, 0, when, 100.0)
        assert fate.reason == "went offline"
        assert fate.after == pytest.approx(17.0)
        assert not list(offline_failures(world, 0, when, 17.0))  # done just before
        # Done with one part just then, it is away when the next begins.
        (fate,) = offline_failures(world, 0, When(10.0 * (i + 2), 0), 1.0)
        assert fate.after == 0.0


def test_a_step_alone_drives_nobody_away() -> None:
    groups = (Group(availability=Intermittent(0.5)),)
    world = Fleet(groups=groups).build(np.array([5]), 0)
    step = next(s for s in range(50) if world.online(np.array([0]), When(0.0, s))[0])
    assert not list(offline_failures(world, 0, When(0.0, step), 1e9))
