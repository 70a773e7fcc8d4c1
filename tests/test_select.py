"""Selections: uniform in law, and blind to all but the devices they need."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from anyfleet import rng
from anyfleet.columns import Flags, Ints
from anyfleet.method import Select
from anyfleet.methods import fedavg
from anyfleet.runtime import Simulated
from anyfleet.select import Everyone, Uniform
from anyfleet.server import Server
from anyfleet.types import Devices
from anyfleet.view import View
from tests import small


def seen(size: int, free: Any) -> View:
    """A view of a fleet of this size."""
    task = small.task()
    view = Server(fedavg(), task, Simulated(task, small.world(task), 0), 0).view()
    ones = np.ones(size, dtype=np.int64)
    return replace(view, devices=Devices(level=ones, samples=ones, group=ones), free=free)


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

    view = replace(seen(100_000, free), most=20)
    chosen = [select(view, None, rng.root(seed, "few")) for seed in range(200)]
    assert all(len(ids) == 20 and (ids % 2 == 0).all() for ids in chosen)
    assert sum(map(len, looked)) < 200 * 1000
    # Without preferences: the mean of uniform numbers below 100,000.
    mean = np.concatenate(chosen).mean()
    assert mean == pytest.approx(50_000, abs=5 * 100_000 / np.sqrt(12 * 4000))
