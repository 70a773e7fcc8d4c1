"""Devices in this process, under virtual time: a clock and a world, times an engine."""

import math
from dataclasses import replace

import numpy as np

from anyfleet.arrays import Flags, Floats, Ints, join
from anyfleet.core.check_in import Choices
from anyfleet.core.choosing import decide
from anyfleet.core.delivery import cut_order
from anyfleet.core.limits import Limits
from anyfleet.core.messages import (
    Charges,
    Conditions,
    Devices,
    DeviceState,
    Events,
    Failure,
    Kind,
    Replies,
    measured,
)
from anyfleet.core.objectives import Task
from anyfleet.core.orders import Cohort
from anyfleet.core.planning import too_large
from anyfleet.runtime.simulated.batteries import Batteries
from anyfleet.runtime.simulated.charging import charged, demand, sending, spent
from anyfleet.runtime.simulated.clock import Clock, Event
from anyfleet.runtime.simulated.engines import Engine, EngineOrder, Sequential
from anyfleet.runtime.simulated.failures import PossibleFailure, first, goes_offline, runs_dry
from anyfleet.runtime.simulated.pending import Pending, Saved
from anyfleet.runtime.simulated.phases import Phase, Phases
from anyfleet.runtime.simulated.transfers import addresses, transfers
from anyfleet.world import World
from anyfleet.world.quantities import When
from anyfleet.world.world import RuntimeConditions

# Devices looked at together: what lies between stays in the processor's cache.
_BLOCK = 1 << 17
_TRAINED = (Kind.TRAIN, Kind.HOLD, Kind.FETCH)  # answers that tell the loss of training


