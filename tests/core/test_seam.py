"""What the loop does not rely on: here runtimes are as slow, forgetful and fickle as real ones."""

import math
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import pytest

from anyfleet import Experiment, play
from anyfleet.analysis.summaries import by, summarise, to_target
from anyfleet.arrays import Flags, Ints, join
from anyfleet.cli.tables import table
from anyfleet.core.events import Events, Failures
from anyfleet.core.ledger import Ledger
from anyfleet.core.loop import Round, run
from anyfleet.core.messages import Charges, Conditions, Devices, no_charges
from anyfleet.core.method import Method
from anyfleet.core.orders import Cohort
from anyfleet.core.slots import Schedule
from anyfleet.core.view import Request, View
from anyfleet.methods import anycost, fedavg
from anyfleet.parts.choose import LargestInTime, MostGain
from anyfleet.parts.codec import Fgc, Hq
from anyfleet.parts.plan import (
    Assigned,
    JustInTime,
    LocalStepsWithin,
    SentFractionByLink,
    TargetSeconds,
    WholeModel,
    WidthMenu,
)
from anyfleet.parts.schedule import Buffered, Deadline, Synchronous
from anyfleet.parts.select import Everyone
from anyfleet.runtime import Sequential, Simulated
from anyfleet.tasks import Embedded, Iid
from anyfleet.world import Fleet, levels
from tests.helpers import small

TASK = small.task()
FAST = fedavg(count=4, lr=0.1)
MENUS = replace(FAST, plan=WidthMenu((1.0, 0.5)), choose=LargestInTime(0.02))
UNEQUAL = levels(speeds=(2e9, 2e7))


def rounds(runtime: Simulated, method: Method, count: int = 3) -> list[Round]:
    return list(islice(run(method, TASK, runtime, 0), count))


def told(found: list[Round]) -> str:
    return repr([small.rows(each) for each in found])


class Slow(Simulated):
    """A runtime whose devices choose one after the other, and not at once."""

    coming: tuple[Events, ...] = ()
    turn = 1  # of the order in which they do: -1 from the last to the first

    def offer(self, orders: Cohort) -> None:
        super().offer(orders)
        choices = super().wait(None, 1).choices
        assert choices is not None
        single = choices.rows()[:: self.turn]
        self.coming = (*self.coming, Events(), *(Events(choices=each) for each in single))

    def wait(self, until: float | None, enough: int) -> Events:
        if not self.coming:
            return super().wait(until, enough)
        event, *rest = self.coming
        self.coming = tuple(rest)
        return event


class Backwards(Slow):
    """A runtime whose last device chooses first."""

    turn = -1


@pytest.mark.parametrize(
    ("schedule", "runtime"),
    [(FAST.schedule, Slow), (FAST.schedule, Backwards), (Buffered(4, 2), Slow)],
    ids=str,
)
def test_choices_may_come_late_and_one_by_one(schedule: Schedule, runtime: type[Slow]) -> None:
    method = replace(MENUS, schedule=schedule)
    expected = rounds(Simulated(TASK, small.world(TASK, UNEQUAL)), method, 5)
    found = rounds(runtime(TASK, small.world(TASK, UNEQUAL)), method, 5)
    chosen = {row.choice for each in expected for row in small.rows(each)}
    assert chosen == {0, 1}  # or nothing is tested
    assert told(found) == told(expected)
    assert small.identical(found[-1].params, expected[-1].params)


class Vanishing(Backwards):
    """A runtime in which the device that would choose last vanishes before it does."""

    def wait(self, until: float | None, enough: int) -> Events:
        event = super().wait(until, enough)
        if event.choices is None or self.coming:
            return event
        order = event.choices.order
        return Events(failures=Failures(order, ("vanished",), no_charges(order, self.now())))


def test_who_vanishes_before_it_chooses_is_in_the_books() -> None:
    (found,) = rounds(Vanishing(TASK, small.world(TASK, UNEQUAL)), MENUS, 1)
    assert found.ledger.failure == ("vanished", "", "", "")
    assert not len(found.snapshot.under_way)
    assert found.snapshot.offered == ()


class Echoing(Simulated):
    """A runtime in which every reply and every failure comes twice."""

    before: Events | None = None

    def wait(self, until: float | None, enough: int) -> Events:
        now, before = super().wait(until, enough), self.before
        self.before = now
        if before is None or now.replies is None or before.replies is None:
            return now
        assert now.charges is not None
        assert before.charges is not None
        replies, charges = [before.replies, now.replies], [before.charges, now.charges]
        return replace(now, replies=join(replies), charges=join(charges))


