"""Phases of orders while bit rates and loads change; by hand."""

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyfleet.arrays import Floats, Ints, join
from anyfleet.runtime.simulated.phases import Phases, Progress, SteadyCost, follow, transfer_cost
from anyfleet.world.quantities import Moments

WATTS = 2.0


def at(*seconds: float) -> Moments:
    return Moments(np.array(seconds), np.zeros(len(seconds), dtype=np.int64))


def changing(rates: Sequence[float], bits: float, *starts: float, about: float = 2.0) -> Phases:
    """Of bits over links that have each rate for a second, and the last for ever."""
    known, last = np.array(rates, dtype=np.float64), len(rates) - 1

    def cost(rows: Ints, moments: Moments) -> SteadyCost:
        rate = known[np.minimum(np.floor(moments.now).astype(int), last)]
        return transfer_cost(np.full(len(rows), bits), rate, np.full(len(rows), WATTS))

    def until(rows: Ints, moments: Moments) -> Floats:
        return np.where(moments.now < last, np.floor(moments.now) + 1, np.inf)

    start = at(*starts or (0.0,))
    return follow(start, np.full(len(start), about), cost, until)


def only(found: Progress) -> tuple[float, float, float]:
    (seconds,), (done,), (joules,) = found
    return float(seconds), float(done), float(joules)


def after(phases: Phases, seconds: float) -> tuple[float, float, float]:
    return only(phases.progress_at(np.array([seconds])))


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
    assert phase.seconds == pytest.approx([seconds])
    assert phase.joules == pytest.approx([WATTS * (seconds - paused)])


@pytest.mark.parametrize(("rates", "bits"), [([10, 0], 10.5), ([0], 1)])
def test_over_a_link_that_is_gone_there_is_no_end(rates: list[float], bits: float) -> None:
    phase = changing(rates, bits)
    assert math.isinf(phase.seconds[0])
    _, done, joules = after(phase, 5.0)
    assert done == pytest.approx(rates[0] / bits)
    assert joules == phase.joules[0] == (WATTS if rates[0] else 0.0)


@pytest.mark.parametrize(
    ("seconds", "bits", "joules"),
    [(-1, 0, 0), (0, 0, 0), (0.5, 0, 0), (1.5, 2, 1), (2, 4, 2), (2.5, 4, 2), (3.1, 5, 2.2)],
)
def test_half_way_it_has_carried_what_the_link_carried(
    seconds: float, bits: float, joules: float
) -> None:
    """Nothing, then four bits in a second, nothing again, then ten bits a second."""
    phase = changing([0, 4, 0, 10], 10)
    _, done, spent = after(phase, seconds)
    assert 10 * done == pytest.approx(bits)
    assert spent == pytest.approx(joules)
    assert after(phase, 99.0) == (phase.seconds[0], 1.0, phase.joules[0])


@pytest.mark.parametrize(("charge", "seconds"), [(0, 1.0), (1, 1.5), (2, 3.0), (2.2, 3.1)])
def test_a_charge_lasts_until_more_is_drawn(charge: float, seconds: float) -> None:
    """The last moment at which no more was spent: an empty battery can wait for a link."""
    phase = changing([0, 4, 0, 10], 10)
    (found,) = phase.seconds_for(np.array([charge], dtype=np.float64))
    assert found == pytest.approx(seconds)
    assert after(phase, found)[2] == pytest.approx(charge)


RATES = st.lists(st.one_of(st.just(0.0), st.floats(0.5, 10)), max_size=6)


@given(RATES, st.floats(0.5, 10), st.floats(0.1, 100), st.floats(0, 5), st.floats(0, 1))
def test_what_crosses_in_the_time_are_the_bits(
    some: list[float], last: float, bits: float, start: float, share: float
) -> None:
    """At the end, and at any moment before it."""
    rates = [*some, last]
    phase = changing(rates, bits, start)
    seconds = share * float(phase.seconds[0])
    end = start + seconds
    edges = [start, *(float(e) for e in range(1, len(rates)) if start < e < end), end]
    spans = [
        (rates[min(math.floor((a + b) / 2), len(rates) - 1)], b - a) for a, b in pairwise(edges)
    ]
    carried, sending = sum(r * s for r, s in spans), sum(s for r, s in spans if r)
    _, done, joules = after(phase, seconds)
    assert done * bits == pytest.approx(carried, abs=1e-9)
    assert joules == pytest.approx(WATTS * sending, abs=1e-9)
    assert after(phase, float(phase.seconds[0]))[1] == 1