class Simulated:
    """A fleet in this process.

    Every order has two events: `trained`, known when it is submitted, and `arrived`, which needs
    the measured size of the answer; or it is `lost` before. Orders are carried out when the clock
    first needs one, all pending ones together, so that even asynchronous runs are stacked.
    """

    def __init__(
        self,
        task: Task,
        world: World,
        seed: int,
        *,
        engine: Engine | None = None,
        limits: Limits | None = None,
    ) -> None:
        if len(world) != task.devices:
            raise ValueError(
                f"the world has {len(world)} devices but the task has {task.devices}; "
                "build the world with one row per device of the task"
            )
        self._task, self._world, self._seed = task, world, seed
        self._engine: Engine = engine or Sequential()
        self.limits = limits or Limits()
        self._clock, self._step = Clock(), 0
        self._pending: dict[int, Pending] = {}
        self._memories: dict[int, DeviceState] = {}
        self._batteries = Batteries(world)
        # As devices last said and would say again, whatever the server made of their answers.
        self._losses: Floats = np.full(task.devices, np.nan)
        self._free = np.ones(task.devices, dtype=bool)

    # -- what policies learn

    def now(self) -> float:
        return self._clock.now

    def begin_round(self, round_index: int) -> None:
        self._step = round_index

    def devices(self) -> Devices:
        return self._world.declared

    def free(self, devices: Ints) -> Flags:
        blocks = [devices[start : start + _BLOCK] for start in range(0, len(devices), _BLOCK)]
        return np.concatenate([np.empty(0, dtype=bool), *map(self._free_of, blocks)])

    def _free_of(self, devices: Ints) -> Flags:
        there = self._world.online(devices, self._when())
        return self._free[devices] & there & self._batteries.enough(devices, self.now())

    def conditions(self, devices: Ints) -> Conditions:
        charge = self._batteries.charge(devices, self.now())
        own = RuntimeConditions(charge, self._losses[devices])
        return self._world.report(devices, self._when(), self._on_air(devices), own)

    def check_in(self, orders: Cohort) -> Choices:
        memories = [self.state(int(device)) for device in orders.device]
        counting = self._world.declared.counting
        return decide(orders, self._truth(orders), memories, self._task, counting)

    def _truth(self, orders: Cohort) -> Conditions:
        """What devices know of themselves when these orders reach them."""
        own = self._world.conditions(orders.device, self._when(), self._on_air(orders.device))
        return replace(own, battery=self._batteries.charge(orders.device, self.now()))

    def _on_air(self, devices: Ints) -> Ints:
        """How many use each band, when these devices do so beside those under way."""
        if not self._world.shares_bands:
            return np.ones(len(self._world.links), dtype=np.int64)  # nobody takes from anybody
        busy = [int(pending.order.device[0]) for pending in self._pending.values()]
        return self._world.devices_per_band(np.union1d(devices, np.array(busy, dtype=np.int64)))

    def _when(self) -> When:
        return When(self.now(), self._step)

    # -- asking

    def submit(self, orders: Cohort) -> None:
        now = self._when()
        earlier = [p for p in self._pending.values() if p.when == now and p.reply is None]
        self._begin(orders)
        if not self._world.shares_bands:
            return
        # Who was asked at this very moment shares the band with those who were asked just now.
        self._clock.forget({int(pending.order.id[0]) for pending in earlier})
        for pending in earlier:
            self._begin(pending.asked)

    def _begin(self, orders: Cohort) -> None:
        own, active = self._truth(orders), self._on_air(orders.device)
        crossing = transfers(orders, self._world, self._when(), active)
        deaths = addresses(orders, self._world.seed, "death")
        fatal = self._world.dies(orders.device, deaths, self._when())
        self._free[orders.device] = False
        self._batteries.begin(orders.device, self.now())
        for row, (whole, mine) in enumerate(zip(orders.rows(), own.rows(), strict=True)):
            order = cut_order(whole, crossing[row].down, self._task.blueprint)
            notes = self.state(int(order.device[0])).chooser
            need = demand(order, self._task, self._world.declared.counting, notes)
            courses = Phases(self._world, order, self._when(), mine, active)
            download = courses.download()
            parts = download, courses.compute(need.effort, download.seconds)
            charges = charged(order, need.effort, parts, self._when())
            share = np.array([crossing[row].down_share])
            charges = replace(charges, delivered_down=share)
            pending = Pending(whole, courses, parts, crossing[row], charges)
            reason = too_large(float(need.memory[0]), float(mine.memory[0]))
            self._start(pending, reason, dies=bool(fatal[row]))

    def _start(self, pending: Pending, no_room: str, *, dies: bool) -> None:
        """Schedules what comes next for an order that was just submitted."""
        download, compute = (part.seconds for part in pending.passed_phases)
        fates = [
            *([PossibleFailure(0.0, "no link")] if math.isinf(download) else []),
            *([PossibleFailure(download, no_room)] if no_room else []),
            *([PossibleFailure(download + compute / 2, "died")] if dies else []),
            *runs_dry(pending.passed_phases, float(pending.phases.own.battery[0])),
        ]
        soonest = first(fates)
        device, end = int(pending.order.device[0]), download + compute
        end = min(end, soonest.after) if soonest else end
        fate = first([*fates, *goes_offline(self._world, device, pending.when, end)])
        order = int(pending.order.id[0])
        self._pending[order] = replace(pending, failure=fate)
        after = fate.after if fate else download + compute
        self._clock.at(self.now() + after, Event("lost" if fate else "trained", order))

    # -- hearing

    def wait(self, until: float | None, enough: int) -> Events:
        updates: list[Replies] = []
        charges: list[Charges] = []
        lost: list[Failure] = []
        while len(updates) + len(lost) < enough:
            event = self._clock.pop(until)
            if event is None:
                break
            if event.kind == "trained":
                self._trained(event.order)
                continue
            fate, update = self._pending[event.order].failure, self._pending[event.order].reply
            if fate is not None:
                lost.append(Failure(event.order, fate.reason, self._land(event.order, fate.after)))
            elif update is not None:
                loss = measured(update.report[0], "loss")
                if self._pending[event.order].order.kind in _TRAINED and not math.isnan(loss):
                    self._losses[update.device] = loss
                updates.append(update)
                charges.append(self._land(event.order, math.inf))
        if not (updates or lost) and until is None:
            raise RuntimeError(
                "the schedule waits for an answer but no order is under way; "
                "its alarm must give a time whenever nothing is flying"
            )
        if not updates:
            return Events(failures=tuple(lost))
        return Events(join(updates), join(charges), tuple(lost))

    def cancel(self, orders: tuple[int, ...], reason: str) -> tuple[Failure, ...]:
        self._clock.forget(set(orders))
        began = {order: self._pending[order].when.now for order in orders}
        return tuple(
            Failure(order, reason, self._land(order, self.now() - began[order])) for order in orders
        )

    def save(self) -> Saved:
        return Saved(
            self._clock.copy(),
            self._step,
            dict(self._pending),
            dict(self._memories),
            self._batteries.save(),
            self._losses.copy(),
        )

    def restore(self, saved: Saved) -> None:
        self._clock, self._step = saved.clock.copy(), saved.round_index
        self._pending, self._memories = dict(saved.pending), dict(saved.states)
        self._batteries.restore(saved.batteries)
        self._losses = saved.losses.copy()
        busy = [int(pending.order.device[0]) for pending in saved.pending.values()]
        self._free = ~np.isin(np.arange(self._task.devices), busy)

    def state(self, device: int) -> DeviceState:
        """What a device keeps."""
        return self._memories.get(device, DeviceState())

    def _land(self, order_id: int, passed: float) -> Charges:
        """Ends an order after so many seconds; charged are the parts of it that these reached."""
        pending = self._pending.pop(order_id)
        device = int(pending.order.device[0])
        self._free[device] = True
        charges = spent(pending.charges, pending.passed_phases, passed)
        joules = charges.download_joules + charges.compute_joules + charges.upload_joules
        self._batteries.spend(device, float(joules[0]), self.now())
        return charges

    def _trained(self, order_id: int) -> None:
        """The device has finished: it remembers, and sends."""
        if self._pending[order_id].reply is None:
            self._execute()
        pending = self._pending[order_id]
        if pending.reply is None or pending.state is None:
            raise RuntimeError(f"the engine did not carry out order {order_id}")
        if pending.unread:
            # It came as far as to the device, which did nothing: only that is charged.
            end = PossibleFailure(
                pending.passed_phases[0].seconds, f"refused by the device: {pending.unread}"
            )
            self._pending[order_id] = replace(pending, failure=end)
            self._clock.at(self.now(), Event("lost", order_id))
            return
        self._memories[int(pending.order.device[0])] = pending.state
        bits = pending.reply.bits
        upload = pending.phases.upload(float(bits[0]), self._when())
        share = np.array([pending.transfer.up_share])
        charges = replace(sending(pending.charges, bits, upload), delivered_up=share)
        fate = self._sending(pending, upload)
        kind, after = ("lost", fate.after) if fate else ("arrived", upload.seconds)
        self._clock.at(self.now() + after, Event(kind, order_id))
        # From the order's start, as all of its seconds.
        before = sum(part.seconds for part in pending.passed_phases)
        fate = fate and fate._replace(after=before + fate.after)
        parts = (*pending.passed_phases, upload)
        self._pending[order_id] = replace(
            pending, passed_phases=parts, charges=charges, failure=fate
        )

    def _sending(self, pending: Pending, upload: Phase) -> PossibleFailure | None:
        """How an upload fails, if it does; in seconds from now."""
        seconds, device = upload.seconds, int(pending.order.device[0])
        charge = float(pending.phases.own.battery[0])
        left = charge - sum(part.joules for part in pending.passed_phases)
        fates = [
            *([PossibleFailure(0.0, "no link")] if math.isinf(seconds) else []),
            *([PossibleFailure(0.0, "nothing came through")] if pending.transfer.up <= 0 else []),
            # It arrives, and is paid for.
            *([PossibleFailure(seconds, f"refused: {pending.refused}")] if pending.refused else []),
            *runs_dry((upload,), left),
        ]
        soonest = first(fates)
        end = min(seconds, soonest.after) if soonest else seconds
        # Who was there when the step began stays for what was ordered then: only time drives away.
        when = When(self.now(), pending.when.round_index)
        return first([*fates, *goes_offline(self._world, device, when, end)])

    def _execute(self) -> None:
        """Carries out everything that is under way and will get that far."""
        waiting = [(i, p) for i, p in self._pending.items() if p.reply is None and not p.failure]
        assigned = [
            EngineOrder(p.asked, p.order, self.state(int(p.order.device[0])), p.transfer.up)
            for _, p in waiting
        ]
        done = self._engine.execute(assigned, self._task, self.limits)
        for (order_id, pending), outcome in zip(waiting, done, strict=True):
            self._pending[order_id] = replace(pending, **outcome._asdict())
