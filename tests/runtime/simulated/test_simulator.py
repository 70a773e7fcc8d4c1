"""The simulated fleet: what orders cost, and how they end, by the worked numbers and by hand."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from anyfleet.arrays import Floats
from anyfleet.core.loop import Round, run
from anyfleet.core.message_size import index_bits
from anyfleet.core.messages import Kind
from anyfleet.core.plans import Plans
from anyfleet.core.slots import Plan, Schedule
from anyfleet.core.time_and_energy import Amount, training
from anyfleet.core.view import View
from anyfleet.elastic import cost, width
from anyfleet.elastic.cost.operations import Counting
from anyfleet.errors import CompositionError
from anyfleet.formulas.fedpmt import CNN_CIFAR, fedpmt_complexity
from anyfleet.methods import fedavg, heterofl
from anyfleet.parts.choose import LargestInTime
from anyfleet.parts.norm import Tracked
from anyfleet.parts.plan import WidthMenu
from anyfleet.parts.schedule import (
    Buffered,
    Deadline,
    HoldAndFetch,
    Overselected,
    Surveyed,
    Synchronous,
)
from anyfleet.parts.select import Everyone, Uniform
from anyfleet.runtime import Simulated
from anyfleet.runtime.simulated.clock import Clock
from anyfleet.tasks import Data, Split, Task, zoo
from anyfleet.tasks.partition import Iid
from anyfleet.world import (
    ColumnLoss,
    Fleet,
    Group,
    Intermittent,
    Redrawn,
    Replayed,
    Reports,
    Steady,
    Wandering,
    When,
)
from anyfleet.world import Uniform as Between
from anyfleet.world.links import BitRates, Way
from anyfleet.world.quantities import Seconds
from tests.core.test_local_training import orders
from tests.helpers import small

ALL = replace(fedavg(lr=0.1, batch_size=8), select=Everyone())
# Seconds that are easy to add up: links that take as long as computing.
SLOW = Group(
    speed=1e7, link=Steady(bit_rate_up=1e5, bit_rate_down=1e5, send_power=0.5, receive_power=0.25)
)


def rows(step: Round) -> list[SimpleNamespace]:
    return small.rows(step)


def fleet(*groups: Group, **settings: object) -> Fleet:
    return Fleet(groups=groups or (SLOW,), **settings)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Depths(Plan):
    """Devices of level p train the layers from `firsts[p]` on."""

    firsts: tuple[int, ...]

    def __call__(self, plans: Plans, view: View, state: object, key: Tensor) -> Plans:
        return plans.with_first_trained_layers(
            np.array(self.firsts)[view.devices.level[plans.device]]
        )


# --- compute ----------------------------------------------------------------------------------


def wide() -> Task:
    net = nn.Sequential(
        nn.Linear(4, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 2)
    )
    data = Data(torch.randn(40, 4), torch.arange(40) % 2)
    return Task.of(
        net, data, data, split=Split(devices=2, partition=Iid(samples=16), test_share=0.0)
    )


def test_half_the_width_is_about_a_quarter_of_the_compute() -> None:
    task, joules, seconds = wide(), [], []
    for share in (1.0, 0.5):
        method = replace(heterofl(widths=(share,), scaler=False), select=Everyone())
        for row in rows(small.steps(method, task, 1, fleet=fleet())[0]):
            slice_ = task.blueprint.prefix(share)
            assert row.flops == 16 * cost(task.blueprint, slice_).flops
            assert row.compute_seconds == pytest.approx(row.flops / 1e7)
        seconds.append(row.compute_seconds)
        joules.append(row.compute_joules)
    assert seconds[1] / seconds[0] == pytest.approx(0.25, abs=0.01)
    assert joules[1] / joules[0] == pytest.approx(0.25, abs=0.01)


def test_a_suffix_of_layers_spends_exactly_its_counted_share() -> None:
    task = small.task(devices=6)
    method = replace(ALL, plan=Depths((0, 1, 2)))
    step = small.steps(method, task, 1, fleet=fleet(SLOW, SLOW, SLOW))[0]
    assert {row.first_trained_layer for row in rows(step)} == {0, 1, 2}
    whole = cost(task.blueprint).flops
    for row in rows(step):
        mine = cost(task.blueprint, task.blueprint.prefix(1.0, row.first_trained_layer)).flops
        samples = len(task.data(row.device))
        assert row.flops == samples * mine
        assert row.compute_seconds == pytest.approx(samples * whole / 1e7 * (mine / whole))
        assert row.bits_up == 32 * task.blueprint.numel(
            task.blueprint.trained(row.first_trained_layer)
        )


def cifar() -> Task:
    """One batch of 20 for each of five devices."""
    data = Data(torch.randn(100, 3, 32, 32), torch.arange(100) % 10)
    split = Split(devices=5, partition=Iid(samples=20), test_share=0.0)
    return Task.of(zoo.cnn_cifar(), data, data, split=split)


@pytest.mark.parametrize("counting", ["paper", "per_batch"])
def test_fedpmts_deadline_times_through_the_simulator(counting: Counting) -> None:
    """Five speeds, the slowest trains the last layer only; 10 s for all of it on the fastest."""
    task = cifar()
    full = fedpmt_complexity(CNN_CIFAR, 20, counting)  # type: ignore[arg-type]
    groups = tuple(Group(speed=full / 10 / divisor) for divisor in (1, 2, 3, 4, 5))
    method = replace(fedavg(batch_size=20), select=Everyone(), plan=Depths((0, 1, 2, 3, 4)))
    step = small.steps(method, task, 1, fleet=fleet(*groups, counting=counting))[0]
    seconds = {row.level: row.compute_seconds for row in rows(step)}
    counted = [fedpmt_complexity(CNN_CIFAR, 20, counting, first=p) for p in range(5)]  # type: ignore[arg-type]
    assert [row.flops for row in sorted(rows(step), key=lambda row: row.level)] == counted
    assert [seconds[p] for p in range(5)] == pytest.approx(
        [10 * (p + 1) * counted[p] / full for p in range(5)]
    )
    if counting == "paper":
        assert [seconds[p] for p in (4, 3, 2, 1, 0)] == pytest.approx(
            [22.92, 22.91, 26.28, 18.66, 10.0], abs=0.01
        )


def test_frequency_and_overhead_and_load_reach_the_ledger() -> None:
    task = small.task(devices=4)

    @dataclass(frozen=True)
    class Slowly(Plan):
        def __call__(self, plans: Plans, view: View, state: object, key: Tensor) -> Plans:
            count = len(plans)
            return replace(
                plans, hyperparameters=replace(plans.hyperparameters, frequency=np.full(count, 5e8))
            )

    plain = fleet(replace(SLOW, overhead=0.1, load=2.0))
    one, two = (
        rows(small.steps(method, task, 1, fleet=plain)[0])
        for method in (ALL, replace(ALL, plan=Slowly()))
    )
    for fast, slow in zip(one, two, strict=True):
        assert fast.compute_seconds == pytest.approx(
            2 * (fast.flops / 1e7 + 4 * 0.1)
        )  # 30 samples by 8
        assert slow.compute_seconds == pytest.approx(2 * fast.compute_seconds)
        assert slow.compute_joules == pytest.approx(fast.compute_joules / 4)
        assert math.isnan(fast.frequency)
        assert slow.frequency == 5e8


# --- transfers --------------------------------------------------------------------------------


def test_a_transfer_integrates_a_rate_that_changes(tmp_path: Path) -> None:
    """Half, nothing, a quarter, the rest: 3.25 s; half a second of work; up a tenth, then fast.

    The second in which the link carries nothing is waited for, but costs nothing.
    """
    task = small.task(devices=1)
    (sized,) = rows(small.steps(ALL, task, 1)[0])
    bits = sized.bits_up
    trace = tmp_path / "trace.csv"
    down, up = (0.5, 0, 0.25, 1, 9), (9, 9, 9, 0.4, 2)
    lines = (f"{d * bits},{u * bits}" for d, u in zip(down, up, strict=True))
    trace.write_text("down,up\n" + "\n".join(lines))
    link = Steady(
        bit_rate_up=Replayed(trace, "up", every=1.0, shift=False),
        bit_rate_down=Replayed(trace, "down", every=1.0, shift=False),
        send_power=0.5,
        receive_power=0.25,
    )
    group = Group(speed=sized.flops / 0.5, link=link)
    (step,) = small.steps(ALL, task, 1, fleet=fleet(group))
    (row,) = rows(step)
    assert row.download_seconds == pytest.approx(3.25)
    assert row.compute_seconds == pytest.approx(0.5)
    assert row.upload_seconds == pytest.approx(0.25 + 0.45)
    assert row.download_joules == pytest.approx(0.25 * 2.25)
    assert row.upload_joules == pytest.approx(0.5 * 0.7)
    assert step.time == pytest.approx(4.45)


def stepped(folder: Path, numbers: Sequence[float], every: float) -> Replayed:
    """So many seconds each, the same for all devices."""
    trace = folder / f"{len(list(folder.iterdir()))}.csv"
    trace.write_text("\n".join(["x", *map(str, numbers)]))
    return Replayed(trace, "x", every=every, shift=False)


@pytest.mark.parametrize(
    ("deadline", "bits", "joules"),
    [(5.0, 0, 0), (9.0, 0, 0), (11.0, 200, 0.25), (16.0, 1000, 1.25), (17.0, 1000, 1.25)],
)
def test_what_is_cut_has_carried_what_the_link_carried(
    tmp_path: Path, deadline: float, bits: float, joules: float
) -> None:
    """Nothing for ten seconds, then 200 bits in each of five, then nothing, then everything."""
    task = small.task(devices=1)
    down = stepped(tmp_path, (0, 0, 200, 0, 1e9), 5.0)
    group = Group(
        link=Steady(bit_rate_up=1e9, bit_rate_down=down, receive_power=0.25), battery=10.0
    )
    method = replace(ALL, schedule=Deadline(deadline))
    runtime = Simulated(task, small.world(task, fleet(group)))
    (row,) = rows(next(run(method, task, runtime, 0)))
    assert row.failure == "too late"
    assert row.download_seconds == pytest.approx(deadline)
    assert row.bits_down == pytest.approx(bits)
    assert row.download_joules == pytest.approx(joules)
    assert runtime.conditions(np.array([0])).battery == pytest.approx([10 - joules])
    assert row.compute_seconds == row.bits_up == row.delivered_down == 0


def test_a_cut_upload_has_carried_what_the_link_carried(tmp_path: Path) -> None:
    """A second down, two seconds of work, then up: 300 bits, nothing, 50 of 100 bits."""
    task = small.task(devices=1)
    (sized,) = rows(small.steps(ALL, task, 1)[0])
    up = stepped(tmp_path, (9e9, 9e9, 9e9, 300, 0, 100), 1.0)
    link = Steady(bit_rate_up=up, bit_rate_down=sized.bits_down, send_power=0.5)
    group = Group(speed=sized.flops / 2, link=link)
    method = replace(ALL, schedule=Deadline(5.5))
    (row,) = rows(small.steps(method, task, 1, fleet=fleet(group))[0])
    assert row.bits_up == pytest.approx(350)
    assert row.upload_seconds == pytest.approx(2.5)
    assert row.upload_joules == pytest.approx(0.5 * 1.5)
    assert row.flops == sized.flops
    assert row.bits_down == sized.bits_down


def test_a_battery_waits_for_a_link_and_is_empty_when_it_is(tmp_path: Path) -> None:
    task = small.task(devices=1)
    down = stepped(tmp_path, (200, 0, 0, 0, 200, 200), 1.0)
    link = Steady(bit_rate_up=1e9, bit_rate_down=down, receive_power=0.25)
    group = Group(link=link, battery=0.375, reserve=0.0)
    first, second = small.steps(ALL, task, 2, fleet=fleet(group))
    (row,) = rows(first)
    assert row.failure == "battery empty"
    assert row.download_seconds == first.time == pytest.approx(4.5)
    assert row.bits_down == pytest.approx(300)
    assert row.download_joules == pytest.approx(0.375)
    assert not rows(second)


# --- computing while other things change ------------------------------------------------------


def changed(folder: Path, every: float | None = 1.0) -> tuple[Task, SimpleNamespace, Group]:
    """A second down, then work of two seconds on a free device, which is busy and free in turn."""
    task = small.task(devices=1)
    (sized,) = rows(small.steps(ALL, task, 1)[0])
    load = replace(stepped(folder, (3, 1, 4, 2, 1), 1.0), every=every)
    link = Steady(bit_rate_up=1e9, bit_rate_down=sized.bits_down)
    return task, sized, Group(speed=sized.flops / 2, load=load, link=link, energy=1e-26)


def test_work_goes_on_at_the_pace_in_force(tmp_path: Path) -> None:
    """Free from second 1 on: half; then an eighth, a quarter, and the last eighth in 1/4 s."""
    task, sized, group = changed(tmp_path)
    (row,) = rows(small.steps(ALL, task, 1, fleet=fleet(group))[0])
    assert row.compute_seconds == pytest.approx(3.25)
    # Other work slows a device down, but pays for its own cycles: 2 s at 1e9 Hz.
    assert row.compute_joules == pytest.approx(1e-26 * 1e18 * 2e9)
    assert row.flops == sized.flops


@pytest.mark.parametrize(
    ("deadline", "share"),
    [(0.5, 0), (1.5, 0.25), (2.0, 0.5), (2.8, 0.6), (3.5, 0.75), (4.125, 15 / 16)],
)
def test_cut_work_is_charged_as_far_as_it_was_done(
    tmp_path: Path, deadline: float, share: float
) -> None:
    task, sized, group = changed(tmp_path)
    method = replace(ALL, schedule=Deadline(deadline))
    (row,) = rows(small.steps(method, task, 1, fleet=fleet(group))[0])
    assert row.failure == "too late"
    assert row.compute_seconds == pytest.approx(max(0.0, deadline - 1))
    assert row.flops == pytest.approx(share * sized.flops)
    assert row.compute_joules == pytest.approx(share * 20)


def test_a_speed_that_changes_changes_seconds_and_joules(tmp_path: Path) -> None:
    """A device that becomes slower at the same frequency needs more cycles for the rest."""
    task, sized, group = changed(tmp_path)
    speed = replace(stepped(tmp_path, (1, 1, 0.25), 1.0), scale=sized.flops / 2)
    (row,) = rows(small.steps(ALL, task, 1, fleet=fleet(replace(group, speed=speed, load=1.0)))[0])
    # Half in the first second, an eighth in the next, and the rest in 3/4 s at full speed.
    assert row.compute_seconds == pytest.approx(2.75)
    assert row.compute_joules == pytest.approx(10 * row.compute_seconds)


def test_what_changes_with_steps_stays_as_it_was_when_the_order_began(tmp_path: Path) -> None:
    """Three times the work of a free device, and the same in a plan that was told."""
    task, sized, group = changed(tmp_path, every=None)
    runtime = Simulated(task, small.world(task, fleet(group)))
    told = runtime.conditions(np.array([0]))
    (row,) = rows(next(run(ALL, task, runtime, 0)))
    assert row.compute_seconds == pytest.approx(6.0)
    assert row.compute_seconds == pytest.approx(sized.flops / float(told.speed[0]))
    # Two steps are under way while it computes: both would change the load.
    late = Deadline(1.5, late="counted", staleness=9)
    steps = small.steps(replace(ALL, schedule=late), task, 6, fleet=fleet(group))
    (row,) = (row for step in steps for row in rows(step))
    assert row.compute_seconds == pytest.approx(6.0)
    assert row.round_index > row.issued_round + 2


@pytest.mark.parametrize("way", ["up", "down"])
def test_without_a_rate_there_is_no_link(tmp_path: Path, way: str) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("x\n0\n1e6\n")  # the second row is never reached: one row a step
    gap = Replayed(trace, "x", shift=False)
    link = (
        Steady(bit_rate_up=gap, bit_rate_down=1e6, send_power=0.0)
        if way == "up"
        else Steady(bit_rate_up=1e6, bit_rate_down=gap)
    )
    task = small.task(devices=2)
    first, second = small.steps(ALL, task, 2, fleet=fleet(Group(link=link, battery=1e9)))
    for row in rows(first):
        assert row.failure == "no link"
        assert row.bits_up == row.upload_seconds == row.upload_joules == row.delivered_up == 0
        spent = row.download_seconds + row.compute_seconds
        assert spent == 0 if way == "down" else spent > 0
        assert row.delivered_down == (way == "up")
        assert math.isfinite(row.compute_joules + row.download_joules)
    assert {row.failure for row in rows(second)} == {""}


def test_a_shared_band_is_divided_by_the_cohort_and_reported_so() -> None:
    task = small.task()
    group = replace(SLOW, link=Steady(bit_rate_up=8e5, bit_rate_down=4e5, shared=True))
    for count in (1, 4, 8):
        runtime = Simulated(task, small.world(task, fleet(group)))
        told = []

        @dataclass(frozen=True)
        class Listening(Plan):
            def __call__(self, plans: Plans, view: View, state: object, key: Tensor) -> Plans:
                told.append(view.conditions(plans.device))  # noqa: B023 - used in this turn only
                return plans

        method = replace(ALL, select=Uniform(count), plan=Listening())
        step = next(run(method, task, runtime, 0))
        (reported,) = told
        assert reported.bit_rate_up == pytest.approx(8e5 / count)
        for i, row in enumerate(rows(step)):
            assert row.download_seconds == pytest.approx(row.bits_down / reported.bit_rate_down[i])
            assert row.upload_seconds == pytest.approx(row.bits_up / reported.bit_rate_up[i])


def test_what_others_do_uses_the_air_too() -> None:
    """Devices that still work when a cohort starts share the band with it."""
    task = small.task()
    group = replace(SLOW, link=Steady(bit_rate_up=8e5, bit_rate_down=4e5, shared=True))
    late = Deadline(1e-3, late="counted", staleness=9)
    runtime = Simulated(task, small.world(task, fleet(group)))
    list(islice(run(replace(ALL, select=Uniform(3), schedule=late), task, runtime, 0), 1))
    assert runtime.conditions(np.array([0, 1])).bit_rate_up == pytest.approx([8e5 / 5] * 2)


# --- links that lose columns ------------------------------------------------------------------


@pytest.mark.parametrize("lacking", [{"send": "delta"}, {"cache": False}])
def test_links_that_lose_columns_need_a_method_that_pads(lacking: dict[str, Any]) -> None:
    method = replace(small.padded(ALL), **lacking)
    with pytest.raises(CompositionError, match='add send = "weights" and cache = true'):
        small.steps(
            method, small.task(), 1, fleet=fleet(replace(SLOW, column_loss=ColumnLoss(error=0.1)))
        )


def test_where_nothing_comes_through_work_is_charged_and_changes_nothing() -> None:
    task = small.task()
    method = small.padded(ALL)
    lossy = fleet(replace(SLOW, column_loss=ColumnLoss(error=1.0)))
    runtime = Simulated(task, small.world(task, lossy))
    steps = list(islice(run(method, task, runtime, 0), 2))
    for row in (row for step in steps for row in rows(step)):
        assert row.failure == "nothing came through"
        assert row.delivered_down == row.delivered_up == 0
        assert row.bits_down == row.bits_up == row.download_seconds == row.upload_seconds == 0
        assert row.compute_seconds > 0
        assert row.compute_joules > 0
        assert row.flops == cost(task.blueprint).flops * len(task.data(row.device))
    assert small.identical(steps[-1].params, task.params)
    # The devices have learned by themselves: what they sent was lost, not what they know.
    for device in range(task.devices):
        slots = runtime.state(device).tensors
        assert not small.identical({n: slots["own"][n] for n in task.params}, task.params)


def test_both_ways_fail_independently_and_as_often_as_told() -> None:
    task = small.task()
    lossy = fleet(replace(SLOW, column_loss=ColumnLoss(error=0.3)))
    method = small.padded(replace(ALL, norm=Tracked()))
    found = [row for step in small.steps(method, task, 8, fleet=lossy) for row in rows(step)]
    down = np.array([row.delivered_down for row in found])
    up = np.array([row.delivered_up for row in found])
    deviation = 0.3 / math.sqrt(len(found))  # of the mean of eight columns, at most
    assert abs(down.mean() - 0.274853) < 5 * deviation
    assert abs(up.mean() - 0.274853) < 5 * deviation
    assert abs(np.corrcoef(down, up)[0, 1]) < 5 / math.sqrt(len(found))
    assert {"", "nothing came through"} == {row.failure for row in found}
    assert all((row.failure == "") == (row.delivered_up > 0) for row in found)
    whole = 32 * task.blueprint.numel()
    assert all(row.bits_up < whole for row in found if row.delivered_up < 1)


def test_a_fleet_without_loss_is_what_it_was_before() -> None:
    """Bit for bit, whether links cannot fail or only do not."""
    task = small.task()
    lossless, lucky = fleet(SLOW), fleet(replace(SLOW, column_loss=ColumnLoss(error=1e-300)))
    for method in (small.padded(ALL), small.padded(replace(ALL, norm=Tracked()))):
        one, two = (small.steps(method, task, 2, fleet=f) for f in (lossless, lucky))
        assert small.identical(one[-1].params, two[-1].params)
        assert repr([rows(s) for s in one]) == repr([rows(s) for s in two])


# --- memory -----------------------------------------------------------------------------------


def test_nobody_is_asked_for_what_he_says_he_cannot_hold() -> None:
    task = small.task()
    step = small.steps(ALL, task, 1, fleet=fleet(replace(SLOW, memory=1e3)))[0]
    for row in rows(step):
        assert row.failure.startswith("out of memory: needs")
        assert row.download_seconds == row.compute_seconds == row.bits_down == 0
    assert step.time == Synchronous().patience


def test_nobody_is_even_asked_about_a_model_that_he_cannot_hold() -> None:
    task = small.task()
    bytes_ = cost(task.blueprint).nbytes
    groups = (replace(SLOW, memory=bytes_ - 1.0), replace(SLOW, memory=float(bytes_)))
    method = replace(ALL, schedule=Surveyed(Synchronous()))
    steps = small.steps(method, task, 2, fleet=fleet(*groups))
    asked = [row for step in steps for row in rows(step) if row.kind == "evaluate"]
    assert len(asked) == 2 * task.devices  # once in each step
    for row in asked:
        assert row.failure.startswith("out of memory") == (row.level == 0) == (row.bits_down == 0)


def test_who_has_less_than_he_said_loses_the_order_after_the_download() -> None:
    """A report that is a step old: room then, none now."""
    task = small.task()
    memory = Redrawn(Between(1e3, 2e5))
    world = fleet(replace(SLOW, memory=memory), reports=Reports(rounds=1))
    found = [
        r for s in small.steps(replace(ALL, cache=True), task, 6, fleet=world) for r in rows(s)
    ]
    reasons = {row.failure.partition(":")[0] for row in found}
    assert reasons == {"", "out of memory"}
    surprised = [row for row in found if row.failure and row.bits_down]
    declined = [row for row in found if row.failure and not row.bits_down]
    assert surprised
    assert declined
    for row in surprised:
        assert row.download_seconds == pytest.approx(row.bits_down / 1e5)
        assert (
            row.compute_seconds
            == row.upload_seconds
            == row.flops
            == row.bits_up
            == row.compute_joules
            == 0
        )
        assert row.delivered_down == 1
        needs, has = (float(part.split()[1]) for part in row.failure.split(":")[1].split(","))
        assert has < needs


def test_with_fresh_reports_nobody_is_surprised() -> None:
    task = small.task()
    memory = Redrawn(Between(1e3, 2e5), every=0.37)
    for step in small.steps(ALL, task, 5, fleet=fleet(replace(SLOW, memory=memory))):
        assert all(not row.failure or not row.bits_down for row in rows(step))


def test_menus_offer_only_what_fits() -> None:
    task = small.task()
    method = replace(ALL, plan=WidthMenu((1.0, 0.5, 0.25)), norm=Tracked())

    def need(share: float) -> float:
        slice_ = task.blueprint.prefix(share)
        found = training(method.train, task.blueprint, slice_, Amount(8), "flops")
        return float(found.memory[0])

    for room, share in (
        (need(1.0), 1.0),
        (need(1.0) - 1, 0.5),
        (need(0.5), 0.5),
        (need(0.25), 0.25),
    ):
        world = fleet(replace(SLOW, memory=room))
        found = rows(small.steps(method, task, 1, fleet=world)[0])
        assert {row.failure for row in found} == {""}
        assert {row.width for row in found} == {width(task.blueprint.prefix(share), task.blueprint)}


# --- batteries --------------------------------------------------------------------------------


def costs(task: Task, group: Group) -> SimpleNamespace:
    (row, *_) = rows(small.steps(ALL, task, 1, fleet=fleet(group))[0])
    return row


def test_batteries_run_down_by_what_the_ledger_says() -> None:
    task = small.task()
    group = replace(SLOW, battery=1e3, energy=1e-25)
    runtime = Simulated(task, small.world(task, fleet(group)))
    everybody, spent = np.arange(task.devices), np.zeros(task.devices)
    for step in islice(run(replace(ALL, select=Uniform(3)), task, runtime, 0), 4):
        for row in rows(step):
            spent[row.device] += row.download_joules + row.compute_joules + row.upload_joules
    assert (spent > 0).sum() > 3
    left = runtime.conditions(everybody).battery
    assert 1e3 - left == pytest.approx(spent)


@pytest.mark.parametrize("phase", ["download", "compute", "upload"])
def test_a_battery_is_empty_at_the_second_at_which_it_is(phase: str) -> None:
    """Half-way through each phase."""
    task = small.task(devices=2)
    group = replace(SLOW, energy=1e-25)
    cost_ = costs(task, group)
    phases = ("download", "compute", "upload")
    before = phases[: phases.index(phase)]
    whole = sum(getattr(cost_, f"{name}_joules") for name in before)
    battery = whole + getattr(cost_, f"{phase}_joules") / 2
    empty = fleet(replace(group, battery=battery, reserve=0.0))
    first, second = small.steps(ALL, task, 2, fleet=empty)
    for row in rows(first):
        assert row.failure == "battery empty"
        for name in phases:
            share = 1.0 if name in before else 0.5 if name == phase else 0.0
            seconds = f"{name}_seconds"
            assert getattr(row, seconds) == pytest.approx(share * getattr(cost_, seconds))
            joules = f"{name}_joules"
            assert getattr(row, joules) == pytest.approx(share * getattr(cost_, joules))
    assert first.time == pytest.approx(
        sum(getattr(rows(first)[0], f"{name}_seconds") for name in phases)
    )
    assert type(first.time) is float  # whoever ended the step, and with which numbers
    assert not rows(second)  # nobody is left


def test_a_device_below_its_reserve_drops_out_recharges_and_returns() -> None:
    task = small.task(devices=1)
    cost_ = costs(task, SLOW)
    joules = cost_.download_joules + cost_.compute_joules + cost_.upload_joules
    # After one order it is below its reserve, and needs 90 s to come back.
    group = replace(SLOW, battery=1.5 * joules, reserve=0.9, recharge=0.85 * joules / 90)
    steps = small.steps(
        replace(ALL, schedule=Synchronous(patience=20.0)), task, 8, fleet=fleet(group)
    )
    asked = [len(rows(step)) for step in steps]
    assert asked == [1, 0, 0, 0, 0, 0, 1, 0]
    assert [row.failure for step in steps for row in rows(step)] == ["", ""]


# --- coming and going -------------------------------------------------------------------------


def test_who_goes_offline_is_lost_at_that_moment_and_comes_back() -> None:
    task = small.task()
    group = replace(SLOW, availability=Intermittent(0.6, every=1.0))
    world = small.world(task, fleet(group))
    steps = list(islice(run(ALL, task, Simulated(task, world), 0), 12))
    found = [row for step in steps for row in rows(step)]
    lost = {row.device for row in found if row.failure}
    assert {row.failure for row in found} == {"", "went offline"}
    assert lost & {row.device for row in found if not row.failure}  # some came back
    for row in found:
        end = row.began + row.download_seconds + row.compute_seconds + row.upload_seconds
        seen = [
            world.online(np.array([row.device]), When(t, 0))[0]
            for t in np.arange(math.ceil(row.began), end - 1e-9)
        ]
        assert all(seen)  # there until its end
        if row.failure:
            assert end == pytest.approx(round(end))
            assert not world.online(np.array([row.device]), When(round(end), 0))[0]


def test_who_is_away_is_not_asked() -> None:
    task = small.task()
    group = replace(SLOW, availability=Intermittent(0.5))
    world = small.world(task, fleet(group))
    for step in islice(run(ALL, task, Simulated(task, world), 0), 8):
        there = np.flatnonzero(world.online(np.arange(8), When(0.0, step.index)))
        assert [row.device for row in rows(step)] == there.tolist()


def test_a_survey_that_kills_once_does_not_kill_for_ever() -> None:
    """Questions are no visits; each has a failure of its own."""
    task = small.task()
    method = replace(ALL, schedule=Surveyed(Synchronous(), Kind.REPORT), select=Uniform(1))
    deaths = np.zeros((task.devices, 10))
    for step in small.steps(method, task, 10, fleet=fleet(replace(SLOW, mortality=0.5))):
        for row in rows(step):
            if row.kind == "report":
                deaths[row.device, step.index] = row.failure == "died"
    assert (deaths.sum(axis=1) > 0).all()
    assert (deaths.sum(axis=1) < 10).all()


# --- charges ----------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0.25, 0.6, 0.95])
def test_cancelled_work_is_charged_up_to_the_cancel(at: float) -> None:
    task = small.task(devices=2)
    whole = costs(task, SLOW)
    total = whole.download_seconds + whole.compute_seconds + whole.upload_seconds
    method = replace(ALL, schedule=Deadline(at * total))
    (step,) = small.steps(method, task, 1, fleet=fleet())
    for row in rows(step):
        assert row.failure == "too late"
        assert row.download_seconds + row.compute_seconds + row.upload_seconds == pytest.approx(
            at * total
        )
        for name, bits in (("download", "bits_down"), ("upload", "bits_up"), ("compute", "flops")):
            share = getattr(row, f"{name}_seconds") / getattr(whole, f"{name}_seconds")
            assert getattr(row, bits) == pytest.approx(share * getattr(whole, bits))
            joules = f"{name}_joules"
            assert getattr(row, joules) == pytest.approx(share * getattr(whole, joules))
        assert row.delivered_down == (row.download_seconds == whole.download_seconds)
        assert row.delivered_up == 0
        assert row.wait_seconds == pytest.approx(0, abs=1e-12)


def test_late_in_a_run_an_order_costs_what_it_costs_at_the_start() -> None:
    """A clock of a year has few digits left for milliseconds: no bit may get lost in them."""
    task = small.task()
    runtime = Simulated(task, small.world(task))
    runtime.restore(replace(runtime.save(), clock=Clock(now=3e7)))
    late = next(run(ALL, task, runtime, 0))
    early = small.steps(ALL, task, 1)[0]
    for one, two in zip(rows(early), rows(late), strict=True):
        seconds = ("download_seconds", "compute_seconds", "upload_seconds")
        for name in ("bits_down", "bits_up", *seconds, "flops"):
            assert getattr(one, name) == getattr(two, name)
        assert (one.download_joules, one.upload_joules) == (two.download_joules, two.upload_joules)
        assert two.began == 3e7
    assert type(late.time) is float


def test_a_device_that_works_does_not_recharge() -> None:
    task = small.task()
    group = replace(SLOW, battery=1e3, charge=0.5, recharge=10.0)
    runtime = Simulated(task, small.world(task, fleet(group)))
    late = Deadline(1.0, late="counted", staleness=9)
    list(islice(run(replace(ALL, select=Uniform(3), schedule=late), task, runtime, 0), 1))
    busy = ~runtime.free(np.arange(8))
    assert busy.sum() == 3
    left = runtime.conditions(np.arange(8)).battery
    assert left == pytest.approx(np.where(busy, 500.0, 510.0))


def test_held_results_are_fetched_over_the_same_links() -> None:
    """Unequal slices, lossy both ways: a fetched answer has the slice that was trained."""
    task = small.task()
    base = heterofl(widths=(1.0, 0.5), lr=0.1, batch_size=8)
    method = small.padded(replace(base, select=Everyone(), schedule=HoldAndFetch()))
    world = fleet(*(replace(SLOW, column_loss=ColumnLoss(error=e)) for e in (0.0, 0.1)))
    found = [row for step in small.steps(method, task, 4, fleet=world) for row in rows(step)]
    held = {(r.device, r.issued_round): r for r in found if r.kind == "hold"}
    fetched = [r for r in found if r.kind == "fetch"]
    assert {r.width for r in fetched} == {1.0, 0.5}
    assert {r.delivered_up for r in fetched} > {1.0}
    for row in fetched:
        before = held[row.device, row.issued_round]
        assert row.width == before.width
        assert row.compute_seconds == row.compute_joules == row.flops == 0
        # The number of the order, and which slice is meant.
        slice_ = task.blueprint.prefix(row.width)
        assert row.bits_down == 64 + index_bits(slice_, task.blueprint)
        assert before.delivered_up == 1  # numbers only
        assert row.bits_up > before.bits_up or row.failure


@pytest.mark.parametrize("keep", [1, 3])
def test_the_first_replies_close_a_step_and_the_rest_is_charged_until_then(keep: int) -> None:
    task = small.task()
    groups = tuple(replace(SLOW, speed=1e7 / n) for n in (1, 2, 3, 4))
    method = replace(ALL, schedule=Overselected(keep))
    step = small.steps(method, task, 1, fleet=fleet(*groups))[0]
    kept = [row for row in rows(step) if not row.failure]
    assert len(kept) == keep
    for row in rows(step):
        end = row.began + row.download_seconds + row.compute_seconds + row.upload_seconds
        assert end + row.wait_seconds == pytest.approx(step.time)
        assert row.failure == "" or end == pytest.approx(step.time)


def test_a_fleet_looked_at_in_blocks_is_the_same_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    task = small.task()
    group = replace(SLOW, availability=Intermittent(0.6), battery=Between(1.0, 9.0), reserve=0.4)
    group = replace(group, charge=Between(0.0, 1.0))
    world = small.world(task, fleet(group, replace(group, availability=Intermittent(0.9))))
    everybody = np.arange(task.devices)
    one_by_one = [Simulated(task, world).free(everybody[[d]])[0] for d in everybody]
    assert 0 < sum(one_by_one) < task.devices
    for size in (1, 3, task.devices, 100):
        monkeypatch.setattr("anyfleet.runtime.simulated.simulator._BLOCK", size)
        assert Simulated(task, world).free(everybody).tolist() == one_by_one
    assert not len(Simulated(task, world).free(everybody[:0]))


# --- the seam ---------------------------------------------------------------------------------


def test_an_order_that_was_only_offered_costs_nothing_and_is_not_heard_of_again() -> None:
    """Choices come back alone, in the order in which menus were offered; no time passes."""
    task = small.task()
    runtime = Simulated(task, small.world(task, fleet()))
    method = replace(ALL, plan=WidthMenu((1.0, 0.5)), choose=LargestInTime(1e9))
    asked = orders(method, task, [0, 1, 2, 3])
    for rows in ([0, 1], [2, 3]):
        runtime.offer(asked.take(rows))
    saved = runtime.save()
    lost = runtime.cancel(asked.id[[3, 1]], "no longer")
    assert lost.order.tolist() == asked.id[[3, 1]].tolist()
    spent = lost.charges
    assert not (spent.flops + spent.bits_down + spent.download_seconds).any()
    events = runtime.wait(9.0, 1)
    assert events.choices is not None
    assert events.choices.order.tolist() == asked.id[[0, 2]].tolist()
    assert events.replies is None
    assert events.failures is None
    assert runtime.now() == 0.0
    assert not len(runtime.wait(9.0, 1))
    runtime.restore(saved)
    again = runtime.wait(9.0, 1).choices
    assert again is not None
    assert again.order.tolist() == asked.id.tolist()


def test_orders_are_cancelled_in_any_order_and_only_once() -> None:
    task = small.task()
    runtime = Simulated(task, small.world(task, fleet()))
    asked = orders(ALL, task, [0, 1, 2, 3])
    runtime.submit(asked.take([0, 1]))
    runtime.submit(asked.take([2, 3]))
    runtime.wait(0.1, 1)
    lost = runtime.cancel(asked.id[[3, 0]], "too late")
    assert lost.charges.order.tolist() == asked.id[[3, 0]].tolist()
    assert lost.charges.download_seconds == pytest.approx([0.1, 0.1])
    assert runtime.free(np.arange(4)).tolist() == [True, False, False, True]
    with pytest.raises(KeyError, match="not all of the orders"):
        runtime.cancel(asked.id[[0]], "again")
    assert len(runtime.wait(None, 9)) == 2


# --- what is computed once ---------------------------------------------------------------------


@dataclass(frozen=True)
class Own:
    """A link of a user's own, of which nothing is known: it does what another one does."""

    link: Steady
    shared: bool = False
    send_power: float = 0.5
    receive_power: float = 0.25

    def bit_rates(self, keys: Tensor, when: When, distance: Floats, active: int) -> BitRates:
        return self.link.bit_rates(keys, when, distance, active)

    def until(self, when: When) -> Seconds:
        return self.link.until(when)

    def outage(
        self, keys: Tensor, when: When, distance: Floats, minimum: float, *, active: int, way: Way
    ) -> Floats:
        raise NotImplementedError


@pytest.mark.parametrize(
    "schedule",
    [Buffered(concurrency=6, buffer_size=2), Deadline(1.2, late="counted", staleness=9)],
    ids=repr,
)
def test_uploads_are_the_same_computed_once_or_in_every_round(schedule: Schedule) -> None:
    """Links that only time changes are not asked again when a round begins."""
    link = Steady(Wandering(1e5, every=0.1), 1e5, send_power=0.5, receive_power=0.25)
    method = replace(ALL, schedule=schedule)
    found = [
        small.steps(method, small.task(), 8, fleet=fleet(replace(SLOW, link=each)))
        for each in (link, Own(link))
    ]
    told = [row for step in found[0] for row in rows(step)]
    assert any(row.issued_round < row.round_index for row in told)  # or it shows nothing
    assert repr([*map(rows, found[0])]) == repr([*map(rows, found[1])])
