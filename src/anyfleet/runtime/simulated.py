"""Devices in this process, under virtual time: a clock and a world, times an engine."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from anyfleet.client import decide
from anyfleet.columns import Ints, join
from anyfleet.elastic import cost
from anyfleet.local import limits, processed
from anyfleet.runtime.clock import Clock, Event
from anyfleet.runtime.engines import Engine, Reference
from anyfleet.types import (
    Charges,
    Choices,
    Conditions,
    Devices,
    Events,
    Kind,
    Lost,
    Memory,
    Orders,
    Task,
    Updates,
)
from anyfleet.world import World


@dataclass(frozen=True, eq=False)
class _Pending:
    """An order under way: who, since when, and what it will have cost."""

    order: Orders
    since: float
    charges: Charges
    dies: bool  # before it has finished
    update: Updates | None = None
    memory: Memory | None = None  # what the device will remember once it has finished


@dataclass(frozen=True, eq=False)
class Saved:
    """The state of a simulated fleet between two events."""

    clock: Clock
    pending: Mapping[int, _Pending]
    memories: Mapping[int, Memory]


class Simulated:
    """A fleet in this process.

    Every order has two events: `trained`, known when it is submitted, and `arrived`, which needs
    the measured size of the answer. Orders are carried out when the clock first needs one of
    them, all pending ones together: that lets an engine stack even asynchronous runs.
    """

    def __init__(
        self, task: Task, world: World, seed: int, *, engine: Engine | None = None
    ) -> None:
        if len(world.declared) != task.devices:
            raise ValueError(
                f"the world has {len(world.declared)} devices but the task has {task.devices}; "
                "build the world with one row per device of the task"
            )
        self._task, self._world, self._seed = task, world, seed
        self._engine: Engine = engine or Reference()
        self._clock = Clock()
        self._pending: dict[int, _Pending] = {}
        self._memories: dict[int, Memory] = {}
        self._free = np.ones(task.devices, dtype=bool)

    def now(self) -> float:
        return self._clock.now

    def devices(self) -> Devices:
        return self._world.declared

    def idle(self) -> Ints:
        return np.flatnonzero(self._free)

    def conditions(self, devices: Ints) -> Conditions:
        return self._world.conditions(devices, self.now())

    def offer(self, orders: Orders) -> Choices:
        memories = [self.memory(int(device)) for device in orders.device]
        return decide(
            orders, self._world.conditions(orders.device, self.now()), memories, self._task
        )

    def submit(self, orders: Orders) -> None:
        own = self.conditions(orders.device)
        self._free[orders.device] = False
        fatal = self._world.dies(orders.device, orders.visit, self._seed)
        for row, order in enumerate(orders.rows()):
            flops = self._flops(order)
            download = float(order.bits[0] / own.down[row])
            compute = float(flops / own.speed[row])
            charges = _charges(order, flops=flops, download=download, compute=compute)
            dies = bool(fatal[row])
            self._pending[int(order.id[0])] = _Pending(order, self.now(), charges, dies)
            when = self.now() + download + (compute / 2 if dies else compute)
            self._clock.at(when, Event("died" if dies else "trained", int(order.id[0])))

    def wait(self, until: float | None, enough: int) -> Events:
        updates: list[Updates] = []
        charges: list[Charges] = []
        lost: list[Lost] = []
        while len(updates) + len(lost) < enough:
            event = self._clock.pop(until)
            if event is None:
                break
            if event.kind == "trained":
                self._trained(event.order)
                continue
            pending = self._land(event.order)
            if event.kind == "died":
                lost.append(Lost(event.order, "died", self._spent(pending)))
            elif pending.update is not None:
                updates.append(pending.update)
                charges.append(pending.charges)
        if not (updates or lost) and until is None:
            raise RuntimeError(
                "the schedule waits for an answer but no order is under way; "
                "its alarm must give a time whenever nothing is flying"
            )
        if not updates:
            return Events(lost=tuple(lost))
        return Events(join(updates), join(charges), tuple(lost))

    def cancel(self, orders: tuple[int, ...], reason: str) -> tuple[Lost, ...]:
        self._clock.forget(set(orders))
        return tuple(Lost(o, reason, self._spent(self._land(o))) for o in orders)

    def save(self) -> Saved:
        return Saved(self._clock.copy(), dict(self._pending), dict(self._memories))

    def restore(self, saved: Saved) -> None:
        self._clock = saved.clock.copy()
        self._pending, self._memories = dict(saved.pending), dict(saved.memories)
        busy = [int(pending.order.device[0]) for pending in saved.pending.values()]
        self._free = ~np.isin(np.arange(self._task.devices), busy)

    def memory(self, device: int) -> Memory:
        """What a device keeps."""
        return self._memories.get(device, Memory())

    def _land(self, order_id: int) -> _Pending:
        pending = self._pending.pop(order_id)
        self._free[pending.order.device] = True
        return pending

    def _trained(self, order_id: int) -> None:
        if self._pending[order_id].update is None:
            self._execute()
        pending = self._pending[order_id]
        if pending.update is None or pending.memory is None:
            raise RuntimeError(f"the engine did not carry out order {order_id}")
        self._memories[int(pending.order.device[0])] = pending.memory
        up = self._world.conditions(pending.order.device, self.now()).up
        upload = pending.update.bits / up
        charges = replace(pending.charges, up=pending.update.bits, upload=upload)
        self._pending[order_id] = replace(pending, charges=charges)
        self._clock.at(self.now() + float(upload[0]), Event("arrived", order_id))

    def _execute(self) -> None:
        """Carries out everything that is under way and will get that far."""
        waiting = [(i, p) for i, p in self._pending.items() if p.update is None and not p.dies]
        orders = [pending.order for _, pending in waiting]
        memories = [self.memory(int(order.device[0])) for order in orders]
        done = self._engine.execute(orders, memories, self._task)
        for (order_id, pending), (update, memory) in zip(waiting, done, strict=True):
            self._pending[order_id] = replace(pending, update=update, memory=memory)

    def _flops(self, order: Orders) -> float:
        blueprint, slice_ = self._task.blueprint, order.slices[0]
        device = int(order.device[0])
        if order.kind == Kind.FETCH:
            return 0.0
        sample = cost(blueprint, slice_)
        samples = int(self._world.declared.samples[device])
        if order.kind not in (Kind.TRAIN, Kind.HOLD):
            evaluating = order.kind == Kind.EVALUATE
            count = len(self._task.own_test(device)) if evaluating else samples
            return float(sample.forward_flops * count)
        (limit,) = limits(order.numbers, [samples])
        batch = int(order.numbers.batch[0])
        count = processed(limit, samples, batch)
        return order.job.train.work(sample, cost(blueprint, slice_, batch), count).flops

    def _spent(self, pending: _Pending) -> Charges:
        """What an order has cost until now: the parts of it that time has reached."""
        left, planned = self.now() - pending.since, pending.charges
        spent, shares = {}, {}
        for name in ("download", "compute", "upload"):
            whole = float(getattr(planned, name)[0])
            spent[name] = np.array([min(whole, left)])
            shares[name] = spent[name] / whole if whole else np.zeros(1)
            left -= float(spent[name][0])
        return Charges(
            order=planned.order,
            flops=planned.flops * shares["compute"],
            down=planned.down * shares["download"],
            up=planned.up * shares["upload"],
            **spent,
        )


def _charges(order: Orders, *, flops: float, download: float, compute: float) -> Charges:
    """What is known of an order when it is submitted: all but the upload."""
    return Charges(
        order=order.id,
        flops=np.array([flops]),
        down=order.bits,
        up=np.zeros(1),
        download=np.array([download]),
        compute=np.array([compute]),
        upload=np.zeros(1),
    )
