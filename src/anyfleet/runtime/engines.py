"""How orders are carried out: one after the other, in threads with real bytes, or stacked."""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch

from anyfleet.client import work
from anyfleet.columns import join
from anyfleet.delivery import cut_update
from anyfleet.runtime.wire import decode_order, decode_update, encode_order, encode_update
from anyfleet.types import Kind, Memory, Orders, Task, Updates

Outcome = tuple[Updates, Memory]


class Engine(Protocol):
    """Carries out orders, one row each, and returns outcomes in the same order.

    `widths` tells how much of each answer comes through its link (METHODS §1.9); 1 is all.
    """

    def execute(
        self,
        orders: Sequence[Orders],
        memories: Sequence[Memory],
        widths: Sequence[float],
        task: Task,
    ) -> list[Outcome]: ...


@dataclass(frozen=True)
class Reference:
    """One device after the other: the plain path that the others must agree with."""

    def execute(
        self,
        orders: Sequence[Orders],
        memories: Sequence[Memory],
        widths: Sequence[float],
        task: Task,
    ) -> list[Outcome]:
        rows = zip(orders, memories, widths, strict=True)
        return [_single(order, memory, width, task) for order, memory, width in rows]


@dataclass(frozen=True)
class Threads:
    """Real threads; every order and every answer really becomes bytes and back.

    `allow` names the packages of the user's own parts, since orders name parts.
    """

    workers: int = 2
    allow: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"Threads.workers must be at least 1, got {self.workers}.")

    def execute(
        self,
        orders: Sequence[Orders],
        memories: Sequence[Memory],
        widths: Sequence[float],
        task: Task,
    ) -> list[Outcome]:
        def device(order: Orders, memory: Memory, width: float) -> Outcome:
            received = decode_order(encode_order(order, task), task, self.allow)
            update, kept = _single(received, memory, width, task)
            return decode_update(encode_update(update, received, task), order, task), kept

        # A new thread does not inherit the number of threads that torch was told to use.
        pin, count = torch.set_num_threads, torch.get_num_threads()
        with ThreadPoolExecutor(self.workers, initializer=pin, initargs=(count,)) as pool:
            return list(pool.map(device, orders, memories, widths))


@dataclass(frozen=True)
class Stacked:
    """Devices of equal slice shape together, under `torch.func.vmap`; at most `chunk` at once."""

    chunk: int = 64

    def __post_init__(self) -> None:
        if self.chunk < 1:
            raise ValueError(f"Stacked.chunk must be at least 1, got {self.chunk}.")

    def execute(
        self,
        orders: Sequence[Orders],
        memories: Sequence[Memory],
        widths: Sequence[float],
        task: Task,
    ) -> list[Outcome]:
        groups: dict[Hashable, list[int]] = defaultdict(list)
        for row, order in enumerate(orders):
            groups[_shape(order, row, task)].append(row)
        outcomes: dict[int, Outcome] = {}
        for rows in groups.values():
            for start in range(0, len(rows), self.chunk):
                part = rows[start : start + self.chunk]
                done = work(
                    join([orders[row] for row in part]),
                    tuple(memories[row] for row in part),
                    task,
                )
                for row, update, memory in zip(
                    part, done.updates.rows(), done.memories, strict=True
                ):
                    came = cut_update(update, orders[row], widths[row], task.blueprint)
                    outcomes[row] = came, memory
        return [outcomes[row] for row in range(len(orders))]


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


def _single(order: Orders, memory: Memory, width: float, task: Task) -> Outcome:
    done = work(order, (memory,), task)
    return cut_update(done.updates, order, width, task.blueprint), done.memories[0]