@given(RATES, st.lists(st.floats(0, 7), min_size=1, max_size=6), st.floats(0, 20))
def test_phases_that_are_picked_joined_and_put_stay_the_same(
    rates: list[float], starts: list[float], elapsed: float
) -> None:
    """Whoever else is in the table, and whatever has left it."""
    many = changing([*rates, 3.0], 10.0, *starts)
    back = np.arange(len(starts))[::-1]
    other = changing([1.0, 7.0, 2.0], 25.0, 0.0)
    mixed = join([other, many.take(back), other]).put(np.array([0]), other)
    mixed = mixed.take(1 + back).pruned()
    assert len(mixed.points) == many.changes.sum()
    for row, start in enumerate(starts):
        alone = changing([*rates, 3.0], 10.0, start)
        for found in (many.take([row]), mixed.take([row])):
            assert (found.seconds, found.joules) == (alone.seconds, alone.joules)
            assert after(found, elapsed) == after(alone, elapsed)


def test_what_changes_for_ever_is_carried_on_at_its_average() -> None:
    def cost(rows: Ints, moments: Moments) -> SteadyCost:
        rate = np.where(np.floor(moments.now) % 2 == 1, 4.0, 2.0)
        rate = np.where(rows == 0, rate, 0.0)
        return transfer_cost(np.full(len(rows), 3e6), rate, np.full(len(rows), WATTS))

    about = np.array([1.0, math.inf])
    found = follow(at(0.0, 0.0), about, cost, lambda _, moments: np.floor(moments.now) + 1)
    assert found.seconds == pytest.approx([1e6, math.inf])
    assert found.joules == pytest.approx([WATTS * 1e6, 0.0])


@given(
    RATES,
    st.lists(st.floats(0, 7), min_size=1, max_size=6),
    st.floats(0.1, 60),
    st.sampled_from([0.0, 0.3, 3.0, 40.0, math.inf]),
)
def test_it_does_not_matter_how_far_changes_are_looked_up_ahead(
    rates: list[float], starts: list[float], bits: float, about: float
) -> None:
    """A piece at a time, all that will be needed, or too many: the very same bits."""
    one = changing([*rates, 3.0] * 5, bits, *starts, about=0.0)
    many = changing([*rates, 3.0] * 5, bits, *starts, about=about)
    for name in ("seconds", "joules", "changes", "first", "points"):
        assert getattr(one, name).tolist() == getattr(many, name).tolist()


@pytest.mark.parametrize("about", [0.0, 1.0, 9.0])
def test_the_round_stays_that_of_the_beginning(about: float) -> None:
    """What only a new round changes does not change under way."""
    asked: set[tuple[int, float, int]] = set()

    def cost(rows: Ints, moments: Moments) -> SteadyCost:
        asked.update(
            zip(rows.tolist(), moments.now.tolist(), moments.round_index.tolist(), strict=True)
        )
        return SteadyCost(np.full(len(rows), 2.5), np.full(len(rows), 5.0))

    start = Moments(np.array([0.0, 1.5]), np.array([7, 3]))
    found = follow(start, np.full(2, about), cost, lambda _, moments: np.floor(moments.now) + 1)
    assert found.joules.tolist() == [5.0, 5.0]
    needed = {(0, 0.0, 7), (0, 1.0, 7), (0, 2.0, 7), (1, 1.5, 3), (1, 2.0, 3), (1, 3.0, 3)}
    assert needed <= asked
    assert {(row, round_index) for row, _, round_index in asked} == {(0, 7), (1, 3)}


def test_a_transmission_that_nobody_lives_to_see_has_no_link() -> None:
    """Otherwise sums of seconds and joules would leave the numbers, and the clock with them."""
    bits, rates, watts = np.full(2, 1e6), np.array([1e-300, 1e-3]), np.array([1e3, 2.0])
    found = transfer_cost(bits, rates, watts)
    assert found.seconds.tolist() == [math.inf, 1e9]
    assert found.joules.tolist() == [0.0, 2e9]