def test_a_reply_to_an_order_that_is_closed_is_ignored() -> None:
    method = replace(FAST, schedule=Buffered(4, 2))
    expected = rounds(Simulated(TASK, small.world(TASK, UNEQUAL)), method, 4)
    found = rounds(Echoing(TASK, small.world(TASK, UNEQUAL)), method, 4)
    assert told(found) == told(expected)
    assert small.identical(found[-1].params, expected[-1].params)


class Growing(Simulated):
    """A runtime that three devices join in every round."""

    def devices(self) -> Devices:
        return super().devices().take(np.arange(min(2 + 3 * self._round_index, TASK.devices)))


def test_devices_that_join_take_part_from_the_next_round_on() -> None:
    found = rounds(Growing(TASK, small.world(TASK)), replace(FAST, select=Everyone()))
    assert [sorted(each.ledger.device) for each in found] == [[0, 1], [*range(5)], [*range(8)]]
    assert found[-1].snapshot.visits.tolist() == [3, 3, 2, 2, 2, 1, 1, 1]
    assert (found[-1].snapshot.acknowledged >= 0).all()


class Discreet(Simulated):
    """A runtime whose devices say nothing of themselves."""

    def conditions(self, devices: Ints) -> Conditions:
        nothing = np.full(len(devices), np.nan)
        return Conditions(*(nothing for _ in range(len(Conditions.__dataclass_fields__))))


def test_a_device_that_does_not_know_its_memory_gets_the_whole_menu() -> None:
    expected = rounds(Simulated(TASK, small.world(TASK, UNEQUAL)), MENUS)
    assert told(rounds(Discreet(TASK, small.world(TASK, UNEQUAL)), MENUS)) == told(expected)


def test_a_device_that_does_not_know_its_speed_gets_one_local_step() -> None:
    method = replace(FAST, plan=LocalStepsWithin(60.0))
    (found,) = rounds(Discreet(TASK, small.world(TASK)), method, 1)
    assert found.ledger.local_steps.tolist() == [1] * 4


class Unmetered(Simulated):
    """A runtime in which nobody measures what computing costs the devices of even numbers."""

    def wait(self, until: float | None, enough: int) -> Events:
        events = super().wait(until, enough)
        if events.replies is None or events.charges is None:
            return events
        even, joules = events.replies.device % 2 == 0, events.charges.compute_joules
        unknown = replace(events.charges, compute_joules=np.where(even, np.nan, joules))
        return replace(events, charges=unknown)


def test_joules_that_nobody_measured_do_not_spoil_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anyfleet.experiment.Simulated", Unmetered)
    method, engine = replace(FAST, select=Everyone()), Sequential()
    task = Embedded(devices=8, partition=Iid(samples=20))
    results = list(play(Experiment(task, method, UNEQUAL, engine=engine, rounds=2)))
    records = [result.record for result in results]
    assert [record.unmeasured for record in records] == [4, 8]
    ledger = results[0].round.ledger
    known = ledger.device % 2 == 1
    parts = ledger.download_joules + ledger.upload_joules
    assert records[0].joules == pytest.approx(ledger.joules[known].sum() + parts[~known].sum())
    totals = by(ledger, "round_index")[0]
    assert totals.joules == pytest.approx(records[0].joules)
    assert totals.unmeasured == 4
    assert summarise(records).unmeasured == 8
    assert "at least " in str(to_target(records, 0.0))
    columns = table({"mine": {0: records}}, None, 200).columns
    assert sum(str(cell).startswith("≥ ") for each in columns for cell in each.cells) == 1


class Clinging(Simulated):
    """A runtime whose devices go on for a while with orders that were cancelled."""

    seconds = 0.05  # for which they do
    until: dict[int, float]  # devices that are not free yet, although no order is under way
    refused = 0  # how often the server found one of them busy

    def begin_round(self, round_index: int) -> None:
        self.until = self.until if round_index else {}
        super().begin_round(round_index)

    def cancel(self, orders: Ints, reason: str) -> Failures:
        assert self._under_way is not None
        busy = self._under_way.device[np.isin(self._under_way.id, orders)].tolist()
        self.until |= dict.fromkeys(busy, self.now() + self.seconds)
        return super().cancel(orders, reason)

    def free(self, devices: Ints) -> Flags:
        still = [self.until.get(device, 0.0) > self.now() for device in devices.tolist()]
        self.refused += sum(still)
        free: Flags = super().free(devices) & ~np.array(still, dtype=bool)
        return free

    def submit(self, orders: Cohort) -> None:
        assert not any(self.until.get(device, 0.0) > self.now() for device in orders.device)
        super().submit(orders)


