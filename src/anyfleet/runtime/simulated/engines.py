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
from anyfleet.core.delivery import columns_of, cut_update
from anyfleet.core.limits import Limits
from anyfleet.core.messages import Kind, Memory, Updates
from anyfleet.core.method import Job
from anyfleet.core.objectives import Task
from anyfleet.core.orders import Orders, grid
from anyfleet.errors import BadMessage
from anyfleet.wire import decode_order, encode_order, encode_update, misfits, shortened
from anyfleet.wire.inbox import Inbox


class Assigned(NamedTuple):
    """An order for a device, and what decides what becomes of it."""

    asked: Orders  # as the server sent it
    order: Orders  # as it came through its link
    memory: Memory
    up: float = 1.0  # how much of the answer comes through (METHODS §1.9); 1 is all


class Outcome(NamedTuple):
    """An answer as it reached the server, what its device keeps, and why it is refused, if so."""

    update: Updates
    memory: Memory
    refused: str = ""
    unread: str = ""  # why the device refused the order: it did nothing, and sent nothing


class Engine(Protocol):
    """Carries out orders, one row each, and returns outcomes in the same order."""

    def execute(
        self, assigned: Sequence[Assigned], task: Task, limits: Limits
    ) -> list[Outcome]: ...

    def misfits(self, job: Job, limits: Limits) -> Mapping[str, str]:
        """Why orders with this job cannot be carried out, by path inside it."""
        return {}


@checked
@dataclass(frozen=True)
class Reference(Engine):
    """One device after the other: the plain path that the others must agree with."""

    def execute(self, assigned: Sequence[Assigned], task: Task, limits: Limits) -> list[Outcome]:
        return [_single(each, task) for each in assigned]


class Mail(NamedTuple):
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

    def execute(self, assigned: Sequence[Assigned], task: Task, limits: Limits) -> list[Outcome]:
        def device(each: Assigned) -> tuple[Outcome, Mail | None]:
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

    def carried(self, mail: list[Mail]) -> Iterable[Mail]:
        """What comes out of the network at the server's end; a hostile one overrides this."""
        return mail

    def _device(self, each: Assigned, task: Task, limits: Limits) -> tuple[Outcome, Mail | None]:
        key = rng.fold(each.asked.key[0], "threads")
        down, up = float(each.order.delivered[0]), each.up
        sent = _crossed(encode_order(each.asked, task), each.asked, down, rng.fold(key, "down"))
        try:
            order = decode_order(sent, task, self.allow, limits)
        except BadMessage as error:
            told = f"{error.reason}: {error}"
            return Outcome(_nothing(each.asked), each.memory, unread=told), None
        done = work(order, (each.memory,), task)
        answer = encode_update(done.updates, order, task)
        if order.job.send in done.updates.trees[0]:
            answer = _crossed(answer, order, up, rng.fold(key, "up"))
        mail = Mail(int(order.device[0]), answer)
        return Outcome(done.updates, done.memories[0]), mail


@checked
@dataclass(frozen=True)
class Stacked(Engine):
    """Devices of equal slice shape together, under `torch.func.vmap`; at most `chunk` at once."""

    chunk: int = 64

    def __post_init__(self) -> None:
        if self.chunk < 1:
            raise ValueError(f"Stacked.chunk must be at least 1, got {self.chunk}.")

    def execute(self, assigned: Sequence[Assigned], task: Task, limits: Limits) -> list[Outcome]:
        groups: dict[Hashable, list[int]] = defaultdict(list)
        for row, each in enumerate(assigned):
            groups[_shape(each.order, row, task)].append(row)
        outcomes: dict[int, Outcome] = {}
        for rows in groups.values():
            for start in range(0, len(rows), self.chunk):
                part = rows[start : start + self.chunk]
                done = self._stack([assigned[row] for row in part], task)
                outcomes |= dict(zip(part, done, strict=True))
        return [outcomes[row] for row in range(len(assigned))]

    def _stack(self, part: Sequence[Assigned], task: Task) -> list[Outcome]:
        memories = tuple(each.memory for each in part)
        done = work(join([each.order for each in part]), memories, task)
        rows = zip(part, done.updates.rows(), done.memories, strict=True)
        return [
            Outcome(cut_update(update, each.order, each.up, task.blueprint), memory)
            for each, update, memory in rows
        ]


def _shape(order: Orders, row: int, task: Task) -> Hashable:
    """Equal for orders that can be stacked."""
    if order.kind not in (Kind.TRAIN, Kind.HOLD):
        return row
    # A trainer that draws for the whole cohort makes that draw static: only its members share it.
    draws = order.job.train.choices(torch.tensor(order.cohort), 1) != (None,)
    drawn = (order.cohort, float(order.share[0])) if draws else None
    # Not by the shape alone: a model may hold constants along an axis that is cut.
    (slice_,) = order.slices
    # Columns lie where the slice lies.
    column = float(order.column[0])
    lanes = (column, slice_, float(order.share[0])) if column < 1 else None
    return order.kind, task.blueprint.local(slice_), slice_.first, order.job, drawn, lanes


def _single(each: Assigned, task: Task) -> Outcome:
    done = work(each.order, (each.memory,), task)
    update = cut_update(done.updates, each.order, each.up, task.blueprint)
    return Outcome(update, done.memories[0])


def _crossed(data: bytes, order: Orders, width: float, key: Tensor) -> bytes:
    """What a link leaves of a message with a model in it."""
    came = columns_of(order, width)
    return data if came == grid(order)[0] else shortened(data, came, key)


def _received(mail: Iterable[Mail], inbox: Inbox) -> dict[int, Updates | BadMessage]:
    """By sender, the answer that it got through, or why it got none through."""
    found: dict[int, Updates | BadMessage] = {}
    for sender, data in mail:
        try:
            found[sender] = inbox.receive(data, sender)
        except BadMessage as error:
            found.setdefault(sender, error)
    return found


def _nothing(order: Orders) -> Updates:
    """In the place of an answer that was never made."""
    return Updates(
        order=order.id,
        device=order.device,
        samples=np.zeros(1, dtype=np.int64),
        trees=({},),
        symbols=(None,),
        masks=({},),
        kept=({},),
        bits=np.zeros(1),
        delivered=np.zeros(1),
        report=({},),
    )


def _settled(outcome: Outcome, answers: dict[int, Updates | BadMessage]) -> Outcome:
    if outcome.unread:
        return outcome
    answer = answers.get(int(outcome.update.device[0]))
    if answer is None:
        return outcome._replace(refused="nothing came")
    if isinstance(answer, BadMessage):
        return outcome._replace(refused=f"{answer.reason}: {answer}")
    return outcome._replace(update=answer)
