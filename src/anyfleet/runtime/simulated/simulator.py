"""The simulated fleet: devices in this process, under virtual time."""

import math
from collections.abc import Hashable
from dataclasses import replace

import numpy as np

from anyfleet.arrays import Flags, Floats, Ints, join
from anyfleet.core.check_in import OrderChoices
from anyfleet.core.choosing import decide
from anyfleet.core.delivery import cut_orders
from anyfleet.core.device_state import DeviceState
from anyfleet.core.events import Events, Failures
from anyfleet.core.limits import Limits
from anyfleet.core.memories import Memories
from anyfleet.core.messages import Charges, Conditions, Devices, Kind
from anyfleet.core.objectives import Task
from anyfleet.core.orders import Cohort
from anyfleet.core.planning import too_large
from anyfleet.core.stacks import Replies
from anyfleet.runtime.simulated.batteries import Batteries
from anyfleet.runtime.simulated.charging import (
    charges_before_upload,
    charges_until,
    charges_with_upload,
    demand,
)
from anyfleet.runtime.simulated.clock import Clock, Event
from anyfleet.runtime.simulated.engines import Assignment, Engine, Sequential
from anyfleet.runtime.simulated.failures import (
    PossibleFailure,
    battery_failures,
    earliest,
    offline_failures,
)
from anyfleet.runtime.simulated.pending import Pending, SimulatedState
from anyfleet.runtime.simulated.phases import OrderTiming, Phase
from anyfleet.runtime.simulated.stacking import draws_together
from anyfleet.runtime.simulated.transfers import draw_transfers, event_keys
from anyfleet.world import World
from anyfleet.world.quantities import When
from anyfleet.world.world import RuntimeConditions

# Devices looked at together: intermediate results stay in the processor's cache.
_BLOCK = 1 << 17
_TRAINED = (Kind.TRAIN, Kind.HOLD, Kind.FETCH)  # kinds whose report has the loss of training


