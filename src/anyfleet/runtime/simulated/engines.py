"""Engines: how orders are carried out, one by one, in threads with real bytes, or stacked."""

import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from anyfleet import rng
from anyfleet.arguments import checked
from anyfleet.arrays import Floats, Ints, join
from anyfleet.core.client import Finished, Mapper, Runner, carry_out
from anyfleet.core.delivery import columns_of, cut_replies
from anyfleet.core.device_states import DeviceStates, Remembered
from anyfleet.core.limits import Limits
from anyfleet.core.messages import TRAINING
from anyfleet.core.method import Job
from anyfleet.core.objectives import Task
from anyfleet.core.orders import Cohort, grid
from anyfleet.core.padding import unpaddable
from anyfleet.core.stacks import Replies, Stack
from anyfleet.errors import AnyfleetWarning, BadMessage
from anyfleet.runtime.simulated.captured_training import CapturedTraining, Precision
from anyfleet.runtime.simulated.stacking import side_by_side, stacks
from anyfleet.wire import cut_message, decode_order, encode_order, encode_reply, misfits
from anyfleet.wire.inbox import Inbox


@dataclass(frozen=True, eq=False)
class Assignment:
    """Orders for an engine, one row each, that share their kind and their job.

    Orders of several rounds may be joined if the trainer draws nothing for a whole cohort
    (`draws_together`).
    """

    orders: Cohort  # as the devices received them
    sent: Cohort  # as the server sent them
    upload_width: Floats  # of the model in the reply that crosses the link; 1: all


@dataclass(frozen=True, eq=False)
class Executed:
    """Orders that an engine carried out: their replies as they reached the server, row by row.

    What devices keep is `remembered`, to be committed when their training ends.
    """

    replies: Replies
    remembered: Remembered
    refused_by_server: Mapping[int, str] = field(default_factory=dict)  # by row: why it is no use
    refused_by_device: Mapping[int, str] = field(default_factory=dict)  # by row: why nothing came


class Executor(Protocol):
    """An engine at work in one run: it holds what lives from round to round."""

    def execute(self, given: Assignment, states: DeviceStates) -> Executed:
        """Return what came of orders, row by row."""
        ...


class Engine(Protocol):
    """What carries out orders and returns their replies."""

    def start(self, task: Task, limits: Limits) -> Executor:
        """Return what carries out the orders of one run."""
        ...

    def misfits(self, job: Job, limits: Limits) -> Mapping[str, str]:
        """Return why orders with this job cannot be carried out, by path inside the job."""
        return {}


# --- one device at a time -----------------------------------------------------------------------


@checked
@dataclass(frozen=True)
class Sequential(Engine):
    """The engine that trains one device after the other; the others must agree with it."""

    def start(self, task: Task, limits: Limits) -> Executor:
        return _OneByOne(task)


@checked
@dataclass(frozen=True)
class Workers(Engine):
    """The engine that trains devices side by side, each on one thread of the processor.

    `count` is the number of threads; 0: one for each core. Results are those of `Sequential` with
    one thread.
    """

    count: int = 0  # threads; 0: one for each core

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError(f"Workers.count must be at least 1, or 0 for all cores: {self.count}.")

    def start(self, task: Task, limits: Limits) -> Executor:
        return _OneByOne(task, _pool(self.count or cores(), 1))


class _OneByOne:
    """An engine that carries out each order alone, in the threads of a pool if there is one."""

    def __init__(self, task: Task, pool: ThreadPoolExecutor | None = None) -> None:
        self._task, self._pool = task, pool

    def execute(self, given: Assignment, states: DeviceStates) -> Executed:
        run, alone = (
            self._pool.map if self._pool else map,
            list(np.arange(len(given.orders))[:, None]),
        )
        done = carry_out(given.orders, states, self._task, stacks=alone, run=run)
        return _executed(given, done, self._task)


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _pool(workers: int, threads: int) -> ThreadPoolExecutor:
    """Return workers that use so many threads each inside an operator.

    A new thread does not inherit the number of threads that torch is set to.
    """
    return ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(threads,))


def _executed(given: Assignment, done: Finished, task: Task) -> Executed:
    """Return orders that were carried out as their replies reach the server."""
    cut = cut_replies(done.replies, given.orders, given.upload_width, task.blueprint)
    return Executed(cut, done.remembered)


