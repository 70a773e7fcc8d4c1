"""Batteries: run down by orders, recharged between them."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyfleet.runtime.simulated.batteries import Batteries
from anyfleet.world import Fleet, Group, Uniform, World

ONLY = np.array([0])


def world(*groups: Group, devices: int = 1) -> World:
    return Fleet(groups=groups).build(np.full(devices, 5), 0)


def left(batteries: Batteries, now: float) -> float:
    return float(batteries.charge(ONLY, now)[0])


def test_on_mains_nothing_is_ever_missing() -> None:
    batteries = Batteries(world(Group()))
    batteries.start_work(ONLY, 0.0)
    batteries.finish_work(ONLY, np.array([1e9]), 5.0)
    assert left(batteries, 5.0) == math.inf
    assert batteries.above_reserve(ONLY, 5.0).all()


def test_orders_run_it_down_and_idleness_recharges_it() -> None:
    batteries = Batteries(world(Group(battery=100.0, charge=0.9, recharge=2.0)))
    assert left(batteries, 0.0) == pytest.approx(90)
    assert left(batteries, 3.0) == pytest.approx(96)  # nobody has asked yet
    assert left(batteries, 50.0) == 100  # no more than full
    batteries.start_work(ONLY, 50.0)
    assert left(batteries, 60.0) == 100  # does not recharge while it works
    batteries.finish_work(ONLY, np.array([30.0]), 70.0)
    assert left(batteries, 70.0) == pytest.approx(70)
    assert left(batteries, 75.0) == pytest.approx(80)
    batteries.start_work(ONLY, 75.0)
    batteries.finish_work(ONLY, np.array([5.0]), 76.0)
    assert left(batteries, 76.0) == pytest.approx(75)


def test_below_its_reserve_a_device_takes_no_orders_until_it_has_recharged() -> None:
    batteries = Batteries(world(Group(battery=100.0, reserve=0.5, recharge=1.0)))
    batteries.start_work(ONLY, 0.0)
    batteries.finish_work(ONLY, np.array([60.0]), 10.0)
    assert not batteries.above_reserve(ONLY, 10.0)[0]
    assert not batteries.above_reserve(ONLY, 19.9)[0]
    assert batteries.above_reserve(ONLY, 20.0)[0]


def test_who_had_enough_is_looked_at_again_after_work() -> None:
    batteries = Batteries(world(Group(battery=100.0, reserve=0.5)))
    assert batteries.above_reserve(ONLY, 0.0)[0]
    batteries.start_work(ONLY, 0.0)
    assert batteries.above_reserve(ONLY, 5.0)[0]  # nothing is spent before the work is done
    batteries.finish_work(ONLY, np.array([60.0]), 10.0)
    assert not batteries.above_reserve(ONLY, 10.0)[0]
    spent = batteries.save()
    other = Batteries(world(Group(battery=100.0, reserve=0.5)))
    assert other.above_reserve(ONLY, 10.0)[0]
    other.restore(spent)
    assert not other.above_reserve(ONLY, 10.0)[0]


def test_an_empty_battery_is_empty_whatever_the_rounding() -> None:
    batteries = Batteries(world(Group(battery=0.3, reserve=0.0)))
    batteries.start_work(ONLY, 0.0)
    batteries.finish_work(ONLY, np.array([0.3 * (1 - 1e-15)]), 1.0)
    assert left(batteries, 1.0) == 0.0
    assert not batteries.above_reserve(ONLY, 1.0)[0]


def test_devices_on_mains_live_beside_batteries() -> None:
    both = world(Group(), Group(battery=10.0), devices=6)
    batteries, everybody = Batteries(both), np.arange(6)
    with np.errstate(all="raise"):
        batteries.start_work(everybody, 0.0)
        batteries.finish_work(everybody, np.full(6, 4.0), np.full(6, 1.0))
        charge = batteries.charge(everybody, 1.0)
    assert charge.tolist() == [math.inf if g == 0 else 6.0 for g in both.group]


@given(
    st.lists(st.tuples(st.floats(0, 50), st.floats(0, 20), st.floats(0, 50)), max_size=8),
    st.floats(0, 3),
)
def test_the_books_of_a_battery_balance(
    visits: list[tuple[float, float, float]], recharge: float
) -> None:
    """Never negative, never above full; an order takes exactly what it costs."""
    fleet = world(Group(battery=Uniform(60, 90), charge=0.7, recharge=recharge))
    batteries, now = Batteries(fleet), 0.0
    for idle, wanted, busy in visits:
        now += idle
        before = left(batteries, now)
        joules = min(wanted, before)
        batteries.start_work(ONLY, now)
        batteries.finish_work(ONLY, np.array([joules]), now + busy)
        now += busy
        assert left(batteries, now) == pytest.approx(before - joules, abs=1e-9)
        assert 0 <= left(batteries, now) <= 90


def test_what_is_saved_is_what_is_restored() -> None:
    fleet = world(Group(battery=100.0, recharge=1.0), devices=3)
    one, other = Batteries(fleet), Batteries(fleet)
    one.start_work(np.array([0, 2]), 5.0)
    one.finish_work(np.array([2]), np.array([40.0]), 9.0)
    saved = one.save()
    other.restore(saved)
    one.start_work(np.array([1]), 9.0)
    one.finish_work(
        np.array([1]), np.array([90.0]), 10.0
    )  # what was saved does not change any more
    assert other.charge(np.arange(3), 10.0).tolist() == [100.0, 100.0, 61.0]
    other.finish_work(np.array([0]), np.array([7.0]), 10.0)
    assert other.charge(np.arange(3), 12.0).tolist() == [95.0, 100.0, 63.0]
