"""The simulated fleet: devices in this process, under virtual time."""

from collections.abc import Hashable
from dataclasses import dataclass, replace

import numpy as np

from anyfleet.arrays import Arrays, Flags, Floats, Ints, alike, distinct, join
from anyfleet.core.check_in import OrderChoices
from anyfleet.core.choosing import decide
from anyfleet.core.device_state import DeviceState
from anyfleet.core.device_states import DeviceStates, Remembered
from anyfleet.core.events import Events, Failures
from anyfleet.core.limits import Limits
from anyfleet.core.messages import OF_TRAINING, Charges, Conditions, Devices, no_charges
from anyfleet.core.objectives import Task
from anyfleet.core.orders import Cohort
from anyfleet.core.stacks import Replies
from anyfleet.runtime.simulated.batteries import Batteries
from anyfleet.runtime.simulated.clock import Clock
from anyfleet.runtime.simulated.engines import Assignment, Engine, Sequential
from anyfleet.runtime.simulated.stacking import draws_together
from anyfleet.runtime.simulated.timing import begin, with_uploads
from anyfleet.runtime.simulated.under_way import SimulatedState, Told, UnderWay
from anyfleet.world import World
from anyfleet.world.quantities import When
from anyfleet.world.world import RuntimeConditions

# Devices looked at together: intermediate results stay in the processor's cache.
_BLOCK = 1 << 17
# Columns of the table that change when orders are carried out, and when uploads are known.
_OF_RESULTS = ("carried_out", "replies", "did_nothing", "detail", "details")
_OF_UPLOADS = ("bits_up", "upload", "upload_round", "events", "failed_after", "reason")


@dataclass(frozen=True, eq=False)
class _Asked(Arrays):
    """The conditions of devices at one time, while so many use the band of each."""

    device: Ints
    active: Ints
    conditions: Conditions
    when: When


def _alike(cohort: Cohort) -> Hashable:
    """Return what is equal for cohorts whose orders can be carried out together."""
    drawn = cohort.cohort_key if draws_together(cohort.job.trainer) else None
    return cohort.kind, cohort.job, drawn


