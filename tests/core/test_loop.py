"""One loop for all schedules: it always makes progress, and its results do not depend on luck."""

from dataclasses import dataclass, replace
from itertools import islice, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anyfleet.core.loop import Round, run
from anyfleet.core.method import Method
from anyfleet.core.planning import PlanningState, plan_cohort
from anyfleet.core.plans import Plans
from anyfleet.core.server import Server
from anyfleet.core.slots import Plan, Schedule
from anyfleet.core.view import Request, View
from anyfleet.methods import fedavg, heterofl
from anyfleet.parts.aggregate import Mean
from anyfleet.parts.choose import LargestInTime
from anyfleet.parts.plan import WidthByLevel, WidthMenu
from anyfleet.parts.schedule import Buffered, Deadline, HoldAndFetch, Surveyed, Synchronous
from anyfleet.parts.select import Everyone, Uniform
from anyfleet.parts.train import Gradient
from anyfleet.runtime import Sequential, Simulated, Stacked
from anyfleet.runtime.simulated.engines import Engine
from anyfleet.tasks import Iid
from anyfleet.world import Fleet, When, levels
from tests.helpers import small

FAST = fedavg(count=4, lr=0.1)
SCHEDULES: list[Schedule] = [
    Synchronous(),
    Deadline(0.03),
    Deadline(1e-6),
    Deadline(0.02, late="counted", staleness=2),
    Buffered(concurrency=4, buffer_size=2),
    HoldAndFetch(),
    Surveyed(Synchronous()),
    Surveyed(Buffered(concurrency=3, buffer_size=2)),
]


@dataclass(frozen=True)
class Nobody(Plan):
    """A planner that declines everybody."""

    def __call__(self, plans: Plans, view: View, state: object, key: Tensor) -> Plans:
        return replace(plans, declined=("no battery",) * len(plans))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("mortality", [0.0, 0.4, 1.0])
def test_every_schedule_makes_progress(schedule: Schedule, mortality: float) -> None:
    steps = small.steps(
        replace(FAST, schedule=schedule), small.task(), 5, fleet=levels(mortality=mortality)
    )
    times = [step.time for step in steps]
    assert [step.index for step in steps] == list(range(5))
    assert times[0] > 0
    # Equal devices reply at one moment, and an asynchronous round may follow at once.
    assert all(a <= b for a, b in pairwise(times))
    assert times[-1] > times[0]
    for step in steps:
        assert all(torch.isfinite(value).all() for value in step.params.values())


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_a_fleet_that_declines_everything_still_moves_time(schedule: Schedule) -> None:
    method = replace(FAST, schedule=schedule, plan=Nobody())
    steps = small.steps(method, small.task(), 3)
    assert steps[2].time > steps[0].time
    assert small.identical(steps[2].params, small.task().params)
    reasons = {row.failure for row in small.rows(steps[0]) if row.kind != "evaluate"}
    assert reasons <= {"no battery"}


def test_0_3_empty_rounds_keep_the_model_count_and_last_as_long_as_the_attempt() -> None:
    task = small.task()
    everybody_dies = small.steps(FAST, task, 2, fleet=levels(mortality=1.0))
    assert all(small.identical(step.params, task.params) for step in everybody_dies)
    assert [row.failure for row in small.rows(everybody_dies[0])] == ["died"] * 4
    slowest = max(
        row.download_seconds + row.compute_seconds for row in small.rows(everybody_dies[0])
    )
    assert everybody_dies[0].time == pytest.approx(slowest)
    late = small.steps(replace(FAST, schedule=Deadline(1e-4)), task, 2)
    assert [step.time for step in late] == pytest.approx([1e-4, 2e-4])
    assert {row.failure for row in small.rows(late[0])} == {"too late"}