class Simulated:
    """A fleet in this process, under virtual time.

    Every order has two events: `trained`, whose time is known when the order is submitted, and
    `arrived`, which needs the measured size of the reply; or one event `failed`. Orders are carried
    out when the clock first reaches one that is trained, all pending ones together, so that even
    asynchronous runs can be stacked.
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
        self._pending: dict[int, Pending] = {}
        self._memories = Memories(task)
        self._batteries = Batteries(world)
        # The loss that each device reported last, even if the server refused the reply.
        self._losses: Floats = np.full(task.devices, np.nan)
        self._free = np.ones(task.devices, dtype=bool)
        self._choices: OrderChoices | None = None  # made and not yet told

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
        online = self._world.online(devices, self._when())
        return self._free[devices] & online & self._batteries.above_reserve(devices, self.now())

    def conditions(self, devices: Ints) -> Conditions:
        """Return what these devices would report if all checked in now.

        A band that devices share is divided among these and those under way.
        """
        charge = self._batteries.charge(devices, self.now())
        own = RuntimeConditions(charge, self._losses[devices])
        return self._world.report(devices, self._when(), self._active(devices), own)

    def offer(self, orders: Cohort) -> None:
        """Let the devices choose from the menus of these orders; no time passes."""
        choosers = [self._memories.chooser(device) for device in orders.device.tolist()]
        counting = self._world.declared.counting
        chosen = decide(orders, self._true_conditions(orders), choosers, self._task, counting)
        self._choices = OrderChoices(orders.id, chosen)

    def _true_conditions(self, orders: Cohort) -> Conditions:
        """Return the true conditions of the devices when these orders reach them."""
        own = self._world.conditions(orders.device, self._when(), self._active(orders.device))
        return replace(own, battery=self._batteries.charge(orders.device, self.now()))

    def _active(self, devices: Ints) -> Ints:
        """Return how many devices use the band of each: these, and those under way."""
        if not self._world.shares_bands:
            return np.ones(len(devices), dtype=np.int64)  # every device has its own
        busy = [int(pending.order.device[0]) for pending in self._pending.values()]
        everybody = np.union1d(devices, np.array(busy, dtype=np.int64))
        return self._world.sharing(devices, everybody)

    def _when(self) -> When:
        return When(self.now(), self._round_index)

    # -- submitting orders

    def submit(self, orders: Cohort) -> None:
        """Send orders to their devices."""
        now = self._when()
        earlier = [p for p in self._pending.values() if p.when == now and p.reply is None]
        self._begin(orders)
        if not self._world.shares_bands:
            return
        # Orders that were submitted at this very time share the band with the new ones.
        self._clock.cancel({int(pending.order.id[0]) for pending in earlier})
        for pending in earlier:
            self._begin(pending.sent_order)

    def _begin(self, orders: Cohort) -> None:
        """Compute how these orders go on, and schedule their next events."""
        own, active = self._true_conditions(orders), self._active(orders.device)
        transfers = draw_transfers(orders, self._world, self._when(), active)
        death_keys = event_keys(orders, self._world.seed, "death")
        fatal = self._world.dies(orders.device, death_keys, self._when())
        self._free[orders.device] = False
        self._batteries.start_work(orders.device, self.now())
        widths = np.array([transfer.width_down for transfer in transfers])
        received = cut_orders(orders, widths, self._task.blueprint).rows()
        rows = zip(orders.rows(), received, own.rows(), strict=True)
        for row, (whole, order, mine) in enumerate(rows):
            transfer = transfers[row]
            chooser = self._memories.chooser(int(order.device[0]))
            need = demand(order, self._task, self._world.declared.counting, chooser)
            timing = OrderTiming(self._world, order, self._when(), mine, active[[row]])
            download = timing.download()
            phases = download, timing.compute(need.effort, download.seconds)
            charges = charges_before_upload(order, need.effort, phases, self._when())
            charges = replace(charges, delivered_down=np.array([transfer.delivered_down]))
            pending = Pending(whole, timing, phases, transfer, charges)
            no_room = too_large(float(need.memory[0]), float(mine.memory[0]))
            self._schedule(pending, no_room, dies=bool(fatal[row]))

    def _schedule(self, pending: Pending, no_room: str, *, dies: bool) -> None:
        """Schedule the next event of an order that was just submitted."""
        download, compute = (phase.seconds for phase in pending.phases)
        failures = [
            *([PossibleFailure(0.0, "no link")] if math.isinf(download) else []),
            *([PossibleFailure(download, no_room)] if no_room else []),
            *([PossibleFailure(download + compute / 2, "died")] if dies else []),
            *battery_failures(pending.phases, float(pending.timing.conditions.battery[0])),
        ]
        soonest = earliest(failures)
        device, end = int(pending.order.device[0]), download + compute
        end = min(end, soonest.after) if soonest else end
        offline = offline_failures(self._world, device, pending.when, end)
        failure = earliest([*failures, *offline])
        order = int(pending.order.id[0])
        self._pending[order] = replace(pending, failure=failure)
        after = failure.after if failure else download + compute
        self._clock.schedule(self.now() + after, Event("failed" if failure else "trained", order))

    # -- replies and failures

    def wait(self, until: float | None, enough: int) -> Events:
        """Let time pass until there are `enough` replies and failures, or until `until`.

        Choices come back alone, before time passes.
        """
        if self._choices is not None:
            chosen, self._choices = self._choices, None
            return Events(choices=chosen)
        replies: list[Replies] = []
        charges: list[Charges] = []
        failed: list[Failures] = []
        while len(replies) + len(failed) < enough:
            event = self._clock.pop(until)
            if event is None:
                break
            if event.kind == "trained":
                self._begin_upload(event.order)
                continue
            pending = self._pending[event.order]
            failure, reply = pending.failure, pending.reply
            if failure is not None:
                spent = self._close(event.order, failure.after)
                failed.append(Failures(spent.order, (failure.reason,), spent))
            elif reply is not None:
                loss = float(reply.reported("loss")[0])
                if pending.order.kind in _TRAINED and not math.isnan(loss):
                    self._losses[reply.device] = loss
                replies.append(reply)
                charges.append(self._close(event.order, math.inf))
        if not (replies or failed) and until is None:
            raise RuntimeError(
                "the schedule waits for a reply but no order is under way; "
                "its alarm must give a time whenever no order is under way"
            )
        failures = join(failed) if failed else None
        if not replies:
            return Events(failures=failures)
        return Events(join(replies), join(charges), failures)

    def cancel(self, orders: Ints, reason: str) -> Failures:
        """Close orders now, and return them as failures."""
        self._clock.cancel(set(orders.tolist()))
        began = {order: self._pending[order].when.now for order in orders.tolist()}
        spent = [self._close(order, self.now() - began[order]) for order in orders.tolist()]
        return Failures(orders, (reason,) * len(orders), join(spent))

    def save(self) -> SimulatedState:
        """Return the state for a checkpoint."""
        return SimulatedState(
            self._clock.copy(),
            self._round_index,
            dict(self._pending),
            self._memories.save(),
            self._batteries.save(),
            self._losses.copy(),
        )

    def restore(self, saved: SimulatedState) -> None:
        """Go back to the state that `save` returned."""
        self._clock, self._round_index = saved.clock.copy(), saved.round_index
        self._pending = dict(saved.pending)
        self._memories.restore(saved.memories)
        self._batteries.restore(saved.batteries)
        self._losses = saved.losses.copy()
        busy = [int(pending.order.device[0]) for pending in saved.pending.values()]
        self._free = ~np.isin(np.arange(self._task.devices), busy)

    def state(self, device: int) -> DeviceState:
        """Return what a device keeps between visits."""
        return self._memories.state(device)

    def _close(self, order_id: int, elapsed: float) -> Charges:
        """Close the order after `elapsed` seconds; return the charges for the work done by then."""
        pending = self._pending.pop(order_id)
        device = int(pending.order.device[0])
        self._free[device] = True
        charges = charges_until(pending.charges, pending.phases, elapsed)
        joules = charges.download_joules + charges.compute_joules + charges.upload_joules
        self._batteries.finish_work(device, float(joules[0]), self.now())
        return charges

    def _begin_upload(self, order_id: int) -> None:
        """Keep the new state of a device that has finished its work, and begin its upload."""
        if self._pending[order_id].reply is None:
            self._execute()
        pending = self._pending[order_id]
        if pending.reply is None or pending.remembered is None:
            raise RuntimeError(f"the engine did not carry out order {order_id}")
        if pending.refused_by_device:
            # The order reached its device, which did nothing: only the download is charged.
            reason = f"refused by the device: {pending.refused_by_device}"
            refused = PossibleFailure(pending.phases[0].seconds, reason)
            self._pending[order_id] = replace(pending, failure=refused)
            self._clock.schedule(self.now(), Event("failed", order_id))
            return
        self._memories.commit(pending.remembered)
        bits = pending.reply.bits
        upload = pending.timing.upload(float(bits[0]), self._when())
        charges = charges_with_upload(pending.charges, bits, upload)
        charges = replace(charges, delivered_up=np.array([pending.transfer.delivered_up]))
        failure = self._upload_failure(pending, upload)
        after = failure.after if failure else upload.seconds
        self._clock.schedule(
            self.now() + after, Event("failed" if failure else "arrived", order_id)
        )
        # A failure counts its seconds from the start of the order.
        before = sum(phase.seconds for phase in pending.phases)
        failure = failure and failure._replace(after=before + failure.after)
        self._pending[order_id] = replace(
            pending, phases=(*pending.phases, upload), charges=charges, failure=failure
        )

    def _upload_failure(self, pending: Pending, upload: Phase) -> PossibleFailure | None:
        """Return how an upload that begins now fails, in seconds from now, or None."""
        seconds, device = upload.seconds, int(pending.order.device[0])
        charge = float(pending.timing.conditions.battery[0])
        left = charge - sum(phase.joules for phase in pending.phases)
        lost = pending.transfer.width_up <= 0
        refused = pending.refused_by_server
        failures = [
            *([PossibleFailure(0.0, "no link")] if math.isinf(seconds) else []),
            *([PossibleFailure(0.0, "nothing came through")] if lost else []),
            # A reply that the server refuses has arrived, and is charged.
            *([PossibleFailure(seconds, f"refused: {refused}")] if refused else []),
            *battery_failures((upload,), left),
        ]
        soonest = earliest(failures)
        end = min(seconds, soonest.after) if soonest else seconds
        # A device that was online when the round began stays for its order: only time changes that.
        when = When(self.now(), pending.when.round_index)
        return earliest([*failures, *offline_failures(self._world, device, when, end)])

    def _execute(self) -> None:
        """Let the engine carry out all pending orders that are not going to fail before."""
        groups: dict[Hashable, list[int]] = {}
        for number, pending in self._pending.items():
            if pending.reply is None and not pending.failure:
                order = pending.order
                drawn = order.cohort_key if draws_together(order.job, order.cohort_key) else None
                groups.setdefault((order.kind, order.job, drawn), []).append(number)
        for numbers in groups.values():
            waiting = [self._pending[number] for number in numbers]
            given = Assignment(
                join([pending.order for pending in waiting]),
                join([pending.sent_order for pending in waiting]),
                np.array([pending.transfer.width_up for pending in waiting]),
            )
            done = self._executor.execute(given, self._memories)
            rows = zip(numbers, waiting, done.replies.rows(), done.remembered.rows(), strict=True)
            for row, (number, pending, reply, remembered) in enumerate(rows):
                self._pending[number] = replace(
                    pending,
                    reply=reply,
                    remembered=remembered,
                    refused_by_server=done.refused_by_server.get(row, ""),
                    refused_by_device=done.refused_by_device.get(row, ""),
                )