class Simulated:
    """A fleet in this process, under virtual time.

    The orders under way are one table. Time, joules and failures are computed for all orders that
    are submitted together; orders are carried out when the clock first reaches one that is
    trained, all that are under way together, so that even asynchronous runs can be stacked.
    """

    def __init__(
        self,
        task: Task,
        world: World,
        *,
        engine: Engine | None = None,
        limits: Limits | None = None,
    ) -> None:
        if len(world) != task.devices:
            raise ValueError(
                f"the world has {len(world)} devices but the task has {task.devices}; "
                "build the world with one row per device of the task"
            )
        self._task, self._world = task, world
        self.limits = limits or Limits()
        self._executor = (engine or Sequential()).start(task, self.limits)
        self._clock, self._round_index = Clock(), 0
        self._under_way: UnderWay | None = None  # None: no order is
        self._states = DeviceStates(task)
        # What devices keep of orders that are carried out, once their training has ended.
        self._remembered: Remembered | None = None
        self._batteries = Batteries(world)
        # The loss that each device reported last, even if the server refused the reply, and what
        # devices told in the last round: an accelerator may still be computing it.
        self._losses: Floats = np.full(task.devices, np.nan)
        self._told: Told | None = None
        self._free = np.ones(task.devices, dtype=bool)
        self._choices: OrderChoices | None = None  # made and not yet told
        self._asked: _Asked | None = None  # a check-in and its orders are of the same time
        # Devices found online, at the time at which somebody looked last.
        self._found, self._looked = np.zeros(0, dtype=bool), When(-1.0, -1)

    # -- what policies learn

    def now(self) -> float:
        """Return the seconds since the start of the run."""
        return self._clock.now

    def begin_round(self, round_index: int) -> None:
        """Record that a round begins."""
        self._round_index = round_index

    def devices(self) -> Devices:
        """Return what the fleet declared about its devices."""
        return self._world.declared

    def free(self, devices: Ints) -> Flags:
        """Return which devices are online, have no order, and have more than their reserve."""
        blocks = [devices[start : start + _BLOCK] for start in range(0, len(devices), _BLOCK)]
        return np.concatenate([np.empty(0, dtype=bool), *map(self._free_in_block, blocks)])

    def _free_in_block(self, devices: Ints) -> Flags:
        online, enough = self._online(devices), self._batteries.above_reserve(devices, self.now())
        return self._free[devices] & online & enough

    def _online(self, devices: Ints) -> Flags:
        """Return which devices can be reached; those that are picked have just been looked at."""
        if self._world.always_online:
            return np.ones(len(devices), dtype=bool)
        if self._looked != (now := self._when()):
            self._looked, self._found = now, np.zeros(self._task.devices, dtype=bool)
        online: Flags = self._found[devices]
        unknown = np.flatnonzero(~online)
        if len(unknown):
            online[unknown] = self._world.online(devices[unknown], now)
            self._found[devices] = online
        return online

    def conditions(self, devices: Ints) -> Conditions:
        """Return what these devices would report if all checked in now.

        A band that devices share is divided among these and those under way.
        """
        self._enter_losses()
        return self._reported(devices, self._losses[devices])

    def free_memory(self, devices: Ints) -> Floats:
        """Return the memory of `conditions`; nobody waits for the last losses."""
        return self._reported(devices, np.full(len(devices), np.nan)).memory

    def _reported(self, devices: Ints, losses: Floats) -> Conditions:
        """Return what these devices would report, whose last losses are given."""
        own = RuntimeConditions(self._batteries.charge(devices, self.now()), losses)
        now = self._when()
        true = self._conditions_at(devices, self._world.reports.when(now), self._active(devices))
        return self._world.report(devices, now, true, own)

    def offer(self, orders: Cohort) -> None:
        """Let the devices choose from the menus of these orders; no time passes."""
        choosers = self._states.choosers(orders.device)
        counting = self._world.declared.counting
        own = self._true_conditions(orders.device, self._active(orders.device))
        made = OrderChoices(orders.id, decide(orders, own, choosers, self._task, counting))
        self._choices = made if self._choices is None else join([self._choices, made])

    def _true_conditions(self, devices: Ints, active: Ints) -> Conditions:
        """Return the true conditions of devices while `active` devices use their bands."""
        own = self._conditions_at(devices, self._when(), active)
        return own.having(battery=self._batteries.charge(devices, self.now()))

    def _conditions_at(self, devices: Ints, when: When, active: Ints) -> Conditions:
        """Return conditions as the world has them; those that were asked for last are known."""
        known = self._asked
        if known is not None and known.when == when:
            if len(known) > len(devices):  # some declined
                known = known.take(np.isin(known.device, devices))
            if np.array_equal(known.device, devices) and np.array_equal(known.active, active):
                return known.conditions
        found = self._world.conditions(devices, when, active)
        self._asked = _Asked(devices, active, found, when)
        return found

    def _active(self, devices: Ints) -> Ints:
        """Return how many devices use the band of each: these, and those under way."""
        if not self._world.shares_bands:
            return np.ones(len(devices), dtype=np.int64)  # every device has its own
        busy = np.empty(0, dtype=np.int64) if self._under_way is None else self._under_way.device
        return self._world.sharing(devices, np.union1d(devices, busy))

    def _when(self) -> When:
        return When(self.now(), self._round_index)

    # -- submitting orders

    def submit(self, orders: Cohort) -> None:
        """Send orders to their devices."""
        before = self._under_way
        new = self._begin(orders)
        self._asked = None  # the next orders are of another time, or of other devices
        self._under_way = new if before is None else join([before, new])
        if before is None or not self._world.shares_bands:
            return
        # Orders that were submitted at this very time share the band with the new ones.
        same = (before.began == self.now()) & (before.round_index == self._round_index)
        earlier = np.flatnonzero(same & ~before.carried_out)
        for number in dict.fromkeys(before.cohort[earlier].tolist()):
            rows = earlier[before.cohort[earlier] == number]
            again = self._begin(before.cohorts[number].sent.take(before.row[rows]))
            self._under_way = self._under_way.put(rows, again)

    def _begin(self, orders: Cohort) -> UnderWay:
        """Return how these orders go on, with the numbers of their next events."""
        active = self._active(orders.device)
        own = self._true_conditions(orders.device, active)
        self._free[orders.device] = False
        self._batteries.start_work(orders.device, self.now())
        begun = begin(
            orders,
            self._when(),
            own,
            active,
            world=self._world,
            task=self._task,
            states=self._states,
        )
        events = begun.events
        times = np.where(events.training, events.trained, events.ends)
        self._clock, sequence = self._clock.scheduled(times)
        return begun.having(events=events.having(sequence=sequence))

    # -- replies and failures

    def wait(self, until: float | None, enough: int) -> Events:
        """Let time pass until there are `enough` replies and failures, or until `until`.

        Choices come back alone, before time passes.
        """
        if self._choices is not None:
            chosen, self._choices = self._choices, None
            return Events(choices=chosen)
        if self._under_way is None:
            if until is None:
                raise RuntimeError(
                    "the schedule waits for a reply but no order is under way; "
                    "its alarm must give a time whenever no order is under way"
                )
            self._clock = replace(self._clock, now=max(self.now(), float(until)))
            return Events()
        due = self._clock.due(self._under_way.events, until, enough)
        orders = self._uploaded(self._under_way, due) if due.any() else self._under_way
        passed = self._clock.passed(orders.events, until, enough)
        orders = self._finish_training(orders, passed.trained)
        self._clock = replace(self._clock, now=passed.now)
        ended = self._close(orders, passed.ended)
        charges = self._charge(ended, ended.failed_after, ended.events.ends)
        came = ended.reason < 0
        replies = ended.replies.take(came).pruned()
        self._remember_losses(ended, replies, came)
        reasons = tuple(filter(None, ended.why()))
        return Events(
            replies=replies if came.any() else None,
            charges=charges.take(came) if came.any() else None,
            failures=None
            if came.all()
            else Failures(ended.id[~came], reasons, charges.take(~came)),
        )

    def cancel(self, orders: Ints, reason: str) -> Failures:
        """Close orders now, and return them as failures."""
        offered = np.zeros(len(orders), dtype=bool)
        if self._choices is not None:
            offered = np.isin(orders, self._choices.order)
            left = ~np.isin(self._choices.order, orders)
            self._choices = self._choices.take(left) if left.any() else None
        # Nothing was spent on what devices have only chosen from.
        spent = no_charges(orders, self.now())
        if not offered.all():
            spent = spent.put(np.flatnonzero(~offered), self._cancelled(orders[~offered]))
        return Failures(orders, (reason,) * len(orders), spent)

    def _cancelled(self, orders: Ints) -> Charges:
        """Close orders under way now, and return their charges."""
        table = self._under_way
        known = np.empty(0, dtype=np.int64) if table is None else table.id
        if table is None or not np.isin(orders, known).all():
            raise KeyError(f"not all of the orders {orders.tolist()} are under way")
        sorter = np.argsort(known)
        closed = self._close(table, sorter[np.searchsorted(known, orders, sorter=sorter)])
        return self._charge(closed, self.now() - closed.began, self.now())

    def save(self) -> SimulatedState:
        """Return the state for a checkpoint."""
        return SimulatedState(
            self._clock,
            self._round_index,
            self._under_way,
            self._choices,
            self._states.save(),
            self._remembered,
            self._batteries.save(),
            self._losses.copy(),
            self._told,
        )

    def restore(self, saved: SimulatedState) -> None:
        """Go back to the state that `save` returned."""
        self._clock, self._round_index = saved.clock, saved.round_index
        self._under_way, self._choices = saved.under_way, saved.choices
        self._remembered = saved.remembered
        self._states.restore(saved.states)
        self._batteries.restore(saved.batteries)
        self._losses, self._told = saved.losses.copy(), saved.told
        self._free = np.ones(self._task.devices, dtype=bool)
        if saved.under_way is not None:
            self._free[saved.under_way.device] = False

    def state(self, device: int) -> DeviceState:
        """Return what a device keeps between visits."""
        return self._states.state(device)

    def _close(self, orders: UnderWay, rows: Ints) -> UnderWay:
        """Take orders out of the table, and return them."""
        closed, left = orders.take(rows), np.ones(len(orders), dtype=bool)
        left[rows] = False
        self._under_way = orders.take(left).pruned() if left.any() else None
        self._free[closed.device] = True
        # Of those that upload, devices keep what they have learnt.
        if (forgotten := closed.carried_out & ~closed.uploading).any():
            self._recall(closed.id[forgotten])
        return closed

    def _recall(self, orders: Ints) -> Remembered | None:
        """Return what devices keep of these orders, and wait no longer for them to be trained."""
        if self._remembered is None:
            return None
        mine = np.isin(self._remembered.order, orders)
        found, left = self._remembered.take(mine), ~mine
        self._remembered = self._remembered.take(left).pruned() if left.any() else None
        return found

    def _charge(self, orders: UnderWay, elapsed: Floats, now: Floats | float) -> Charges:
        """Return the charges for what closed orders did in the seconds since they began."""
        charges = orders.charges(elapsed)
        joules = charges.download_joules + charges.compute_joules + charges.upload_joules
        self._batteries.finish_work(orders.device, joules, now)
        return charges

    def _remember_losses(self, orders: UnderWay, replies: Replies, came: Flags) -> None:
        """Keep what devices reported of their training; nobody waits for numbers to arrive."""
        trained = np.array([each.sent.kind in OF_TRAINING for each in orders.cohorts], dtype=bool)
        rows = trained[orders.cohort[came]]
        if not rows.any():
            return
        self._enter_losses()  # those before have long arrived
        self._told = Told(orders.device[came], replies.reports).take(rows)
        if replies.awaited:
            self._enter_losses()

    def _enter_losses(self) -> None:
        """Enter the losses that devices reported last; an accelerator is waited for."""
        told, self._told = self._told, None
        if told is not None:
            devices, losses = told.losses
            self._losses[devices] = losses

    def _finish_training(self, orders: UnderWay, rows: Ints) -> UnderWay:
        """Return the orders after the training of some has ended: their uploads begin."""
        if not len(rows):
            return orders
        events, uploading = orders.events, orders.uploading.copy()
        uploading[rows] = ~orders.did_nothing[rows]
        found = self._recall(orders.id[rows[uploading[rows]]])
        if found is not None:
            self._states.commit(found)
        training, sequence = events.training.copy(), events.sequence.copy()
        training[rows] = False
        self._clock, sequence[rows] = self._clock.scheduled(events.ends[rows])
        events = events.having(training=training, sequence=sequence)
        return orders.having(events=events, uploading=uploading)

    def _uploaded(self, orders: UnderWay, due: Flags) -> UnderWay:
        """Return the orders with the uploads of those whose training may end, in this round."""
        orders = self._execute(orders, np.flatnonzero(orders.events.training & ~orders.carried_out))
        if self._world.rounds_change_links:
            new = due & (orders.upload_round != self._round_index)
        else:  # when they begin does not matter: all at once
            new = orders.events.training & (orders.upload_round < 0)
        rows = np.flatnonzero(new)
        if not len(rows):
            return orders
        some = with_uploads(orders.take(rows), self._round_index, self._world)
        return orders.put_columns(rows, some, *_OF_UPLOADS)

    def _execute(self, orders: UnderWay, waiting: Ints) -> UnderWay:
        """Return the orders after the engine carried out some, those of one job together."""
        cohort = orders.cohort[waiting]
        numbers = np.bincount(cohort).nonzero()[0].tolist()
        sent = [orders.cohorts[number].sent for number in numbers]
        _, group = distinct([_alike(each) for each in sent] if len(sent) > 1 else sent)
        for rows in alike(group[np.searchsorted(numbers, cohort)]):
            done = self._carry_out(orders.take(waiting[rows]))
            orders = orders.put_columns(waiting[rows], done, *_OF_RESULTS)
        return orders

    def _carry_out(self, orders: UnderWay) -> UnderWay:
        """Return orders of one kind and job that the engine carried out."""
        sent, received, groups = [], [], alike(orders.cohort)
        for rows in groups:
            cohort, places = orders.cohorts[orders.cohort[rows[0]]], orders.row[rows]
            sent.append(cohort.sent.take(places))
            lossless = cohort.received is cohort.sent
            received.append(sent[-1] if lossless else cohort.received.take(places))
        order = np.concatenate(groups)
        given = Assignment(join(received), join(sent), orders.transfer.width_up[order])
        done = self._executor.execute(given, self._states)
        if not done.remembered.nothing:
            kept = [each for each in (self._remembered, done.remembered) if each is not None]
            self._remembered = join(kept)
        refused = {
            **{row: f"refused: {why}" for row, why in done.refused_by_server.items()},
            **{row: f"refused by the device: {why}" for row, why in done.refused_by_device.items()},
        }
        did_nothing, detail = np.zeros(len(orders), dtype=bool), np.full(len(orders), -1)
        did_nothing[list(done.refused_by_device)] = True
        detail[list(refused)] = len(orders.details) + np.arange(len(refused))
        back = np.argsort(order)
        return orders.having(
            carried_out=np.ones(len(orders), dtype=bool),
            replies=done.replies if len(groups) == 1 else done.replies.take(back),
            did_nothing=did_nothing[back],
            detail=detail[back],
            details=(*orders.details, *refused.values()),
        )
