"""Every schedule makes progress on every fleet, keeps the books, and does what its name says."""

import math
from collections import Counter
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anyfleet.arrays import Flags, Ints
from anyfleet.core.events import Events, Failures
from anyfleet.core.loop import Round, run
from anyfleet.core.messages import Kind
from anyfleet.core.method import Method
from anyfleet.core.orders import Cohort
from anyfleet.core.plans import Plans
from anyfleet.core.server import Server
from anyfleet.core.slots import Plan, Schedule
from anyfleet.core.view import Ids, OrderStatus, OrderStatuses, Request, View
from anyfleet.methods import fedavg
from anyfleet.parts.aggregate import Mean
from anyfleet.parts.plan import WholeModel
from anyfleet.parts.schedule import (
    Buffered,
    Deadline,
    HoldAndFetch,
    Overselected,
    Surveyed,
    Synchronous,
    Tiers,
)
from anyfleet.parts.select import Everyone, Largest, Uniform
from anyfleet.parts.train import Gradient
from anyfleet.runtime import Simulated
from anyfleet.tasks import Iid
from anyfleet.world import Fleet, Group
from anyfleet.world.availability import Always, Intermittent
from anyfleet.world.quantities import When
from tests.helpers import small

TASK = small.task(devices=6, partition=Iid(samples=6))
BASE = replace(fedavg(count=4, lr=0.05), train=Gradient(batch_size=32))
# Two levels of three devices each; a fast one finishes ten times while a slow one trains.
UNEQUAL = Fleet((Group(speed=2e9), Group(speed=2e6)))


@dataclass(frozen=True)
class Between:
    """Online in this span of the run, and never again."""

    start: float
    end: float

    def online(self, keys: Tensor, when: When) -> Flags:
        return np.full(len(keys), self.start <= when.now < self.end)

    def until(self, when: When) -> float:
        return min((t for t in (self.start, self.end) if t > when.now), default=math.inf)


NEVER = Between(0.0, 0.0)


@dataclass(frozen=True)
class Moody(Plan):
    """A planner that declines one device in `of`, another at every step; 1 for all of them."""

    of: int

    def __call__(self, plans: Plans, view: View, state: object, key: Tensor) -> Plans:
        unwilling = (plans.device + view.round_index) % self.of == 0
        return replace(plans, declined=tuple("mood" if no else "" for no in unwilling))


