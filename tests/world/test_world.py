"""What is true of devices, and what they say about it."""

import math
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from anyfleet import rng
from anyfleet.arrays import Flags, Floats, Ints
from anyfleet.core.messages import Conditions
from anyfleet.world import (
    ColumnLoss,
    Disc,
    Diurnal,
    Fleet,
    Group,
    Intermittent,
    LogNormal,
    Redrawn,
    Replayed,
    Reports,
    Shannon,
    Steady,
    Uniform,
    Wandering,
    World,
)
from anyfleet.world.links import BitRates, Way
from anyfleet.world.quantities import Moments, Number, When
from anyfleet.world.world import RuntimeConditions

DEVICES = 400
EVERYBODY = np.arange(DEVICES)
ONLY = np.array([0])
NOW = When(35.0, 4)
WAYS: tuple[Way, ...] = ("up", "down")
CHANGING = Group(
    speed=LogNormal(1e9, 0.5, 1e8, 1e10),
    load=Redrawn(Uniform(1.0, 3.0)),
    memory=Redrawn(Uniform(1e6, 1e9), every=10.0),
    energy=Uniform(1e-27, 1e-26),
    distance=Redrawn(Disc(500.0)),
    link=Steady(bit_rate_up=Wandering(1e6, every=5.0), bit_rate_down=Uniform(1e6, 4e6)),
    battery=Uniform(50.0, 500.0),
    availability=Intermittent(0.7, every=20.0),
    mortality=0.2,
    column_loss=ColumnLoss(error=0.2),
)
SHANNON = Group(
    link=Shannon(fading=True, shared=True),
    distance=Redrawn(Disc(500.0)),
    column_loss=ColumnLoss(minimum_bit_rate=1e5),
)


def build(*groups: Group, reports: Reports | None = None, devices: int = DEVICES) -> World:
    fleet = Fleet(groups=groups or (CHANGING, SHANNON), reports=reports or Reports())
    return fleet.build(np.full(devices, 9), 3)


def same(one: Conditions, two: Conditions) -> bool:
    return all(
        np.array_equal(getattr(one, f.name), getattr(two, f.name), equal_nan=True)
        for f in fields(one)
    )


def report(world: World, devices: Ints, when: When) -> Conditions:
    told = RuntimeConditions(np.full(len(devices), 42.0), np.full(len(devices), 0.5))
    true = world.conditions(devices, world.reports.when(when), 7)
    return world.report(devices, when, true, told)


# --- truth ------------------------------------------------------------------------------------


def test_only_its_own_key_decides_about_a_device() -> None:
    """Neither who is asked with it, nor in which order, nor when others were asked."""
    world, some = build(), np.array([399, 3, 77])
    together = world.conditions(EVERYBODY, NOW, 7)
    assert same(world.conditions(some, NOW, 7), together.take(some))
    assert (world.online(some, NOW) == world.online(EVERYBODY, NOW)[some]).all()
    keys = rng.fold(rng.root(0, "test"), torch.arange(DEVICES))
    dead = world.dies(EVERYBODY, keys, NOW)
    assert (world.dies(some, keys[torch.from_numpy(some)], NOW) == dead[some]).all()
    columns = np.full(DEVICES, 8)
    mine = keys[torch.from_numpy(some)]
    for way in WAYS:
        came = world.delivered_columns(columns, EVERYBODY, keys, NOW, active=7, way=way)
        alone = world.delivered_columns(columns[some], some, mine, NOW, active=7, way=way)
        assert (alone == came[some]).all()


@pytest.mark.parametrize("name", ["speed", "energy", "battery"])
def test_laws_draw_once_for_a_device(name: str) -> None:
    world = build(CHANGING)
    one, two = (world.values(name, EVERYBODY, when) for when in (NOW, When(1e6, 90)))
    assert (one == two).all()
    assert len(set(one.tolist())) == DEVICES


