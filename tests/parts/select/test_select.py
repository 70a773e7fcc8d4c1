"""Selections: the law of their draws, and blind to all but the devices they need."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from anyfleet import rng
from anyfleet.arrays import Flags, Ints
from anyfleet.core.messages import Devices, Kind
from anyfleet.core.server import Server
from anyfleet.core.slots import Schedule, Select
from anyfleet.core.view import OrderStatus, OrderStatuses, View
from anyfleet.errors import CompositionError
from anyfleet.methods import fedavg
from anyfleet.parts.schedule import Buffered, Deadline, HoldAndFetch, Surveyed, Synchronous
from anyfleet.parts.select import Everyone, InOrder, Largest, Learned, Quota, Uniform
from anyfleet.runtime import Simulated
from tests.helpers import small


def seen(size: int, free: Any, *, kinds: Ints | None = None) -> View:
    """A view of a fleet of this size; `kinds` are levels and groups."""
    task = small.task()
    view = Server(fedavg(), task, Simulated(task, small.world(task)), 0).view()
    ones = np.ones(size, dtype=np.int64)
    kinds = ones if kinds is None else kinds
    return replace(
        view,
        devices=Devices(level=kinds, samples=ones, group=kinds, column_width=np.ones(len(kinds))),
        free=free,
    )


def all_free(devices: Ints) -> Flags:
    return np.ones(len(devices), dtype=np.bool_)


@pytest.mark.parametrize("size", [60, 6000])
def test_every_free_device_is_equally_likely(size: int) -> None:
    # A third of them free: every twentieth of those should be drawn equally often.
    view = seen(size, lambda devices: devices % 3 == 1)
    drawn = [Uniform(5)(view, None, rng.root(seed, "law")) for seed in range(800)]
    assert all(len(set(ids.tolist())) == 5 and (np.diff(ids) > 0).all() for ids in drawn)
    chosen = np.concatenate(drawn)
    assert (chosen % 3 == 1).all()
    counts = np.bincount(chosen * 20 // size, minlength=20)
    expected = len(chosen) / 20
    # Without replacement the sum is smaller than chi-square with 19 degrees, never larger.
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert 4 < statistic < 19 + 4 * np.sqrt(38)


@pytest.mark.parametrize("size", [60, 6000, 100_000])
def test_the_few_that_are_free_are_found(size: int) -> None:
    there = np.array([3, size // 2, size - 1])
    view = seen(size, lambda devices: np.isin(devices, there))
    assert Uniform(5)(view, None, rng.root(0, "few")).tolist() == there.tolist()
    nobody = Uniform(5)(seen(size, lambda devices: devices < 0), None, rng.root(0, "few"))
    assert nobody.dtype == np.int64
    assert len(nobody) == 0


def test_a_draw_from_a_million_looks_at_few() -> None:
    looked: list[Ints] = []

    def free(devices: Ints) -> Flags:
        looked.append(devices)
        there: Flags = devices % 2 == 0
        return there

    assert len(Uniform(100)(seen(10**6, free), None, rng.root(0, "many"))) == 100
    assert sum(map(len, looked)) < 2000


def test_a_fraction_is_of_the_whole_fleet() -> None:
    view = seen(6000, lambda devices: devices % 2 == 0)
    assert len(Uniform(fraction=0.1)(view, None, rng.root(0, "part"))) == 600


@pytest.mark.parametrize("select", [Everyone(), Uniform(50), Uniform(fraction=0.5)])
def test_a_schedule_that_wants_few_gets_a_draw_of_the_free_without_a_sweep(select: Select) -> None:
    looked: list[Ints] = []

    def free(devices: Ints) -> Flags:
        looked.append(devices)
        there: Flags = devices % 2 == 0
        return there

    view = replace(seen(100_000, free), most_devices=20)
    chosen = [np.asarray(select(view, None, rng.root(seed, "few"))) for seed in range(200)]
    assert all(len(ids) == 20 and (ids % 2 == 0).all() for ids in chosen)
    assert sum(map(len, looked)) < 200 * 1000
    # Without preferences: the mean of uniform numbers below 100,000.
    mean = np.concatenate(chosen).mean()
    assert mean == pytest.approx(50_000, abs=5 * 100_000 / np.sqrt(12 * 4000))


# --- quotas -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "expected"), [(8, [2, 2, 2, 2]), (10, [3, 3, 2, 2]), (3, [1, 1, 1]), (1, [1])]
)
def test_1_3_a_quota_is_shared_evenly_and_the_rest_from_the_strongest_level(
    count: int, expected: list[int]
) -> None:
    view = seen(400, all_free, kinds=np.arange(400) % 4)
    chosen = Quota(count)(view, None, rng.root(2, "quota"))
    assert np.bincount(chosen % 4).tolist() == expected
    assert (np.diff(chosen) > 0).all()


def test_a_quota_leaves_levels_without_devices_out_and_does_not_fill_up_from_others() -> None:
    kinds = np.array([1, 3, 3, 3, 3, 3, 7, 7, 7, 7])
    view = seen(10, all_free, kinds=kinds)
    chosen = Quota(9)(view, None, rng.root(0, "quota"))
    assert np.bincount(kinds[chosen], minlength=8).tolist() == [0, 1, 0, 3, 0, 0, 0, 3]
    few = replace(view, free=lambda devices: (devices < 3) | (devices > 8))
    assert Quota(9)(few, None, rng.root(0, "quota")).tolist() == [0, 1, 2, 9]
    nobody = Quota(9)(replace(view, free=lambda devices: devices < 0), None, rng.root(0, "quota"))
    assert nobody.dtype == np.int64
    assert len(nobody) == 0


def test_a_quota_of_groups_is_what_it_says() -> None:
    """specification §1.19: five i.i.d. devices and five others, as the authors' program starts."""
    kinds = np.repeat([0, 1, 2], 20)
    view = seen(60, all_free, kinds=kinds)
    chosen = Quota(by="group", counts=(5, 5))(view, None, rng.root(1, "quota"))
    assert np.bincount(kinds[chosen]).tolist() == [5, 5]
    more = Quota(by="group", counts=(0, 1, 30, 9))(view, None, rng.root(1, "quota"))
    assert np.bincount(kinds[more]).tolist() == [0, 1, 20]