class Watched(Simulated):
    """A runtime that does not let a device have two orders, or one while it is away."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        super().__init__(TASK, small.world(TASK, fleet, seed))
        self.busy: dict[int, int] = {}

    def submit(self, orders: Cohort) -> None:
        devices = orders.device.tolist()
        assert len(set(devices)) == len(devices)
        assert not set(devices) & set(self.busy.values())
        assert self.free(orders.device).all()
        super().submit(orders)
        self.busy |= dict(zip(orders.id.tolist(), devices, strict=True))

    def wait(self, until: float | None, enough: int) -> Events:
        before = self.now()
        events = super().wait(until, enough)
        assert self.now() >= before
        replied = [] if events.replies is None else events.replies.order.tolist()
        failed = [] if events.failures is None else events.failures.order.tolist()
        for order in (*replied, *failed):
            del self.busy[order]
        return events

    def cancel(self, orders: Ints, reason: str) -> Failures:
        for order in orders.tolist():
            del self.busy[order]
        return super().cancel(orders, reason)


def play(method: Method, fleet: Fleet | None = None, count: int = 4, seed: int = 0) -> list[Round]:
    """The first steps, with the books checked."""
    runtime = Watched(fleet or Fleet(), seed)
    steps = list(islice(run(method, TASK, runtime, seed), count))
    assert [step.index for step in steps] == list(range(count))
    assert all(a <= b for a, b in pairwise([0.0, *(step.time for step in steps)]))
    closed = [order for step in steps for order in step.ledger.order.tolist()]
    last = steps[-1].snapshot
    under_way, waiting = last.under_way.order.tolist(), last.waiting.orders.order.tolist()
    assert sorted([*closed, *under_way, *waiting]) == list(range(last.issued))
    assert sorted(runtime.busy) == under_way
    for step in steps:
        age = step.index - step.ledger.issued_round
        assert (age >= 0).all()
        assert (age[step.ledger.counted] <= method.schedule.staleness).all()
        assert all(value.isfinite().all() for value in step.params.values())
    return steps


def counted(step: Round) -> set[int]:
    """The devices whose replies count."""
    return set(step.ledger.device[step.ledger.counted].tolist())


def lost(step: Round) -> Counter[str]:
    """How many were lost, by reason."""
    return Counter(reason for reason in step.ledger.failure if reason)


# -- all schedules


FEW, AGES = st.integers(1, 5), st.integers(0, 3)
PATIENCE = st.sampled_from((1e-3, 1.0, 60.0, 3600.0))
ASKS = st.sampled_from((Kind.EVALUATE, Kind.STATISTICS))
PLAIN: dict[str, st.SearchStrategy[Any]] = {
    "synchronous": st.builds(Synchronous, PATIENCE),
    "deadline": st.builds(Deadline, st.floats(1e-3, 1.0)),
    "late": st.builds(Deadline, st.floats(1e-3, 1.0), st.just("counted"), st.integers(1, 3)),
    "overselected": st.builds(Overselected, FEW, PATIENCE),
    "buffered": st.builds(Buffered, FEW, FEW, AGES, PATIENCE),
    "tiers": st.builds(Tiers, AGES, PATIENCE),
    "two phases": st.builds(HoldAndFetch, PATIENCE),
}
SURVEYED = st.builds(Surveyed, st.one_of(*PLAIN.values()), ASKS, st.integers(1, 2))


def fleets() -> st.SearchStrategy[Fleet]:
    groups = st.builds(
        Group,
        speed=st.sampled_from((2e9, 1e7, 1e6)),
        mortality=st.sampled_from((0.0, 0.0, 0.0, 0.4, 1.0)),
        memory=st.sampled_from((4e9, 4e9, 4e9, 4e9, 1.0)),
        battery=st.sampled_from((math.inf, math.inf, math.inf, 0.02)),
        availability=st.sampled_from(
            (
                Always(),
                Always(),
                Always(),
                Intermittent(0.4),
                Intermittent(0.4, every=0.05),
                Intermittent(0.4, every=100.0),
                Between(0.02, 500.0),
                NEVER,
            )
        ),
    )
    return st.lists(groups, min_size=1, max_size=3).map(lambda made: Fleet(tuple(made)))


def methods(schedule: st.SearchStrategy[Any]) -> st.SearchStrategy[Method]:
    selections = st.one_of(
        st.builds(Uniform, st.integers(1, 6)),
        st.builds(Uniform, st.none(), st.floats(0.1, 1.0)),
        st.just(Everyone()),
    )
    plans = st.sampled_from((WholeModel(), WholeModel(), WholeModel(), Moody(1), Moody(2)))
    return st.builds(
        lambda schedule, select, plan: replace(BASE, schedule=schedule, select=select, plan=plan),
        schedule,
        selections,
        plans,
    )


@pytest.mark.parametrize("schedule", [*PLAIN, "surveyed"])
@settings(max_examples=8)
@given(data=st.data(), fleet=fleets(), seed=st.integers(0, 3))
def test_any_schedule_on_any_fleet_makes_progress_and_keeps_the_books(
    schedule: str, data: st.DataObject, fleet: Fleet, seed: int
) -> None:
    method = data.draw(methods(PLAIN.get(schedule, SURVEYED)))
    play(method, fleet, seed=seed)


EACH: list[Schedule] = [
    Synchronous(),
    Deadline(5.0),
    Deadline(5.0, late="counted", staleness=2),
    Overselected(keep=2, patience=90.0),
    Buffered(concurrency=3, buffer_size=2, patience=90.0),
    Buffered(concurrency=3, buffer_size=2, patience=90.0, refill=2),
    Tiers(patience=90.0),
    HoldAndFetch(),
    Surveyed(Synchronous()),
    Surveyed(Tiers(patience=90.0)),
]


@pytest.mark.parametrize("schedule", EACH, ids=str)
@pytest.mark.parametrize("fleet", [Fleet((Group(availability=NEVER),)), Fleet()], ids=["gone", ""])
def test_steps_without_anybody_end_empty_after_the_patience(
    schedule: Schedule, fleet: Fleet
) -> None:
    declined = replace(BASE, schedule=schedule, plan=Moody(1))
    steps = play(declined, fleet)
    inner = schedule.inner if isinstance(schedule, Surveyed) else schedule
    patience = inner.seconds if isinstance(inner, Deadline) else vars(inner)["patience"]
    for before, step in pairwise(steps):
        waited = step.time - before.time
        assert waited >= patience * (1 - 1e-9)
        assert waited == pytest.approx(patience) or step.replies
        assert small.identical(step.params, TASK.params)


@pytest.mark.parametrize("schedule", EACH, ids=str)
def test_devices_that_come_back_are_asked(schedule: Schedule) -> None:
    fleet = Fleet((Group(availability=Between(100.0, math.inf)),))
    steps = run(replace(BASE, schedule=schedule), TASK, Watched(fleet, 0), 0)
    trained = (s for s in islice(steps, 40) if not small.identical(s.params, TASK.params))
    assert 100 < next(trained).time < 200


@pytest.mark.parametrize("refill", [1, 2, 4])
def test_a_buffer_asks_as_many_devices_together_as_it_refills(refill: int) -> None:
    schedule = Buffered(concurrency=4, buffer_size=4, refill=refill)
    fleet = Fleet(tuple(Group(speed=speed) for speed in (1e8, 2e8, 3e8, 5e8, 7e8, 9e8)))
    ledgers = [step.ledger for step in play(replace(BASE, schedule=schedule), fleet)]
    began = [moment for ledger in ledgers for moment in ledger.began.tolist()]
    together = Counter(moment for moment in began if moment > 0)
    assert max(together.values()) == refill


def test_unwilling_devices_are_not_asked_all_the_time() -> None:
    schedule = Buffered(concurrency=3, buffer_size=2)
    for step in play(replace(BASE, schedule=schedule, plan=Moody(1))):
        assert lost(step) == {"mood": 3}


# -- rounds


def test_a_synchronous_round_without_anybody_lasts_the_patience() -> None:
    fleet = Fleet((Group(availability=NEVER),))
    steps = play(replace(BASE, schedule=Synchronous(patience=7.0)), fleet)
    assert [step.time for step in steps] == [7.0, 14.0, 21.0, 28.0]


# -- over-selection


def test_the_first_replies_count_and_the_rest_is_cancelled_and_charged() -> None:
    everybody = replace(BASE, select=Everyone())
    fleet = Fleet(tuple(Group(speed=2e9 / 3**i) for i in range(6)))
    whole = play(everybody, fleet, 1)[0].ledger
    finished = np.sort(whole.seconds)
    (step,) = play(replace(everybody, schedule=Overselected(keep=4)), fleet, 1)
    assert step.time == pytest.approx(finished[3])
    assert counted(step) == set(whole.device[np.argsort(whole.seconds)[:4]].tolist())
    assert sum(lost(step).values()) == 2
    late = ~step.ledger.counted
    assert step.ledger.seconds[late] == pytest.approx(step.time)
    assert (step.ledger.flops[late] < whole.flops[late]).all()


def test_without_anybody_over_it_is_synchronous() -> None:
    fleet = Fleet((Group(speed=1e9, mortality=0.3),))
    plain, over = (
        play(replace(BASE, schedule=schedule), fleet, 5)
        for schedule in (Synchronous(), Overselected(keep=4))
    )
    assert [step.time for step in over] == [step.time for step in plain]
    assert small.identical(over[-1].params, plain[-1].params)


def test_patience_closes_with_what_there_is() -> None:
    fleet = Fleet((Group(speed=2e9), Group(speed=1e3)))
    steps = play(replace(BASE, select=Everyone(), schedule=Overselected(5, patience=9.0)), fleet)
    assert [step.time for step in steps] == [9.0, 18.0, 27.0, 36.0]
    assert all(len(counted(step)) == 3 == sum(lost(step).values()) for step in steps)


# -- tiers


def cohorts(steps: list[Round]) -> dict[int, dict[int, list[int]]]:
    """By level and by the step that issued them: the steps that closed the orders."""
    made: dict[int, dict[int, list[int]]] = {}
    for step in steps:
        for level, issued in zip(step.ledger.level, step.ledger.issued_round, strict=True):
            made.setdefault(int(level), {}).setdefault(int(issued), []).append(step.index)
    return made


def test_tiers_are_synchronous_within_and_do_not_wait_for_each_other() -> None:
    method = replace(BASE, select=Uniform(2), schedule=Tiers(), aggregate=Mean(discount=0.5))
    steps = play(method, UNEQUAL, 60)
    made = cohorts(steps)
    assert len(made[0]) > 5 * len(made[1]) > 5
    for level in (0, 1):
        whole = [(issued, closed) for issued, closed in made[level].items() if len(closed) == 2]
        assert len(whole) >= len(made[level]) - 1
        # Asked again in the very step after the last of them has landed.
        assert all(then == max(closed) + 1 for (_, closed), (then, _) in pairwise(whole))
    ends = {max(closed) for tier in made.values() for closed in tier.values()}
    assert ends == set(range(60))
    stale = [step.index - step.ledger.issued_round[step.ledger.level == 1] for step in steps]
    assert max(np.concatenate(stale)) > 5


def test_a_tier_that_is_too_slow_is_lost() -> None:
    steps = play(replace(BASE, schedule=Tiers(staleness=1)), UNEQUAL, 30)
    slow = [
        reason
        for step in steps
        for level, reason in zip(step.ledger.level, step.ledger.failure, strict=True)
        if level == 1
    ]
    assert set(slow) == {"stale"}
    assert not any(lost(step) - Counter(stale=9) for step in steps)


def test_one_tier_is_synchronous() -> None:
    fleet = Fleet((Group(speed=1e9, mortality=0.3),))
    plain, tiers = (
        play(replace(BASE, schedule=schedule), fleet, 5) for schedule in (Synchronous(), Tiers())
    )
    assert [step.time for step in tiers] == [step.time for step in plain]
    assert small.identical(tiers[-1].params, plain[-1].params)


@pytest.mark.parametrize(
    "other",
    [Group(availability=NEVER), Group(mortality=1.0), Group(level=7, availability=NEVER)],
    ids=["away", "dying", "far"],
)
def test_a_tier_without_replies_does_not_block_the_others(other: Group) -> None:
    steps = play(replace(BASE, schedule=Tiers()), Fleet((Group(speed=2e9), other)), 8)
    assert sum(len(counted(step)) for step in steps) >= 3 * 4
    assert steps[-1].time < 60


# -- one's own


@dataclass(frozen=True)
class Half(Schedule):
    """Ends a round when half of the cohort has replied; the others are lost."""

    def start(self, view: View) -> tuple[Request, ...]:
        return () if view.issued else (Request(),)

    def ready(self, view: View) -> bool:
        most = 2 * len(view.replied) >= len(view.issued) > 0
        return most or bool(view.failed and not view.under_way)

    def drop(self, view: View) -> Ids:
        return view.under_way.order


def test_a_schedule_of_one_s_own_needs_no_more_than_start_and_ready() -> None:
    fleet = Fleet(tuple(Group(speed=2e9 / 3**i) for i in range(6)))
    steps = play(replace(BASE, select=Everyone(), schedule=Half()), fleet)
    assert all(len(counted(step)) == 3 == lost(step)["too late"] for step in steps)
    absent = Fleet((Group(availability=Between(100.0, math.inf)),))
    (step,) = play(replace(BASE, schedule=Half()), absent, 1)
    assert 100 < step.time < 200  # looked for again every minute


# -- two phases, and surveys


def seen(method: Method, **changes: Any) -> View:
    """What policies see before the first step, with changes."""
    server = Server(method, TASK, Simulated(TASK, small.world(TASK)), 0)
    return replace(server.view(), **changes)


def held(device: int, norm: float) -> OrderStatus:
    return OrderStatus(10 + device, device, 0, Kind.HOLD, report={"norm": norm})


def test_what_is_held_is_fetched_however_long_the_training_took() -> None:
    method = replace(BASE, select=Largest(4, 2), schedule=HoldAndFetch(patience=1e-6))
    (step,) = play(method, count=1)
    assert [kind for kind in step.ledger.kind if kind == "fetch"] == ["fetch"] * 2
    assert not small.identical(step.params, TASK.params)


def test_a_device_that_went_away_is_passed_over_when_results_are_fetched() -> None:
    schedule = HoldAndFetch()
    replied = OrderStatuses.of([held(0, 1.0), held(1, 3.0), held(2, 2.0)])
    view = seen(BASE, replied=replied, now=50.0)
    there = replace(view, free=lambda devices: devices != 1)
    (request,) = schedule.start(there)
    assert (request.kind, list(request.held_orders)) == (Kind.FETCH, [10, 12])
    assert not schedule.ready(there)
    nobody = replace(view, free=lambda devices: devices < 0)
    assert schedule.start(nobody) == ()
    assert not schedule.ready(nobody)
    assert schedule.ready(replace(nobody, now=60.0))


def test_a_survey_under_way_starts_no_training() -> None:
    schedule = Surveyed(Synchronous(patience=5.0))
    asked = OrderStatuses.of([OrderStatus(0, 3, 0, Kind.EVALUATE)])
    (training,) = schedule.start(seen(BASE))
    assert (training.kind, training.devices, training.count) == (Kind.TRAIN, None, None)
    (survey,) = schedule.start(seen(BASE, now=6.0))
    assert survey.kind == Kind.EVALUATE
    assert np.asarray(survey.devices).tolist() == list(range(TASK.devices))
    assert schedule.start(seen(BASE, now=6.0, under_way=asked)) == ()
    assert not schedule.ready(seen(BASE, now=6.0, under_way=asked))
    assert schedule.ready(seen(BASE, now=6.0, replied=asked))


@pytest.mark.parametrize("every", [1, 3])
def test_surveys_come_every_so_many_steps(every: int) -> None:
    steps = play(replace(BASE, schedule=Surveyed(Tiers(), every=every)), UNEQUAL, 6)
    assert [bool(step.replies) for step in steps] == [i % every == 0 for i in range(6)]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Overselected(keep=0), "Overselected.keep"),
        (lambda: Overselected(keep=1, patience=0), "Overselected.patience"),
        (lambda: Tiers(staleness=-1), "Tiers.staleness"),
        (lambda: Tiers(patience=math.nan), "Tiers.patience"),
        (lambda: HoldAndFetch(patience=0), "HoldAndFetch.patience"),
    ],
)
def test_impossible_schedules_are_refused(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_a_tiers_replies_count_together() -> None:
    """The quick ones of a slow tier wait, also over steps of other tiers, for its slowest."""
    slow = (Group(level=1, speed=2e7), Group(level=1, speed=2e6))
    fleet = Fleet((Group(level=0, speed=2e9), *slow))
    method = replace(BASE, select=Everyone(), schedule=Tiers(staleness=100))
    steps = play(method, fleet, 40)
    rows = [row for step in steps for row in small.rows(step)]
    assert not any(row.failure for row in rows)
    cohorts: dict[tuple[int, int], list[Any]] = {}
    for row in rows:
        cohorts.setdefault((row.level, row.issued_round), []).append(row)
    assert all(len({row.round_index for row in cohort}) == 1 for cohort in cohorts.values())
    waited = [row for (level, _), cohort in cohorts.items() if level == 1 for row in cohort]
    assert max(row.wait_seconds for row in waited) > 5 * max(
        row.wait_seconds for row in rows if row.level == 0
    )
    assert any(row.round_index > row.issued_round + 2 for row in waited)  # others stepped meanwhile