def test_columns_are_drawn_independently() -> None:
    world = build(Group(speed=Uniform(1, 2), memory=Uniform(1, 2)))
    speed, memory = (world.values(name, EVERYBODY, NOW) for name in ("speed", "memory"))
    assert abs(np.corrcoef(speed, memory)[0, 1]) < 5 / math.sqrt(DEVICES)


def test_load_varies_by_step_and_memory_by_time() -> None:
    world = build(CHANGING)
    now, later, next_step = When(35.0, 4), When(45.0, 4), When(35.0, 5)

    def load(when: When) -> Floats:
        return world.values("load", EVERYBODY, when)

    def memory(when: When) -> Floats:
        return world.values("memory", EVERYBODY, when)

    assert (load(now) == load(later)).all()
    assert (load(now) != load(next_step)).any()
    assert (memory(now) == memory(next_step)).all()
    assert (memory(now) != memory(later)).any()


def test_other_work_takes_its_part_of_the_speed() -> None:
    world = build(CHANGING)
    own = world.conditions(EVERYBODY, NOW, 1)
    speed, load = (world.values(name, EVERYBODY, NOW) for name in ("speed", "load"))
    assert own.speed == pytest.approx(speed / load)
    assert (own.load == load).all()


def test_devices_die_as_often_as_they_are_told_to() -> None:
    world = build(CHANGING, Group())
    keys = rng.fold(
        rng.fold(rng.root(0, "test"), torch.arange(DEVICES))[:, None], torch.arange(100)
    )
    dead = np.stack([world.dies(EVERYBODY, keys[:, visit], NOW) for visit in range(100)])
    mortal = dead[:, world.group == 0]
    assert abs(mortal.mean() - 0.2) < 5 * math.sqrt(0.2 * 0.8 / mortal.size)
    assert not dead[:, world.group == 1].any()


