"""Phases of an order while bit rates and loads change; by hand."""

import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyfleet.runtime.simulated.phases import Phase, SteadyCost, follow, transfer_cost
from anyfleet.world.quantities import When, slot, slot_end

NOW = When(0.0, 0)
WATTS = 2.0


def changing(rates: Sequence[float], bits: float, start: float = 0.0) -> Phase:
    """Of bits over a link that has each rate for a second, and the last for ever."""

    def cost(when: When) -> SteadyCost:
        return transfer_cost(bits, rates[min(slot(when, 1.0), len(rates) - 1)], WATTS)

    def until(when: When) -> float:
        return slot_end(when, 1.0) if slot(when, 1.0) < len(rates) - 1 else math.inf

    return follow(When(start, 0), cost, until)


@pytest.mark.parametrize(
    ("rates", "bits", "start", "seconds", "paused"),
    [
        ([10], 25, 0.0, 2.5, 0.0),
        ([10, 2, 5], 10, 0.0, 1.0, 0.0),  # just done when the rate changes
        ([10, 2, 5], 11, 0.0, 1.5, 0.0),
        ([10, 2, 5], 22, 0.0, 4.0, 0.0),
        ([10, 2, 5], 22, 0.5, 0.5 + 1 + 15 / 5, 0.0),
        ([0, 0, 5], 10, 0.25, 1.75 + 2.0, 1.75),  # waits for the link
        ([10, 0, 5], 20, 0.5, 0.5 + 1 + 3.0, 1.0),
        ([10, 0], 10, 0.0, 1.0, 0.0),
        ([0], 0, 0.0, 0.0, 0.0),  # nothing needs no link
    ],
)
def test_transfers_integrate_changing_rates_and_waiting_costs_nothing(
    rates: list[float], bits: float, start: float, seconds: float, paused: float
) -> None:
    phase = changing(rates, bits, start)
    assert phase.seconds == pytest.approx(seconds)
    assert phase.joules == pytest.approx(WATTS * (seconds - paused))


@pytest.mark.parametrize(("rates", "bits"), [([10, 0], 10.5), ([0], 1)])
def test_over_a_link_that_is_gone_there_is_no_end(rates: list[float], bits: float) -> None:
    phase = changing(rates, bits)
    assert math.isinf(phase.seconds)
    assert phase.progress_at(5.0).done == pytest.approx(rates[0] / bits)
    assert phase.progress_at(5.0).joules == phase.joules == (WATTS if rates[0] else 0.0)


@pytest.mark.parametrize(
    ("seconds", "bits", "joules"),
    [(-1, 0, 0), (0, 0, 0), (0.5, 0, 0), (1.5, 2, 1), (2, 4, 2), (2.5, 4, 2), (3.1, 5, 2.2)],
)
def test_half_way_it_has_carried_what_the_link_carried(
    seconds: float, bits: float, joules: float
) -> None:
    """Nothing, then four bits in a second, nothing again, then ten bits a second."""
    phase = changing([0, 4, 0, 10], 10)
    assert 10 * phase.progress_at(seconds).done == pytest.approx(bits)
    assert phase.progress_at(seconds).joules == pytest.approx(joules)
    assert phase.progress_at(99.0) == phase.points[-1]


@pytest.mark.parametrize(("charge", "seconds"), [(0, 1.0), (1, 1.5), (2, 3.0), (2.2, 3.1)])
def test_a_charge_lasts_until_more_is_drawn(charge: float, seconds: float) -> None:
    """The last moment at which no more was spent: an empty battery can wait for a link."""
    phase = changing([0, 4, 0, 10], 10)
    assert phase.seconds_for(charge) == pytest.approx(seconds)
    assert phase.progress_at(phase.seconds_for(charge)).joules == pytest.approx(charge)


RATES = st.lists(st.one_of(st.just(0.0), st.floats(0.5, 10)), max_size=6)


@given(RATES, st.floats(0.5, 10), st.floats(0.1, 100), st.floats(0, 5), st.floats(0, 1))
def test_what_crosses_in_the_time_are_the_bits(
    some: list[float], last: float, bits: float, start: float, share: float
) -> None:
    """At the end, and at any moment before it."""
    rates = [*some, last]
    phase = changing(rates, bits, start)
    seconds = share * phase.seconds
    end = start + seconds
    edges = [start, *(float(e) for e in range(1, len(rates)) if start < e < end), end]
    spans = [
        (rates[min(math.floor((a + b) / 2), len(rates) - 1)], b - a) for a, b in pairwise(edges)
    ]
    carried, sending = sum(r * s for r, s in spans), sum(s for r, s in spans if r)
    found = phase.progress_at(seconds)
    assert found.done * bits == pytest.approx(carried, abs=1e-9)
    assert found.joules == pytest.approx(WATTS * sending, abs=1e-9)
    assert phase.progress_at(phase.seconds).done == 1


def test_what_changes_for_ever_is_carried_on_at_its_average() -> None:
    def cost(when: When) -> SteadyCost:
        return transfer_cost(3e6, 4.0 if slot(when, 1.0) % 2 else 2.0, WATTS)

    found = follow(NOW, cost, lambda when: slot_end(when, 1.0))
    assert found.seconds == pytest.approx(1e6)
    assert found.joules == pytest.approx(WATTS * 1e6)
    standing = follow(NOW, lambda when: SteadyCost(math.inf, 0.0), lambda when: slot_end(when, 1.0))
    assert math.isinf(standing.seconds)
    assert standing.joules == 0


def test_the_step_stays_that_of_the_beginning() -> None:
    """What only a new round changes does not change under way."""
    asked: list[When] = []

    def cost(when: When) -> SteadyCost:
        asked.append(when)
        return SteadyCost(2.5, 5.0)

    assert follow(When(0.0, 7), cost, lambda when: slot_end(when, 1.0)).joules == 5.0
    assert asked == [When(0.0, 7), When(1.0, 7), When(2.0, 7)]


def test_a_transmission_that_nobody_lives_to_see_has_no_link() -> None:
    """Otherwise sums of seconds and joules would leave the numbers, and the clock with them."""
    assert transfer_cost(1e6, 1e-300, 1e3) == SteadyCost(math.inf, 0.0)
    assert transfer_cost(1e6, 1e-3, 2.0) == SteadyCost(1e9, 2e9)