def test_a_5_a_missing_device_costs_the_whole_deadline_and_nobody_missing_the_slowest() -> None:
    task = small.task()
    free = small.steps(FAST, task, 1)[0]
    generous = replace(FAST, schedule=Deadline(free.time * 10))
    assert small.steps(generous, task, 1)[0].time == pytest.approx(free.time)
    tight = replace(FAST, schedule=Deadline(free.time * 0.6))
    step = small.steps(tight, task, 1)[0]
    assert step.time == pytest.approx(free.time * 0.6)
    assert any(row.failure == "too late" for row in small.rows(step))


def test_a_5_a_death_costs_the_whole_deadline_too() -> None:
    method = replace(FAST, schedule=Deadline(5.0))
    before, seen = 0.0, set()
    for step in small.steps(method, small.task(), 6, fleet=levels(mortality=0.3)):
        died = any(row.failure == "died" for row in small.rows(step))
        arrived = any(not row.failure for row in small.rows(step))
        assert (step.time - before == pytest.approx(5.0)) == died
        seen.add((died, arrived))
        before = step.time
    assert {(True, True), (False, True)} <= seen


def test_what_was_cancelled_leaves_no_trace_in_memory() -> None:
    task = small.task()
    fleet = levels(speeds=(2e9, 1e9, 5e8, 2.5e8, 1.25e8))
    free = small.steps(FAST, task, 1, fleet=fleet)[0]
    method = replace(FAST, schedule=Deadline(free.time * 0.6), cache=True)
    runtime = Simulated(task, small.world(task, fleet))
    step = next(run(method, task, runtime, 0))
    kept = {row.device: bool(runtime.state(row.device).tensors) for row in small.rows(step)}
    finished = {row.device: not row.failure for row in small.rows(step)}
    assert kept == finished
    assert set(kept.values()) == {True, False}


@dataclass(frozen=True)
class Stuck(Synchronous):
    """A schedule that neither asks nor steps."""

    def start(self, view: View) -> tuple[Request, ...]:
        return ()

    def ready(self, view: View) -> bool:
        return False

    def alarm(self, view: View) -> float:
        return view.now


def test_a_schedule_that_stands_still_is_named() -> None:
    with pytest.raises(RuntimeError, match="stands still"):
        small.steps(replace(FAST, schedule=Stuck()), small.task(), 1)


def test_cancelled_work_is_charged_up_to_the_cancel() -> None:
    task = small.task()
    whole = {row.device: row for row in small.rows(small.steps(FAST, task, 1)[0])}
    limit = 0.5 * max(row.download_seconds + row.compute_seconds for row in whole.values())
    step = small.steps(replace(FAST, schedule=Deadline(limit)), task, 1)[0]
    late = [row for row in small.rows(step) if row.failure]
    assert late
    for row in late:
        spent = row.download_seconds + row.compute_seconds + row.upload_seconds
        assert spent == pytest.approx(limit)
        share = row.compute_seconds / whole[row.device].compute_seconds
        assert row.flops == pytest.approx(share * whole[row.device].flops)


def test_late_answers_count_within_the_staleness_and_are_lost_beyond() -> None:
    task = small.task()
    slow = levels(speeds=(2e9, 2e7))
    for bound, counted in ((8, True), (1, False)):
        schedule = Deadline(0.02, late="counted", staleness=bound)
        rows = [
            row
            for step in small.steps(replace(FAST, schedule=schedule), task, 12, fleet=slow)
            for row in small.rows(step)
            if row.round_index > row.issued_round
        ]
        reasons = {row.failure for row in rows if row.round_index - row.issued_round > 1}
        assert ("" in reasons) == counted
        assert ("stale" in reasons) == (not counted)


def test_asynchronous_steps_come_every_few_answers() -> None:
    method = replace(
        FAST, schedule=Buffered(concurrency=5, buffer_size=2), aggregate=Mean(discount=0.5)
    )
    steps = small.steps(method, small.task(), 8)
    assert all(sum(not row.failure for row in small.rows(step)) == 2 for step in steps)
    assert any(row.issued_round < row.round_index for step in steps for row in small.rows(step))


