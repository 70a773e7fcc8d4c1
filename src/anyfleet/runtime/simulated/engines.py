"""How orders are carried out: one after the other, in threads with real bytes, or stacked."""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from anyfleet import rng
from anyfleet.arguments import checked
from anyfleet.arrays import join
from anyfleet.core.client import work
from anyfleet.core.delivery import columns_of, cut_reply
from anyfleet.core.limits import Limits
from anyfleet.core.messages import DeviceState, Kind, Replies
from anyfleet.core.method import Job
from anyfleet.core.objectives import Task
from anyfleet.core.orders import Cohort, grid
from anyfleet.errors import BadMessage
from anyfleet.wire import cut_message, decode_order, encode_order, encode_reply, misfits
from anyfleet.wire.inbox import Inbox


class EngineOrder(NamedTuple):
    """An order for a device, and what decides what becomes of it."""

    asked: Cohort  # as the server sent it
    order: Cohort  # as it came through its link
    state: DeviceState
    up: float = 1.0  # how much of the answer comes through (specification §1.9); 1 is all


class EngineReply(NamedTuple):
    """An answer as it reached the server, what its device keeps, and why it is refused, if so."""

    reply: Replies
    state: DeviceState
    refused: str = ""
    unread: str = ""  # why the device refused the order: it did nothing, and sent nothing


class Engine(Protocol):
    """Carries out orders, one row each, and returns outcomes in the same order."""

    def execute(
        self, assigned: Sequence[EngineOrder], task: Task, limits: Limits
    ) -> list[EngineReply]: ...

    def misfits(self, job: Job, limits: Limits) -> Mapping[str, str]:
        """Why orders with this job cannot be carried out, by path inside it."""
        return {}


@checked
@dataclass(frozen=True)
class Sequential(Engine):
    """One device after the other: the plain path that the others must agree with."""

    def execute(
        self, assigned: Sequence[EngineOrder], task: Task, limits: Limits
    ) -> list[EngineReply]:
        return [_single(each, task) for each in assigned]


class PackedReply(NamedTuple):
    """Bytes on their way to the server, and who sent them."""

    sender: int
    data: bytes


@checked
@dataclass(frozen=True)
class Threads(Engine):
    """Real threads; every order and every answer really becomes bytes and back.

    A link that fails really cuts the bytes. `allow` names the packages of the user's own parts,
    since orders name parts.
    """

    workers: int = 2
    allow: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"Threads.workers must be at least 1, got {self.workers}.")

    def execute(
        self, assigned: Sequence[EngineOrder], task: Task, limits: Limits
    ) -> list[EngineReply]:
        def device(each: EngineOrder) -> tuple[EngineReply, PackedReply | None]:
            return self._device(each, task, limits)

        # A new thread does not inherit the number of threads that torch was told to use.
        pin, count = torch.set_num_threads, torch.get_num_threads()
        with ThreadPoolExecutor(self.workers, initializer=pin, initargs=(count,)) as pool:
            done = list(pool.map(device, assigned))
        inbox = Inbox(task, limits)
        for each, (outcome, _) in zip(assigned, done, strict=True):
            inbox.expect(each.asked)
            if outcome.unread:
                inbox.close(int(each.asked.id[0]))
        answers = _received(self.carried([mail for _, mail in done if mail]), inbox)
        return [_settled(outcome, answers) for outcome, _ in done]

    def misfits(self, job: Job, limits: Limits) -> Mapping[str, str]:
        return misfits(job, self.allow, limits)

    def carried(self, mail: list[PackedReply]) -> Iterable[PackedReply]:
        """What comes out of the network at the server's end; a hostile one overrides this."""
        return mail

    def _device(
        self, each: EngineOrder, task: Task, limits: Limits
    ) -> tuple[EngineReply, PackedReply | None]:
        key = rng.fold(each.asked.key[0], "threads")
        down, up = float(each.order.delivered_width[0]), each.up
        sent = _crossed(encode_order(each.asked, task), each.asked, down, rng.fold(key, "down"))
        try:
            order = decode_order(sent, task, self.allow, limits)
        except BadMessage as error:
            told = f"{error.reason}: {error}"
            return EngineReply(_nothing(each.asked), each.state, unread=told), None
        done = work(order, (each.state,), task)
        answer = encode_reply(done.replies, order, task)
        if order.job.send in done.replies.trees[0]:
            answer = _crossed(answer, order, up, rng.fold(key, "up"))
        mail = PackedReply(int(order.device[0]), answer)
        return EngineReply(done.replies, done.states[0]), mail


