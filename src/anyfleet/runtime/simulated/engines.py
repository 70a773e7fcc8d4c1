"""Engines: how orders are carried out, one by one, in threads with real bytes, or stacked."""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from anyfleet import rng
from anyfleet.arguments import checked
from anyfleet.arrays import join
from anyfleet.core.client import work
from anyfleet.core.delivery import columns_of, cut_reply
from anyfleet.core.device_state import DeviceState
from anyfleet.core.limits import Limits
from anyfleet.core.messages import Kind
from anyfleet.core.method import Job
from anyfleet.core.objectives import Task
from anyfleet.core.orders import Cohort, grid
from anyfleet.core.stacks import Replies, Stack
from anyfleet.errors import BadMessage
from anyfleet.wire import cut_message, decode_order, encode_order, encode_reply, misfits
from anyfleet.wire.inbox import Inbox


class EngineOrder(NamedTuple):
    """One order for an engine, with what the engine needs to carry it out."""

    sent_order: Cohort  # as the server sent it
    order: Cohort  # as the device received it
    state: DeviceState
    upload_width: float = 1.0  # width of the model in the reply that crosses the link; 1: all


class EngineReply(NamedTuple):
    """The reply to one order as it reached the server, and the state that its device keeps."""

    reply: Replies
    state: DeviceState
    refused_by_server: str = ""  # why the reply cannot be used, or ""
    refused_by_device: str = ""  # why the device did nothing and sent nothing, or ""


class Engine(Protocol):
    """What carries out orders and returns their replies."""

    def execute(
        self, orders: Sequence[EngineOrder], task: Task, limits: Limits
    ) -> list[EngineReply]:
        """Return one reply for each order, in the same order."""
        ...

    def misfits(self, job: Job, limits: Limits) -> Mapping[str, str]:
        """Return why orders with this job cannot be carried out, by path inside the job."""
        return {}


@checked
@dataclass(frozen=True)
class Sequential(Engine):
    """The engine that trains one device after the other; the others must agree with it."""

    def execute(
        self, orders: Sequence[EngineOrder], task: Task, limits: Limits
    ) -> list[EngineReply]:
        return [_execute_one(each, task) for each in orders]


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

    workers: int = 2
    allow: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"Threads.workers must be at least 1, got {self.workers}.")

    def execute(
        self, orders: Sequence[EngineOrder], task: Task, limits: Limits
    ) -> list[EngineReply]:
        def on_device(each: EngineOrder) -> tuple[EngineReply, PackedReply | None]:
            return self._on_device(each, task, limits)

        # A new thread does not inherit the number of threads that torch is set to.
        pin, count = torch.set_num_threads, torch.get_num_threads()
        with ThreadPoolExecutor(self.workers, initializer=pin, initargs=(count,)) as pool:
            done = list(pool.map(on_device, orders))
        inbox = Inbox(task, limits)
        for each, (reply, _) in zip(orders, done, strict=True):
            inbox.expect(each.sent_order)
            if reply.refused_by_device:
                inbox.close(int(each.sent_order.id[0]))
        received = _received(self.transmit([packed for _, packed in done if packed]), inbox)
        return [_as_received(reply, received) for reply, _ in done]

    def misfits(self, job: Job, limits: Limits) -> Mapping[str, str]:
        return misfits(job, self.allow, limits)

    def transmit(self, replies: list[PackedReply]) -> Iterable[PackedReply]:
        """Return what the server receives; a subclass that models attacks overrides this."""
        return replies

    def _on_device(
        self, each: EngineOrder, task: Task, limits: Limits
    ) -> tuple[EngineReply, PackedReply | None]:
        key = rng.fold(each.sent_order.key[0], "threads")
        whole, down = each.sent_order, float(each.order.delivered_width[0])
        data = _through_link(encode_order(whole, task), whole, down, rng.fold(key, "down"))
        try:
            order = decode_order(data, task, self.allow, limits)
        except BadMessage as error:
            reason = f"{error.reason}: {error}"
            return EngineReply(_no_reply(whole), each.state, refused_by_device=reason), None
        done = work(order, (each.state,), task)
        data = encode_reply(done.replies, order, task)
        if order.job.send in done.replies.trees_of(0):
            data = _through_link(data, order, each.upload_width, rng.fold(key, "up"))
        packed = PackedReply(int(order.device[0]), data)
        return EngineReply(done.replies, done.states[0]), packed