def test_asynchronous_selection_is_fair() -> None:
    task = small.task(devices=12, partition=Iid(samples=10))
    method = replace(
        fedavg(count=12, lr=0.01),
        schedule=Buffered(concurrency=3, buffer_size=1),
        train=Gradient(batch_size=32),
    )
    steps = small.steps(method, task, 120, fleet=levels(speeds=(1e9,)))
    asked = np.bincount([row.device for step in steps for row in small.rows(step)], minlength=12)
    assert asked.min() >= 4, asked
    assert asked[:6].sum() < 1.4 * asked[6:].sum(), asked


def test_a_device_draws_anew_at_every_visit() -> None:
    task = small.task()
    rounds = small.steps(replace(FAST, select=Everyone()), task, 3)
    runtime = Simulated(task, small.world(task))
    server = Server(FAST, task, runtime, 0)
    keys = []
    for _ in range(3):
        state = PlanningState(0, server.issued, server.visits, server.acknowledged, server.states)
        asked = plan_cohort(Request(), np.array([2]), method=FAST, view=server.view(), state=state)
        keys.append(int(asked.orders.key[0]))
        server.visits[2] += 1
    assert len(set(keys)) == 3
    state = PlanningState(0, 0, server.visits * 0, server.acknowledged, server.states)
    everybody = np.arange(task.devices)
    asked = plan_cohort(Request(), everybody, method=FAST, view=server.view(), state=state)
    assert len(set(asked.orders.key.tolist())) == task.devices
    assert rounds[-1].snapshot.visits.tolist() == [3] * task.devices


def test_choosing_on_the_device_uses_its_own_conditions() -> None:
    task = small.task()
    fleet = levels(speeds=(2e9, 8e8, 5e7), bit_rate_up=1e9, bit_rate_down=1e9)
    whole = small.steps(fedavg(count=8, lr=0.1), task, 1, fleet=fleet)[0]
    limit = 1.2 * min(
        row.download_seconds + row.compute_seconds + row.upload_seconds for row in small.rows(whole)
    )
    plan = WidthMenu((1.0, 0.5, 0.25))
    method = replace(fedavg(count=8, lr=0.1), plan=plan, choose=LargestInTime(limit))
    (step,) = small.steps(method, task, 1, fleet=fleet)
    level = small.world(task, fleet).declared.level
    assert all(row.choice == level[row.device] for row in small.rows(step))
    for row in small.rows(step):
        in_time = row.download_seconds + row.compute_seconds + row.upload_seconds <= limit * 1.01
        assert in_time or row.choice == 2
    assert len({row.parameters for row in small.rows(step)}) == 3


def test_the_first_cohorts_are_the_same_whatever_the_method() -> None:
    task = small.task()
    cohorts = [
        [{row.device for row in small.rows(step)} for step in small.steps(method, task, 3)]
        for method in (FAST, heterofl(count=4, lr=0.1), replace(FAST, plan=WidthByLevel((0.5,))))
    ]
    assert cohorts[0] == cohorts[1] == cohorts[2]
    assert len({frozenset(cohort) for cohort in cohorts[0]}) > 1


def test_arrivals_are_summed_in_canonical_order_whoever_is_fast() -> None:
    task = small.task()
    fleets = (Fleet(), levels(speeds=(1e8, 3e9, 2e7)), levels(bit_rate_up=1e5))
    ends = [small.steps(FAST, task, 3, fleet=fleet)[-1].params for fleet in fleets]
    assert all(small.identical(ends[0], end) for end in ends[1:])


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others() -> None:
    task = small.task()
    one, two = (small.steps(FAST, task, 3, seed=4)[-1] for _ in range(2))
    assert small.identical(one.params, two.params)
    assert one.time == two.time
    assert repr(small.rows(one)) == repr(small.rows(two))
    assert not small.identical(one.params, small.steps(FAST, task, 3, seed=5)[-1].params)