@checked
@dataclass(frozen=True)
class Stacked(Engine):
    """Devices of equal slice shape together, under `torch.func.vmap`; at most `chunk` at once."""

    chunk: int = 64

    def __post_init__(self) -> None:
        if self.chunk < 1:
            raise ValueError(f"Stacked.chunk must be at least 1, got {self.chunk}.")

    def execute(
        self, assigned: Sequence[EngineOrder], task: Task, limits: Limits
    ) -> list[EngineReply]:
        groups: dict[Hashable, list[int]] = defaultdict(list)
        for row, each in enumerate(assigned):
            groups[_shape(each.order, row, task)].append(row)
        outcomes: dict[int, EngineReply] = {}
        for rows in groups.values():
            for start in range(0, len(rows), self.chunk):
                part = rows[start : start + self.chunk]
                done = self._stack([assigned[row] for row in part], task)
                outcomes |= dict(zip(part, done, strict=True))
        return [outcomes[row] for row in range(len(assigned))]

    def _stack(self, part: Sequence[EngineOrder], task: Task) -> list[EngineReply]:
        memories = tuple(each.state for each in part)
        done = work(join([each.order for each in part]), memories, task)
        rows = zip(part, done.replies.rows(), done.states, strict=True)
        return [
            EngineReply(cut_reply(update, each.order, each.up, task.blueprint), memory)
            for each, update, memory in rows
        ]


def _shape(order: Cohort, row: int, task: Task) -> Hashable:
    """Equal for orders that can be stacked."""
    if order.kind not in (Kind.TRAIN, Kind.HOLD):
        return row
    # A trainer that draws for the whole cohort makes that draw static: only its members share it.
    draws = order.job.train.shared_draws(torch.tensor(order.cohort_key), 1) != (None,)
    drawn = (order.cohort_key, float(order.width[0])) if draws else None
    # Not by the shape alone: a model may hold constants along an axis that is cut.
    (slice_,) = order.slices
    # Columns lie where the slice lies.
    column = float(order.column_width[0])
    lanes = (column, slice_, float(order.width[0])) if column < 1 else None
    return (
        order.kind,
        task.blueprint.local(slice_),
        slice_.first_trained_layer,
        order.job,
        drawn,
        lanes,
    )


def _single(each: EngineOrder, task: Task) -> EngineReply:
    done = work(each.order, (each.state,), task)
    update = cut_reply(done.replies, each.order, each.up, task.blueprint)
    return EngineReply(update, done.states[0])


def _crossed(data: bytes, order: Cohort, width: float, key: Tensor) -> bytes:
    """What a link leaves of a message with a model in it."""
    came = columns_of(order, width)
    return data if came == grid(order)[0] else cut_message(data, came, key)


def _received(mail: Iterable[PackedReply], inbox: Inbox) -> dict[int, Replies | BadMessage]:
    """By sender, the answer that it got through, or why it got none through."""
    found: dict[int, Replies | BadMessage] = {}
    for sender, data in mail:
        try:
            found[sender] = inbox.receive(data, sender)
        except BadMessage as error:
            found.setdefault(sender, error)
    return found


def _nothing(order: Cohort) -> Replies:
    """In the place of an answer that was never made."""
    return Replies(
        order=order.id,
        device=order.device,
        samples=np.zeros(1, dtype=np.int64),
        trees=({},),
        symbols=(None,),
        masks=({},),
        kept=({},),
        bits=np.zeros(1),
        delivered_width=np.zeros(1),
        report=({},),
    )


def _settled(outcome: EngineReply, answers: dict[int, Replies | BadMessage]) -> EngineReply:
    if outcome.unread:
        return outcome
    answer = answers.get(int(outcome.reply.device[0]))
    if answer is None:
        return outcome._replace(refused="nothing came")
    if isinstance(answer, BadMessage):
        return outcome._replace(refused=f"{answer.reason}: {answer}")
    return outcome._replace(reply=answer)
