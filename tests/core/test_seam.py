"""What the loop does not rely on: here runtimes are as slow, forgetful and fickle as real ones."""

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from anyfleet import Experiment, play
from anyfleet.analysis.summaries import by, summarise, to_target
from anyfleet.arrays import Ints, join
from anyfleet.cli.tables import table
from anyfleet.core.events import Events, Failures
from anyfleet.core.loop import Round, run
from anyfleet.core.messages import Conditions, Devices, no_charges
from anyfleet.core.method import Method
from anyfleet.core.orders import Cohort
from anyfleet.core.slots import Schedule
from anyfleet.methods import fedavg
from anyfleet.parts.choose import LargestInTime
from anyfleet.parts.plan import LocalStepsWithin, WidthMenu
from anyfleet.parts.schedule import Buffered
from anyfleet.parts.select import Everyone
from anyfleet.runtime import Sequential, Simulated
from anyfleet.tasks import Embedded, Iid
from anyfleet.world import levels
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
    columns = table({"mine": [records]}, None, 200).columns
    assert sum(str(cell).startswith("≥ ") for each in columns for cell in each.cells) == 1