@pytest.mark.parametrize("seconds", [0.05, 1e9])
def test_a_device_whose_order_was_cancelled_is_not_asked_while_it_is_busy(seconds: float) -> None:
    # The slow half never finishes in time: its orders are cancelled as the round ends.
    method = replace(FAST, select=Everyone(), schedule=Deadline(0.02))
    runtime = Clinging(TASK, small.world(TASK, UNEQUAL))
    runtime.seconds = seconds
    found = rounds(runtime, method, 8)
    late = [np.array(each.ledger.failure) == "too late" for each in found]
    first = set(found[0].ledger.device[late[0]].tolist())
    assert 0 < len(first) < TASK.devices  # or nothing is tested
    assert runtime.refused
    again = [each.index for each in found[1:] if first & set(each.ledger.device.tolist())]
    assert bool(again) == (seconds < 1)
    assert 1 not in again


def test_a_fleet_that_is_busy_with_cancelled_orders_is_waited_for() -> None:
    method = replace(FAST, select=Everyone(), schedule=Deadline(1e-6))
    runtime = Clinging(TASK, small.world(TASK, UNEQUAL))
    runtime.seconds = 2.5e-6
    found = rounds(runtime, method, 5)
    assert [len(each.ledger) for each in found] == [8, 0, 0, 0, 8]
    assert not len(found[-1].snapshot.under_way)


class Shrinking(Simulated):
    """A runtime that one device leaves in every round, the last first, whatever it is doing."""

    def gone(self, devices: Ints) -> Flags:
        """Return which of these devices have left."""
        return devices >= TASK.devices - self._round_index

    def free(self, devices: Ints) -> Flags:
        return super().free(devices) & ~self.gone(devices)

    def wait(self, until: float | None, enough: int) -> Events:
        if self._under_way is not None:
            left = self._under_way.id[self.gone(self._under_way.device)]
            if len(left):
                return Events(failures=self.cancel(left, "left the fleet"))
        return super().wait(until, enough)


@pytest.mark.parametrize(
    "schedule",
    [FAST.schedule, Deadline(0.02, late="counted", staleness=2), Buffered(8, 3)],
    ids=str,
)
def test_devices_that_leave_are_asked_no_more(schedule: Schedule) -> None:
    method = replace(FAST, select=Everyone(), schedule=schedule)
    found = rounds(Shrinking(TASK, small.world(TASK, UNEQUAL)), method, 6)
    for each in found:
        ledger = each.ledger
        fresh = ledger.device[ledger.issued_round == each.index]
        assert (fresh < TASK.devices - each.index).all()
        assert len(each.snapshot.visits) == TASK.devices  # a row stays for each that enrolled
    assert len(found[-1].ledger)


def test_who_leaves_with_an_order_is_in_the_books() -> None:
    method = replace(FAST, select=Everyone(), schedule=Buffered(8, 3))
    found = rounds(Shrinking(TASK, small.world(TASK, UNEQUAL)), method, 6)
    reasons = [reason for each in found for reason in each.ledger.failure]
    assert "left the fleet" in reasons


def test_a_round_without_anybody_ends() -> None:
    method = replace(FAST, select=Everyone(), schedule=Synchronous(patience=5.0))
    found = rounds(Shrinking(TASK, small.world(TASK)), method, TASK.devices + 2)
    assert [len(each.ledger) for each in found] == [*range(TASK.devices, 0, -1), 0, 0]
    assert small.identical(found[-1].params, found[-3].params)


class Ticking(Simulated):
    """A runtime whose clock goes on by itself, a microsecond whenever somebody looks at it."""

    looked = 0

    def now(self) -> float:
        self.looked += 1
        return super().now() + 1e-6 * self.looked

    def wait(self, until: float | None, enough: int) -> Events:
        return super().wait(None if until is None else until - 1e-6 * self.looked, enough)


@pytest.mark.parametrize(
    "schedule",
    [FAST.schedule, Deadline(0.02), Deadline(0.02, late="counted", staleness=2), Buffered(4, 2)],
    ids=str,
)
def test_a_clock_may_go_on_by_itself(schedule: Schedule) -> None:
    method = replace(FAST, select=Everyone(), schedule=schedule)
    expected = rounds(Simulated(TASK, small.world(TASK, UNEQUAL)), method, 4)
    found = rounds(Ticking(TASK, small.world(TASK, UNEQUAL)), method, 4)
    assert [e.ledger.device.tolist() for e in found] == [e.ledger.device.tolist() for e in expected]
    assert [e.ledger.failure for e in found] == [e.ledger.failure for e in expected]
    times = [each.time for each in found]
    assert times == sorted(set(times))