# --- with bytes ---------------------------------------------------------------------------------


class PackedReply(NamedTuple):
    """A reply as bytes on the way to the server, and the device that sent it."""

    sender: int
    data: bytes


@checked
@dataclass(frozen=True)
class Threads(Engine):
    """The engine that trains in `workers` threads; orders and replies become real bytes and back.

    A link that loses columns cuts the bytes. Orders name parts, so `allow` must name the packages
    of the user's own parts.
    """

    workers: int = 2  # threads
    allow: tuple[str, ...] = ()  # packages whose parts orders may name

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"Threads.workers must be at least 1, got {self.workers}.")

    def start(self, task: Task, limits: Limits) -> Executor:
        return _WithBytes(self, task, limits)

    def misfits(self, job: Job, limits: Limits) -> Mapping[str, str]:
        return misfits(job, self.allow, limits)

    def transmit(self, replies: list[PackedReply]) -> Iterable[PackedReply]:
        """Return what the server receives; a subclass that models attacks overrides this."""
        return replies


class _WithBytes:
    """An engine that makes bytes of every message."""

    def __init__(self, engine: Threads, task: Task, limits: Limits) -> None:
        self._engine, self._task, self._limits = engine, task, limits
        self._pool = _pool(engine.workers, torch.get_num_threads())

    def execute(self, given: Assignment, states: DeviceStates) -> Executed:
        def on_device(row: int) -> "_OnDevice":
            return self._on_device(given, row, states)

        done = list(self._pool.map(on_device, range(len(given.orders))))
        inbox, sent = Inbox(self._task, self._limits), given.sent.rows()
        for order, each in zip(sent, done, strict=True):
            inbox.expect(order)
            if each.refused:
                inbox.close(int(order.id[0]))
        packed = [each.packed for each in done if each.packed is not None]
        received = _received(self._engine.transmit(packed), inbox)
        replies = [each.reply for each in done]
        refused: dict[int, str] = {}
        for row, each in enumerate(done):
            found = received.get(int(given.sent.device[row]))
            if isinstance(found, Replies):
                replies[row] = found
            elif not each.refused:
                refused[row] = f"{found.reason}: {found}" if found else "nothing came"
        return Executed(
            join(replies),
            join([each.remembered for each in done]),
            refused_by_server=refused,
            refused_by_device={row: each.refused for row, each in enumerate(done) if each.refused},
        )

    def _on_device(self, given: Assignment, row: int, states: DeviceStates) -> "_OnDevice":
        whole, task = given.sent.take([row]), self._task
        key = rng.fold(whole.key[0], "threads")
        down = float(given.orders.delivered_width[row])
        data = _through_link(encode_order(whole, task), whole, down, rng.fold(key, "down"))
        try:
            order = decode_order(data, task, self._engine.allow, self._limits)
        except BadMessage as error:
            reason = f"{error.reason}: {error}"
            return _OnDevice(_no_reply(whole), Remembered.of(whole), refused=reason)
        done = carry_out(order, states, task)
        data = encode_reply(done.replies, order, task)
        if order.job.send in done.replies.trees_of(0):
            up = float(given.upload_width[row])
            data = _through_link(data, order, up, rng.fold(key, "up"))
        packed = PackedReply(int(order.device[0]), data)
        return _OnDevice(done.replies, done.remembered, packed)


class _OnDevice(NamedTuple):
    """What one device made of an order that came as bytes."""

    reply: Replies
    remembered: Remembered
    packed: PackedReply | None = None
    refused: str = ""  # why the device did nothing and sent nothing, or ""


def _through_link(data: bytes, order: Cohort, width: float, key: Tensor) -> bytes:
    """Return the bytes of a message with a model that arrive, when `width` of the model does."""
    (came,) = columns_of(order, np.array([width]))
    return data if came == grid(order)[0] else cut_message(data, int(came), key)


def _received(packed: Iterable[PackedReply], inbox: Inbox) -> dict[int, Replies | BadMessage]:
    """Return by sender the reply that the inbox accepted, or why it accepted none."""
    found: dict[int, Replies | BadMessage] = {}
    for sender, data in packed:
        try:
            found[sender] = inbox.receive(data, sender)
        except BadMessage as error:
            found.setdefault(sender, error)
    return found


