"""How orders end early, and how long transfers take when rates change; by hand."""

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyfleet.columns import Flags
from anyfleet.runtime.fates import Fate, Phase, first, goes_offline, runs_dry, transfer
from anyfleet.world import Fleet, Group, Intermittent, World
from anyfleet.world.quantities import When, slot, slot_end

NOW = When(0.0, 0)


def changing(rates: Sequence[float], bits: float, start: float = 0.0) -> float:
    """Seconds over a link that has each rate for a second, and the last for ever."""

    def rate(when: When) -> float:
        return rates[min(slot(when, 1.0), len(rates) - 1)]

    def until(when: When) -> float:
        return slot_end(when, 1.0) if slot(when, 1.0) < len(rates) - 1 else math.inf

    return transfer(bits, When(start, 0), rate, until)


@pytest.mark.parametrize(
    ("rates", "bits", "start", "seconds"),
    [
        ([10], 25, 0.0, 2.5),
        ([10, 2, 5], 10, 0.0, 1.0),  # just done when the rate changes
        ([10, 2, 5], 11, 0.0, 1.5),
        ([10, 2, 5], 22, 0.0, 4.0),
        ([10, 2, 5], 22, 0.5, 0.5 + 1 + 15 / 5),
        ([0, 0, 5], 10, 0.25, 1.75 + 2.0),  # waits for the link
        ([10, 0], 10, 0.0, 1.0),
        ([10, 0], 10.5, 0.0, math.inf),
        ([0], 1, 0.0, math.inf),
        ([0], 0, 0.0, 0.0),  # nothing needs no link
    ],
)
def test_transfers_integrate_changing_rates(
    rates: list[float], bits: float, start: float, seconds: float
) -> None:
    assert changing(rates, bits, start) == pytest.approx(seconds)


@given(st.lists(st.floats(0.5, 10), min_size=1, max_size=6), st.floats(0, 100), st.floats(0, 5))
def test_what_crosses_in_the_time_are_the_bits(
    rates: list[float], bits: float, start: float
) -> None:
    end = start + changing(rates, bits, start)
    edges = [start, *(float(e) for e in range(1, len(rates)) if start < e < end), end]
    carried = sum(
        rates[min(math.floor((a + b) / 2), len(rates) - 1)] * (b - a) for a, b in pairwise(edges)
    )
    assert carried == pytest.approx(bits, abs=1e-9)


def test_a_link_that_changes_for_ever_is_carried_on_at_its_average() -> None:
    def rate(when: When) -> float:
        return 4.0 if slot(when, 1.0) % 2 else 2.0

    found = transfer(3e6, NOW, rate, lambda when: slot_end(when, 1.0))
    assert found == pytest.approx(1e6)
    assert math.isinf(transfer(1.0, NOW, lambda when: 0.0, lambda when: slot_end(when, 1.0)))


def test_the_first_fate_comes_to_pass() -> None:
    assert first([]) is None
    assert first([Fate(3.0, "a"), Fate(1.0, "b"), Fate(2.0, "c")]) == Fate(1.0, "b")


@pytest.mark.parametrize(
    ("charge", "after"),
    [(0.0, 0.0), (1.0, 2.0), (2.0, 4.0), (5.0, 7.0), (7.99, 9.99)],
)
def test_a_battery_is_empty_at_the_second_at_which_its_joules_are_spent(
    charge: float, after: float
) -> None:
    phases = Phase(4.0, 2.0), Phase(6.0, 6.0)
    (fate,) = runs_dry(phases, charge)
    assert fate.after == pytest.approx(after)
    assert fate.reason == "battery empty"


@pytest.mark.parametrize("charge", [8.0, 9.0, math.inf])
def test_a_battery_that_lasts_has_no_fate(charge: float) -> None:
    assert not list(runs_dry((Phase(4.0, 2.0), Phase(6.0, 6.0)), charge))


def test_an_empty_battery_does_what_costs_nothing() -> None:
    (fate,) = runs_dry((Phase(4.0, 0.0), Phase(6.0, 6.0)), 0.0)
    assert fate.after == 4.0


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
        (fate,) = goes_offline(world, 0, when, 100.0)
        assert fate.reason == "went offline"
        assert fate.after == pytest.approx(17.0)
        assert not list(goes_offline(world, 0, when, 17.0))  # done just before
        # Done with one part just then, it is away when the next begins.
        (fate,) = goes_offline(world, 0, When(10.0 * (i + 2), 0), 1.0)
        assert fate.after == 0.0


def test_a_step_alone_drives_nobody_away() -> None:
    groups = (Group(availability=Intermittent(0.5)),)
    world = Fleet(groups=groups).build(np.array([5]), 0)
    step = next(s for s in range(50) if world.online(np.array([0]), When(0.0, s))[0])
    assert not list(goes_offline(world, 0, When(0.0, step), 1e9))