@dataclass(frozen=True)
class Idle(Synchronous):
    """A schedule that asks nobody and waits for nothing."""

    def start(self, view: View) -> tuple[Request, ...]:
        return ()

    def alarm(self, view: View) -> float:
        return view.now


@pytest.mark.parametrize("runtime", [Simulated, Ticking])
def test_a_schedule_that_stands_still_is_told_by_what_it_does(runtime: type[Simulated]) -> None:
    with pytest.raises(RuntimeError, match="stands still"):
        rounds(runtime(TASK, small.world(TASK)), replace(FAST, schedule=Idle()), 1)


class Hasty(Simulated):
    """A runtime that comes back from waiting now and then with nothing, as real ones do."""

    turns = 0

    def wait(self, until: float | None, enough: int) -> Events:
        self.turns += 1
        return Events() if self.turns % 3 else super().wait(until, enough)


def test_waiting_in_vain_is_not_standing_still() -> None:
    expected = rounds(Simulated(TASK, small.world(TASK, UNEQUAL)), FAST)
    assert told(rounds(Hasty(TASK, small.world(TASK, UNEQUAL)), FAST)) == told(expected)


def unknown(charges: Charges, rows: Flags, names: tuple[str, ...]) -> Charges:
    """Return charges of which nobody knows these, for some of the orders."""
    return replace(charges, **{n: np.where(rows, np.nan, getattr(charges, n)) for n in names})


class Unobserved(Simulated):
    """A runtime in which nobody measures what orders of even numbers take, if they end well."""

    names: tuple[str, ...] = ()  # of the charges that are not known

    def wait(self, until: float | None, enough: int) -> Events:
        events = super().wait(until, enough)
        if events.charges is None:
            return events
        return replace(
            events, charges=unknown(events.charges, events.charges.order % 2 == 0, self.names)
        )

    def cancel(self, orders: Ints, reason: str) -> Failures:
        found = super().cancel(orders, reason)
        return replace(found, charges=unknown(found.charges, orders % 2 == 0, self.names))


SPENT = ("download_seconds", "compute_seconds", "upload_seconds", "flops", "bits_down", "bits_up")
AMOUNTS = {
    "seconds": SPENT[:3],
    "flops": ("flops",),
    "down": ("bits_down",),
    "up": ("bits_up",),
}