@checked
@dataclass(frozen=True)
class Stacked(Engine):
    """The engine that trains devices of equal slice shape together under `torch.func.vmap`.

    At most `chunk` devices are in one stack.
    """

    chunk: int = 64

    def __post_init__(self) -> None:
        if self.chunk < 1:
            raise ValueError(f"Stacked.chunk must be at least 1, got {self.chunk}.")

    def execute(
        self, orders: Sequence[EngineOrder], task: Task, limits: Limits
    ) -> list[EngineReply]:
        stackable: dict[Hashable, list[int]] = defaultdict(list)
        for row, each in enumerate(orders):
            stackable[_stack_key(each.order, row, task)].append(row)
        replies: dict[int, EngineReply] = {}
        for rows in stackable.values():
            for start in range(0, len(rows), self.chunk):
                chunk = rows[start : start + self.chunk]
                done = self._execute_stack([orders[row] for row in chunk], task)
                replies |= dict(zip(chunk, done, strict=True))
        return [replies[row] for row in range(len(orders))]

    def _execute_stack(self, stack: Sequence[EngineOrder], task: Task) -> list[EngineReply]:
        states = tuple(each.state for each in stack)
        done = work(join([each.order for each in stack]), states, task)
        rows = zip(stack, done.replies.rows(), done.states, strict=True)
        return [
            EngineReply(cut_reply(reply, each.order, each.upload_width, task.blueprint), state)
            for each, reply, state in rows
        ]


def _stack_key(order: Cohort, row: int, task: Task) -> Hashable:
    """Return a key that is equal for orders that can be stacked."""
    if order.kind not in (Kind.TRAIN, Kind.HOLD):
        return row
    # A trainer may draw once for the whole cohort: only orders with the same draw share a stack.
    draws = order.job.trainer.shared_draws(1, torch.tensor(order.cohort_key)) != (None,)
    drawn = (order.cohort_key, float(order.width[0])) if draws else None
    # The shape alone is not enough: a model may hold constants along an axis that is sliced.
    slice_ = order.slice_of(0)
    # Where columns begin depends on the slice and on the planned width.
    column_width = float(order.column_width[0])
    columns = (column_width, slice_, float(order.width[0])) if column_width < 1 else None
    return (
        order.kind,
        task.blueprint.local(slice_),
        slice_.first_trained_layer,
        order.job,
        drawn,
        columns,
    )


def _execute_one(each: EngineOrder, task: Task) -> EngineReply:
    done = work(each.order, (each.state,), task)
    reply = cut_reply(done.replies, each.order, each.upload_width, task.blueprint)
    return EngineReply(reply, done.states[0])


def _through_link(data: bytes, order: Cohort, width: float, key: Tensor) -> bytes:
    """Return the bytes of a message with a model that arrive, when `width` of the model does."""
    came = columns_of(order, width)
    return data if came == grid(order)[0] else cut_message(data, came, key)


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


def _as_received(reply: EngineReply, received: dict[int, Replies | BadMessage]) -> EngineReply:
    """Return the reply as the server received it, or with the reason why it is refused."""
    if reply.refused_by_device:
        return reply
    found = received.get(int(reply.reply.device[0]))
    if found is None:
        return reply._replace(refused_by_server="nothing came")
    if isinstance(found, BadMessage):
        return reply._replace(refused_by_server=f"{found.reason}: {found}")
    return reply._replace(reply=found)