@pytest.mark.parametrize("engine", [Sequential(), Stacked()], ids=str)
@pytest.mark.parametrize(
    "schedule",
    [
        Synchronous(),
        Deadline(0.02, late="counted", staleness=3),
        Buffered(concurrency=4, buffer_size=2),
    ],
    ids=str,
)
def test_a_resumed_run_equals_the_uninterrupted_one(schedule: Schedule, engine: Engine) -> None:
    task = small.task()
    method = replace(FAST, schedule=schedule, cache=True)
    whole = small.steps(method, task, 6, engine=engine)
    runtime = Simulated(task, small.world(task), engine=engine)
    for step in run(method, task, runtime, 0):
        if step.index == 2:
            break
    saved = runtime.save()
    fresh = Simulated(task, small.world(task), engine=engine)
    fresh.restore(saved)
    rest = list(islice(run(method, task, fresh, 0, resume=step.snapshot), 3))
    assert [s.time for s in rest] == [s.time for s in whole[3:]]
    assert repr([small.rows(s) for s in rest]) == repr([small.rows(s) for s in whole[3:]])
    assert small.identical(rest[-1].params, whole[-1].params)


@st.composite
def methods(draw: st.DrawFn) -> Method:
    schedule = draw(
        st.one_of(
            st.builds(Synchronous),
            st.builds(Deadline, st.floats(1e-4, 0.2)),
            st.builds(Buffered, st.integers(1, 8), st.integers(1, 4), st.integers(0, 3)),
        )
    )
    select = draw(
        st.one_of(
            st.builds(Uniform, st.integers(1, 8)),
            st.builds(Uniform, st.none(), st.floats(0.1, 1.0)),
        )
    )
    drawn = draw(st.lists(st.sampled_from((1.0, 0.5, 0.25)), min_size=1, max_size=3))
    shares = tuple(sorted(drawn, reverse=True))
    return replace(heterofl(widths=shares, lr=0.05), schedule=schedule, select=select)


@settings(max_examples=15)
@given(methods(), st.floats(0.0, 1.0), st.integers(0, 3))
def test_any_method_on_any_fleet_keeps_the_books(
    method: Method, mortality: float, seed: int
) -> None:
    fleet = levels(speeds=(2e9, 1e8), bit_rate_up=(1e6, 1e5), mortality=mortality)
    task = small.task()
    steps = small.steps(method, task, 3, fleet=fleet, seed=seed)
    check_books(steps, task.devices)


def check_books(steps: list[Round], devices: int) -> None:
    seen: set[int] = set()
    before = 0.0
    for step in steps:
        # Equal devices reply at one moment: an asynchronous round may follow at once.
        assert step.time >= before
        assert step.time > 0
        before = step.time
        orders = [row.order for row in small.rows(step)]
        assert orders == sorted(orders)
        assert not seen & set(orders)
        seen |= set(orders)
        for row in small.rows(step):
            assert 0 <= row.device < devices
            spent = row.download_seconds + row.compute_seconds + row.upload_seconds
            assert 0 <= spent <= step.time + 1e-12
            assert row.bits_up == 0 if row.failure == "died" else row.bits_up >= 0
            assert row.failure or row.bits_up > 0


def test_time_is_download_plus_compute_plus_upload() -> None:
    task = small.task()
    world = small.world(task)
    step = small.steps(fedavg(count=1, lr=0.1), task, 1)[0]
    (row,) = small.rows(step)
    own = world.conditions(np.array([row.device]), When(0.0, 0), active=1)
    assert row.download_seconds == pytest.approx(row.bits_down / own.bit_rate_down[0])
    assert row.compute_seconds == pytest.approx(row.flops / own.speed[0])
    assert row.upload_seconds == pytest.approx(row.bits_up / own.bit_rate_up[0])
    assert step.time == pytest.approx(
        row.download_seconds + row.compute_seconds + row.upload_seconds
    )
    whole = sum(value.numel() for value in task.params.values())
    assert row.bits_up == 32 * whole
    assert row.bits_down == 32 * whole  # the whole model needs no index set
    assert np.isfinite(row.loss)