@pytest.mark.parametrize("schedule", [FAST.schedule, Deadline(0.02)], ids=str)
@pytest.mark.parametrize("names", [SPENT, SPENT[1:2]], ids=str)
def test_what_nobody_measured_spoils_no_sum(
    names: tuple[str, ...], schedule: Schedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = replace(FAST, select=Everyone(), schedule=schedule)
    task = Embedded(devices=8, partition=Iid(samples=20))
    experiment = Experiment(task, method, UNEQUAL, engine=Sequential(), rounds=2)
    expected = list(play(experiment))
    monkeypatch.setattr("anyfleet.experiment.Simulated", Unobserved)
    monkeypatch.setattr(Unobserved, "names", names)
    found = list(play(experiment))
    assert small.identical(found[-1].round.params, expected[-1].round.params)
    assert found[-1].record.time == expected[-1].record.time
    ledgers = [join([each.round.ledger for each in results]) for results in (found, expected)]
    assert ledgers[0].failure == ledgers[1].failure
    even = ledgers[1].order % 2 == 0
    totals, whole = ([*by(each, "failure").values()] for each in ledgers)
    for name, columns in AMOUNTS.items():
        # What is known of an order counts, even where not all of it is.
        known = sum(
            np.where(even & (column in names), 0.0, getattr(ledgers[1], column)).sum()
            for column in columns
        )
        scale = 8 if name in ("down", "up") else 1
        assert sum(getattr(each, name) for each in totals) == pytest.approx(known / scale)
        if name != "seconds":
            assert getattr(found[-1].record, name) == pytest.approx(known / scale)
    assert sum(each.seconds for each in whole) > 0
    assert math.isfinite(found[-1].record.joules)
    wait = ledgers[0].wait_seconds
    assert (np.isnan(wait) == (even & bool({*SPENT[:3]} & {*names}))).all()


# --- conditions that a device does not report ---------------------------------------------------


class Reticent(Simulated):
    """A runtime whose devices of even numbers do not say some things of themselves."""

    names: tuple[str, ...] = ()
    sent: Cohort | None = None  # the orders that were submitted last

    def submit(self, orders: Cohort) -> None:
        self.sent = orders
        super().submit(orders)

    def conditions(self, devices: Ints) -> Conditions:
        own = super().conditions(devices)
        kept = {name: getattr(own, name).astype(float) for name in self.names}
        return replace(own, **{n: np.where(devices % 2 == 0, np.nan, v) for n, v in kept.items()})


LINKS = ("bit_rate_up", "bit_rate_down")
ALL = tuple(Conditions.__dataclass_fields__)


def reticent(method: Method, *names: str, fleet: Fleet = UNEQUAL) -> Ledger:
    """Return the ledger of a round in which devices of even numbers keep these to themselves."""
    runtime = Reticent(TASK, small.world(TASK, fleet))
    runtime.names = names
    (found,) = rounds(runtime, replace(method, select=Everyone()), 1)
    return found.ledger


@pytest.mark.parametrize("names", [LINKS[:1], LINKS, ("memory",), ("speed",), ("loss",), ALL])
def test_devices_of_anycostfl_choose_by_what_they_know_themselves(names: tuple[str, ...]) -> None:
    method = anycost(count=8, seconds=1.0)
    assert repr(reticent(method, *names).as_dicts()) == repr(reticent(method).as_dicts())


@pytest.mark.parametrize("names", [LINKS, ("speed",), ("battery",), ("budget",), ("load",)])
def test_a_server_that_chooses_for_a_silent_device_takes_what_fits_when_nothing_does(
    names: tuple[str, ...],
) -> None:
    gain = replace(FAST, plan=Assigned(WidthMenu((1.0, 0.5)), MostGain(1.0)), uplink=Fgc())
    ledger = reticent(gain, *names)
    assert [reason[:11] for reason in ledger.failure] == ["over budget", ""] * 4
    if {"battery", "budget"} & {*names}:
        return
    timed = replace(FAST, plan=Assigned(WidthMenu((1.0, 0.5)), LargestInTime(1e3)))
    assert reticent(timed, *names).width.tolist() == [0.5, 1.0] * 4


def test_a_server_that_does_not_know_the_memory_assigns_the_smallest() -> None:
    method = replace(FAST, plan=Assigned(WidthMenu((1.0, 0.5)), LargestInTime(1e3)))
    assert reticent(method, "memory").width.tolist() == [0.5, 1.0] * 4


@pytest.mark.parametrize("names", [LINKS, ("speed",), ("fastest",), ("slowest",), ALL])
def test_just_in_time_lets_silent_devices_run_at_the_highest_frequency(
    names: tuple[str, ...],
) -> None:
    frequency = reticent(replace(FAST, plan=JustInTime(1e3)), *names).frequency
    assert (np.isnan(frequency) == [True, False] * 4).all()


@pytest.mark.parametrize("names", [LINKS[:1], LINKS, ("speed",), ALL])
def test_the_target_time_is_that_of_devices_that_are_known(names: tuple[str, ...]) -> None:
    fleet, method = levels(speeds=(2e9, 4e8, 1e8, 2e7)), replace(FAST, select=Everyone())
    took = reticent(method, fleet=fleet).seconds
    runtime = Reticent(TASK, small.world(TASK, fleet))
    runtime.names = names
    rounds(runtime, replace(method, plan=TargetSeconds(WholeModel())), 1)
    assert runtime.sent is not None
    target = runtime.sent.hyperparameters.target_seconds
    assert target == pytest.approx(np.full(8, np.median(took[1::2])))
    assert np.median(took) != pytest.approx(np.median(took[1::2]))  # or nothing is tested


@pytest.mark.parametrize("seconds", [None, 0.05, math.inf])
def test_who_does_not_know_its_link_sends_the_least(seconds: float | None) -> None:
    plan = SentFractionByLink(0.1, seconds)
    sent = reticent(replace(FAST, plan=plan, uplink=Hq()), "bit_rate_up").sent_fraction
    assert sent[::2] == pytest.approx(np.full(4, 1e-6))
    assert (sent[1::2] > 0.01).all()
    if seconds is None:  # the mean of all devices is met by those that are known
        assert sent.mean() == pytest.approx(0.1, rel=1e-3)