def _no_reply(order: Cohort) -> Replies:
    """Return an empty reply that stands for one that was never made."""
    (number,), (device,) = order.id, order.device
    return Replies.of_one(
        Stack(),
        order=int(number),
        device=int(device),
        samples=0,
        bits=0.0,
        delivered_width=0.0,
    )


# --- stacks -------------------------------------------------------------------------------------


@checked
@dataclass(frozen=True)
class Stacked(Engine):
    """The engine that trains devices of equal slice shape together under `torch.func.vmap`.

    At most `chunk` devices are in one stack; 0: as many as memory is predicted to hold. Stacks are
    trained in `workers` threads of the processor side by side. With `precision` "tf32" or "bf16" an
    accelerator multiplies with fewer digits; `compile` fuses the operators of a local step.
    """

    chunk: int = 0  # most devices in a stack; 0: as many as memory is predicted to hold
    workers: int = 1  # threads that train stacks side by side on a CPU
    precision: Precision = "float32"  # of products; tf32 on a GPU alone
    compile: bool = False  # whether local steps are compiled, on a GPU alone

    def __post_init__(self) -> None:
        if self.chunk < 0:
            raise ValueError(f"Stacked.chunk must be at least 1, or 0: {self.chunk}.")
        if self.workers < 1:
            raise ValueError(f"Stacked.workers must be at least 1, got {self.workers}.")

    def start(self, task: Task, limits: Limits) -> Executor:
        return Stacks(self, task)


class Stacks:
    """An engine that carries out orders stack by stack, on streams of a GPU if they are there."""

    def __init__(self, engine: Stacked, task: Task) -> None:
        self._engine, self._task = engine, task
        self._device = next(iter(task.params.values())).device
        self._pool = _pool(engine.workers, 1) if engine.workers > 1 else None
        self._streams = Streams(self._device)
        self._runner: Runner = CapturedTraining(engine.precision, compile=engine.compile)

    @cached_property
    def _chunk(self) -> int:
        """The most devices of a stack; found, and told if it is one, when the first are trained."""
        reason = unpaddable(self._task)
        if not reason:
            return self._engine.chunk
        warnings.warn(
            f"Stacked: devices are trained one at a time, since samples see each other: "
            f"{reason}. Choose engine Workers, which trains them side by side.",
            AnyfleetWarning,
            stacklevel=2,
        )
        return 1

    def execute(self, given: Assignment, states: DeviceStates) -> Executed:
        orders, task = given.orders, self._task
        if orders.kind not in TRAINING:
            alone: Mapper = self._pool.map if self._pool else map
            return _executed(given, carry_out(orders, states, task, run=alone), task)
        rows = self._rows(orders)
        run = self._mapper(orders, rows)
        done = carry_out(orders, states, task, self._runner, stacks=rows, run=run)
        return _executed(given, done, task)

    def _rows(self, orders: Cohort) -> list[Ints]:
        """Return the rows of every stack."""
        return stacks(orders, self._task, self._chunk, self._engine.workers)

    def _mapper(self, orders: Cohort, rows: list[Ints]) -> Mapper:
        """Return what begins stack after stack."""
        if self._device.type == "cuda":
            return partial(self._streams.map, side_by_side(orders, rows, self._task))
        return self._pool.map if self._pool else map


Begun = TypeVar("Begun")


class Streams:
    """Streams of a GPU on which small stacks, which leave it idle, are trained side by side."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: list[torch.cuda.Stream] = []

    def map(
        self, most: int, begun: Callable[[int], Begun], numbers: Iterable[int]
    ) -> Iterable[Begun]:
        """Begin stacks on at most so many streams, and return what has begun.

        Those of one stream follow each other, and use the same memory.
        """
        launched, current = [], torch.cuda.current_stream(self._device)
        for number in numbers:
            if number < most and number >= len(self._streams):
                made = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
                self._streams.append(made)
            stream = self._streams[number % most]
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                launched.append(begun(number))
        for stream in self._streams:
            current.wait_stream(stream)
        return launched