@pytest.mark.parametrize("size", [60, 6000])
def test_within_a_level_every_free_device_is_equally_likely(size: int) -> None:
    kinds = (np.arange(size) % 10 > 7).astype(np.int64)  # one in five is of level 1
    view = seen(size, lambda devices: devices % 2 == 0, kinds=kinds)
    drawn = np.concatenate(
        [Quota(counts=(1, 3))(view, None, rng.root(seed, "law")) for seed in range(600)]
    )
    weak = drawn[kinds[drawn] == 1]
    assert len(weak) == 1800
    counts = np.bincount(weak * 6 // size, minlength=6)
    statistic = ((counts - 300) ** 2 / 300).sum()
    assert statistic < 5 + 4 * np.sqrt(10)


@pytest.mark.parametrize("size", [50, 9000])
def test_a_quota_of_one_level_is_a_uniform_draw(size: int) -> None:
    view = seen(size, lambda devices: devices % 3 > 0)
    for seed in range(5):
        key = rng.root(seed, "same")
        assert Quota(7)(view, None, key).tolist() == Uniform(7)(view, None, key).tolist()


def test_a_quota_from_a_million_looks_at_few_and_respects_what_a_schedule_wants() -> None:
    looked: list[Ints] = []

    def free(devices: Ints) -> Flags:
        looked.append(devices)
        return all_free(devices)

    kinds = np.arange(10**6) % 4
    view = seen(10**6, free, kinds=kinds)
    assert len(Quota(100)(view, None, rng.root(0, "many"))) == 100
    assert sum(map(len, looked)) < 2000
    one = [Quota(8)(replace(view, most_devices=1), None, rng.root(s, "one")) for s in range(200)]
    assert all(len(ids) == 1 for ids in one)
    counts = np.bincount(kinds[np.concatenate(one)], minlength=4)
    assert (abs(counts - 50) < 4 * np.sqrt(200 * 3 / 16)).all()


# --- the largest ------------------------------------------------------------------------------


def held(*norms: tuple[int, float]) -> list[OrderStatus]:
    """Orders whose results wait, by device and reported norm."""
    return [
        OrderStatus(100 + device, device, 0, Kind.HOLD, report={"norm": norm})
        for device, norm in norms
    ]


def fetched(select: Largest, statuses: list[OrderStatus]) -> list[int]:
    return list(select.fetch(OrderStatuses.of(statuses), seen(5, all_free)))


def test_1_20_bn2_example() -> None:
    statuses = held(*enumerate((0.5, 2.0, 1.0, 3.0, 0.1)))
    assert fetched(Largest(5, 2), statuses) == [101, 103]
    assert fetched(Largest(5, 2), statuses[::-1]) == [101, 103]


def test_1_20_ties_go_by_device_and_what_is_not_a_number_comes_last() -> None:
    reported = held((4, 1.0), (1, math.nan), (2, 1.0), (0, 0.5))
    silent = [*reported, OrderStatus(7, 3, 0, Kind.HOLD)]  # reported nothing
    for keep, expected in ((1, [2]), (2, [2, 4]), (3, [0, 2, 4]), (4, [0, 1, 2, 4])):
        assert fetched(Largest(9, keep), silent) == [100 + device for device in expected]


def test_a_selection_fetches_all_that_is_held_unless_it_says_otherwise() -> None:
    statuses = OrderStatuses.of(held((4, 1.0), (1, 2.0)))
    assert list(Uniform(3).fetch(statuses, seen(5, all_free))) == [104, 101]


def test_1_20_those_who_train_are_a_uniform_draw() -> None:
    view, key = seen(500, all_free), rng.root(0, "draw")
    assert Largest(20, 10)(view, None, key).tolist() == Uniform(20)(view, None, key).tolist()
    assert len(Largest(20, 10)(replace(view, most_devices=4), None, key)) == 4


@pytest.mark.parametrize("schedule", [Synchronous(), Deadline(5.0), Buffered(4, 2)], ids=str)
def test_the_largest_need_a_schedule_that_lets_results_wait(schedule: Schedule) -> None:
    method = replace(fedavg(), schedule=HoldAndFetch())
    two_phase = replace(method, select=Largest())
    with pytest.raises(CompositionError, match=r"wait on the devices.*schedule=HoldAndFetch"):
        replace(two_phase, schedule=schedule)
    replace(two_phase, schedule=Surveyed(HoldAndFetch()))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Quota, "count or counts"),
        (lambda: Quota(3, counts=(1,)), "count or counts"),
        (lambda: Quota(0), "Quota.count"),
        (lambda: Quota(3, by="colour"), "Quota.by"),  # type: ignore[arg-type]
        (lambda: Quota(counts=(1, -1)), "Quota.counts"),
        (lambda: Quota(counts=(0, 0)), "Quota.counts"),
        (lambda: Learned(0), "Learned.count"),
        (lambda: Learned(1, alpha=0), "Learned.alpha"),
        (lambda: Learned(1, beta=1.5), "Learned.beta"),
        (lambda: Largest(5, 6), "Largest.draw"),
        (lambda: Largest(5, 0), "Largest.keep"),
    ],
)
def test_impossible_selections_are_refused(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("select", "told"),
    [
        (Uniform(count=6), "Uniform.count is 6, but the fleet has 5 devices"),
        (Learned(count=6), "Learned.count is 6, but the fleet has 5 devices"),
        (Largest(draw=9, keep=2), "Largest.draw is 9, but the fleet has 5 devices"),
        (Quota(count=6), "Quota.count=6 asks for more devices than the fleet has: 3 of level 1"),
        (Quota(counts=(1, 4)), "Quota.counts asks for more devices than the fleet has: 4 of lev"),
        (Quota(counts=(0, 0, 1), by="group"), "1 of group 2, which has 0"),
        (Uniform(count=5), ""),
        (Uniform(fraction=1.0), ""),
        (Everyone(), ""),
        (Largest(draw=5, keep=2), ""),
        (Quota(count=4), ""),
        (Quota(counts=(3, 2, 0)), ""),
    ],
)
def test_a_selection_says_when_it_asks_for_more_than_there_are(select: Select, told: str) -> None:
    kinds = np.array([0, 0, 0, 1, 1])
    devices = Devices(level=kinds, samples=kinds, group=kinds, column_width=np.ones(5))
    found = select.excess(devices)
    assert told in found
    assert bool(found) == bool(told)


def test_devices_take_turns_and_those_that_are_not_free_are_passed_over() -> None:
    view = seen(5, all_free)
    turns = [
        InOrder(2)(replace(view, round_index=turn), None, rng.root(turn, "any")).tolist()
        for turn in range(6)
    ]
    assert turns == [[0, 1], [2, 3], [0, 4], [1, 2], [3, 4], [0, 1]]
    some = seen(5, lambda devices: devices != 1)
    assert InOrder(2)(some, None, rng.root(0, "any")).tolist() == [0]
    assert InOrder(9)(view, None, rng.root(0, "any")).tolist() == [0, 1, 2, 3, 4]
    assert "InOrder.count is 9" in InOrder(9).excess(view.devices)
    with pytest.raises(ValueError, match=r"InOrder\.count must be at least 1"):
        InOrder(0)