def test_mortality_changes_with_time_and_with_steps(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("x\n1\n0\n")
    keys = rng.fold(rng.root(0, "test"), torch.arange(DEVICES))
    for every, moments in ((10.0, (0.0, 10.0)), (None, (0, 1))):
        world = build(Group(mortality=Replayed(trace, "x", every=every, shift=False)))
        whens = [When(float(m), 0) if every else When(5.0, int(m)) for m in moments]
        first, second = (world.dies(EVERYBODY, keys, when) for when in whens)
        assert first.all()
        assert not second.any()


def test_a_shared_band_is_divided_by_those_who_use_it() -> None:
    world = build(
        Group(link=Steady(bit_rate_up=6e6, bit_rate_down=3e6, shared=True)),
        Group(link=Steady(4e6, 4e6)),
    )
    alone, three = (world.bit_rates(EVERYBODY, NOW, active) for active in (1, 3))
    shared = world.group == 0
    assert (three.up[shared] * 3 == alone.up[shared]).all()
    assert (three.down[shared] * 3 == alone.down[shared]).all()
    assert (three.up[~shared] == alone.up[~shared]).all()


def test_rates_change_with_the_link_and_with_the_place() -> None:
    moving = build(Group(link=Shannon(), distance=Redrawn(Disc(500.0), every=7.0)))
    assert moving.bit_rates_until(ONLY, When(8.0, 0)) == [14.0]
    wandering = build(Group(link=Steady(Wandering(1e6, every=5.0), 1e6)))
    assert wandering.bit_rates_until(ONLY, When(8.0, 0)) == [10.0]
    assert build(Group()).bit_rates_until(ONLY, When(8.0, 0)) == [math.inf]
    coming = build(Group(availability=Intermittent(0.5, every=30.0)))
    assert coming.online_until(ONLY, When(8.0, 0)) == [30.0]


@dataclass(frozen=True)
class Alternating:
    """Availability and link of a user's own, who knows one point in time at once."""

    every: float
    shared: bool = False
    send_power: float = 0.1
    receive_power: float = 0.0

    def online(self, keys: Tensor, when: When) -> Flags:
        return np.full(len(keys), math.floor(when.now / self.every) % 3 < 2)

    def bit_rates(self, keys: Tensor, when: When, distance: Floats, active: int) -> BitRates:
        rate = 1e6 * (1 + math.floor(when.now / self.every) % 3) / active
        return BitRates(distance * rate, distance + rate)

    def until(self, when: When) -> float:
        return (math.floor(when.now / self.every) + 1) * self.every

    def outage(
        self, keys: Tensor, when: When, distance: Floats, minimum: float, *, active: int, way: Way
    ) -> Floats:
        return np.zeros(len(keys))


def test_links_that_may_wait_for_a_new_round_are_known() -> None:
    by_time, by_round = Redrawn(Uniform(1e5, 1e6), every=2.0), Redrawn(Uniform(1e5, 1e6))
    steady = (
        Group(),
        Group(link=Steady(by_time, 1e6)),
        Group(link=Shannon(), distance=Redrawn(Disc(500.0), every=7.0)),
    )
    changing = (
        Group(link=Steady(1e6, by_round)),
        Group(link=Shannon(fading=True)),
        Group(link=Shannon(), distance=Redrawn(Disc(500.0))),
        Group(link=Alternating(13.0)),  # nothing is known of a link of a user's own
    )
    assert not build(*steady).rounds_change_links
    assert all(build(*steady, each).rounds_change_links for each in changing)


def test_every_device_has_a_moment_of_its_own() -> None:
    """The very same bits as one device at a time, whoever is asked with whom."""
    trace = Replayed(Path(__file__).parent / "trace.csv", "rate", every=3.0)
    world = build(
        CHANGING,
        SHANNON,
        Group(load=Wandering(Redrawn(Uniform(1.0, 2.0), every=7.0), every=3.0), speed=trace),
        Group(availability=Diurnal(every=40.0, period=900.0), link=Shannon(shared=True)),
        Group(availability=Alternating(13.0), link=Alternating(17.0)),
        Group(availability=Intermittent(0.5), link=Steady(Redrawn(Uniform(1.0, 2.0)), 1e6)),
    )
    devices = np.tile(np.random.default_rng(0).permutation(DEVICES)[:60], 2)
    many = Moments(np.linspace(0.0, 700.0, 120), np.arange(120) % 5)
    active = 1 + np.arange(120) % 4
    rates, pace = world.bit_rates(devices, many, active), world.compute_conditions(devices, many)
    found = (
        *rates,
        *pace.values(),
        world.online(devices, many),
        world.bit_rates_until(devices, many),
        world.compute_until(devices, many),
        world.online_until(devices, many),
    )
    for row, device in enumerate(devices):
        one, when = np.array([device]), When(float(many.now[row]), int(many.round_index[row]))
        alone = (
            *world.bit_rates(one, when, int(active[row])),
            *world.compute_conditions(one, when).values(),
            world.online(one, when),
            world.bit_rates_until(one, when),
            world.compute_until(one, when),
            world.online_until(one, when),
        )
        assert [float(each[row]) for each in found] == [float(each[0]) for each in alone]


@pytest.mark.parametrize(
    "name",
    ["speed", "load", "energy", "overhead", "latency", "bandwidth", "fixed"],
)
def test_what_calculating_takes_changes_with_time(name: str) -> None:
    changed = {name: Redrawn(Uniform(0.1, 0.9), every=7.0)}
    world = build(Group(**changed))  # type: ignore[arg-type]
    assert world.compute_until(ONLY, When(8.0, 0)) == [14.0]
    other = build(Group(memory=Redrawn(Uniform(1, 2), every=7.0)))
    assert other.compute_until(ONLY, NOW) == [math.inf]
    own = world.conditions(EVERYBODY, NOW, 1)
    found = world.compute_conditions(EVERYBODY, NOW)
    assert all((getattr(own, name) == value).all() for name, value in found.items())
    later = world.compute_conditions(EVERYBODY, When(42.0, 4))
    assert any((later[name] != value).any() for name, value in found.items())


def test_a_link_that_never_fails_is_known_as_such() -> None:
    assert not build(Group(), Group(column_loss=ColumnLoss(error=0.0))).lossy
    assert build(Group(), Group(column_loss=ColumnLoss(error=0.1))).lossy
    assert build(Group(column_loss=ColumnLoss(minimum_bit_rate=1e3))).lossy


def test_columns_are_lost_when_the_rate_is_too_low() -> None:
    """Without fading a link either carries every column or none."""
    groups = (
        Group(link=Steady(1e6, 1e6), column_loss=ColumnLoss(minimum_bit_rate=2e6)),
        Group(link=Steady(3e6, 1e6), column_loss=ColumnLoss(minimum_bit_rate=2e6)),
        Group(link=Steady(3e6, 1e6, shared=True), column_loss=ColumnLoss(minimum_bit_rate=2e6)),
        Group(link=Steady(1e6, 3e6), column_loss=ColumnLoss(minimum_bit_rate=2e6)),
    )
    world, count = build(*groups), np.full(DEVICES, 8)
    keys = rng.fold(rng.root(0, "test"), torch.arange(DEVICES))
    up, down = (world.delivered_columns(count, EVERYBODY, keys, NOW, active=2, way=w) for w in WAYS)
    assert up.tolist() == [8 if g == 1 else 0 for g in world.group]
    assert down.tolist() == [8 if g == 3 else 0 for g in world.group]


# --- reports ----------------------------------------------------------------------------------


def test_a_fresh_report_is_the_truth() -> None:
    world = build()
    told, own = report(world, EVERYBODY, NOW), world.conditions(EVERYBODY, NOW, 7)
    assert (told.battery == 42.0).all()
    assert (told.loss == 0.5).all()
    assert same(replace(told, battery=own.battery, loss=own.loss), own)


def test_an_old_report_is_the_truth_of_then_but_for_the_battery() -> None:
    fresh, old = build(), build(reports=Reports(rounds=2, seconds=30.0))
    then = report(fresh, EVERYBODY, When(5.0, 2))
    assert same(report(old, EVERYBODY, NOW), then)
    assert not same(report(fresh, EVERYBODY, NOW), then)
    # Nobody reports from before the start.
    assert same(report(old, EVERYBODY, When(3.0, 1)), report(fresh, EVERYBODY, When(0.0, 0)))


def test_noise_has_the_deviation_it_is_given_and_the_right_median() -> None:
    exact, noisy = build(), build(reports=Reports(noise=0.3))
    one, other = report(exact, EVERYBODY, NOW), report(noisy, EVERYBODY, NOW)
    for name in ("speed", "bit_rate_up", "bit_rate_down", "memory", "battery"):
        logs = np.log(getattr(other, name) / getattr(one, name))
        assert abs(logs.mean()) < 5 * 0.3 / math.sqrt(DEVICES)
        assert abs(logs.std() - 0.3) < 5 * 0.3 / math.sqrt(2 * DEVICES)
    # Asked again in the same step, a device says the same; in the next it errs anew.
    assert same(report(noisy, EVERYBODY, NOW), other)
    assert (report(noisy, EVERYBODY, When(35.0, 5)).battery != other.battery).all()


def test_the_truth_has_no_noise() -> None:
    exact, noisy = build(), build(reports=Reports(noise=0.3, rounds=3))
    assert same(exact.conditions(EVERYBODY, NOW, 7), noisy.conditions(EVERYBODY, NOW, 7))


@pytest.mark.parametrize("name", ["rounds", "seconds", "noise"])
def test_reports_from_the_future_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"Reports.{name}"):
        Reports(**{name: -1})


def test_traces_are_replayed_in_every_field(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("x\n0.5\n0.25\n1\n")
    number: Number = Replayed(trace, "x", every=10.0, shift=False)
    world = build(Group(speed=number, memory=number, load=number))
    for name in ("speed", "memory", "load"):
        seen = [world.values(name, EVERYBODY[:1], When(10.0 * i, 0))[0] for i in range(4)]
        assert seen == [0.5, 0.25, 1, 0.5]
