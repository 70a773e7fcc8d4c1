"""What the parts of a method see of a run (`View`), and what a schedule asks for (`Request`).

All values are immutable. Orders are seen as arrays with one entry for each order
(`OrderStatuses`); iterating over them gives single orders (`OrderStatus`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from anyfleet.arrays import Arrays, Flags, Floats, Ints, join
from anyfleet.core.check_in import MessageBits
from anyfleet.core.messages import TRAINING, Conditions, Devices, Kind, Params, Report
from anyfleet.core.stacks import Reports
from anyfleet.core.time_and_energy import Demand
from anyfleet.elastic import Blueprint, Cost, Slice

Ids = Sequence[int] | Ints  # numbers of devices or of orders: an array, or any sequence of ints
Kinds = NDArray[np.str_]  # values of `Kind`

KIND = np.dtype(f"U{max(map(len, Kind))}")


@dataclass(frozen=True, eq=False)
class Request:
    """Orders that a schedule wants issued now, one for each device.

    Without `devices` the method's selection picks them: at most `count`, and only devices of
    `level`, if these are given. A request of kind FETCH names in `held_orders` the orders whose
    results wait on their devices; the selection picks those that are uploaded.
    """

    kind: Kind = Kind.TRAIN
    count: int | None = None  # of devices, at most
    level: int | None = None
    devices: Ids | None = None
    held_orders: Ids = ()


@dataclass(frozen=True, eq=False)
class OrderStatus:
    """One order as parts see it: what was asked and what was reported, never what will come."""

    order: int  # its number: orders are numbered as they are issued
    device: int
    round_index: int  # of the round that issued it
    kind: Kind
    report: Report = field(default_factory=dict)  # what the device measured; empty before a reply


@dataclass(frozen=True, eq=False)
class OrderStatuses(Arrays):
    """Orders as parts see them: arrays with one entry for each order, in the order of events.

    `len` counts them, and none is false: `if view.under_way`. `for status in statuses` gives
    each as an `OrderStatus`; `+` puts two together.
    """

    order: Ints  # numbers of the orders
    device: Ints
    round_index: Ints  # of the rounds that issued them
    kind: Kinds  # compare with members of Kind: `statuses.kind == Kind.TRAIN`
    reported: Reports  # `report` reads one number of all of them, `reports` has them one by one

    @classmethod
    def of(cls, statuses: Iterable[OrderStatus]) -> "OrderStatuses":
        """Return single orders as arrays."""
        given = tuple(statuses)
        return cls(
            order=np.array([each.order for each in given], dtype=np.int64),
            device=np.array([each.device for each in given], dtype=np.int64),
            round_index=np.array([each.round_index for each in given], dtype=np.int64),
            kind=np.array([each.kind for each in given], dtype=KIND),
            reported=Reports.of([each.report for each in given]),
        )

    @property
    def reports(self) -> tuple[Report, ...]:
        """The report of every order, as it came; empty before a reply."""
        return tuple(map(self.reported.report_of, range(len(self))))

    def __iter__(self) -> Iterator[OrderStatus]:
        """Yield every order by itself."""
        numbers = (self.order.tolist(), self.device.tolist(), self.round_index.tolist())
        rows = zip(*numbers, self.kind.tolist(), self.reports, strict=True)
        for order, device, round_index, kind, report in rows:
            yield OrderStatus(order, device, round_index, Kind(kind), report)

    def __add__(self, other: "OrderStatuses") -> "OrderStatuses":
        """Return these orders and then the others."""
        return join([self, other])

    def where(self, flags: Flags) -> "OrderStatuses":
        """Return the orders whose flag is True."""
        return self.take(np.flatnonzero(flags))

    def of_round(self, round_index: int) -> "OrderStatuses":
        """Return the orders that this round issued."""
        return self.where(self.round_index == round_index)

    def of_kind(self, *kinds: Kind) -> "OrderStatuses":
        """Return the orders of these kinds."""
        return self.where(np.isin(self.kind, kinds)) if len(self) else self

    @property
    def training(self) -> "OrderStatuses":
        """The orders to train, whether the result is sent at once or held on the device."""
        return self.of_kind(*TRAINING)

    def report(self, name: str) -> Floats:
        """Return the number that each device reported under this name; NaN where it did not."""
        return self.reported.number(name)


@dataclass(frozen=True, eq=False)
class View:
    """All that the server-side parts of a method may see of a run.

    `idle` are the numbers of the devices that could be asked now, `devices` is what the fleet
    declares of all of them (level, samples), `conditions(ids)` is what some of them would report
    at check-in (`Conditions`: speed, battery …). `round_index` and `now` (seconds) say when it is;
    `model` is the current model. `under_way`, `replied`, `failed` and `declined` are the orders
    (`OrderStatuses`); `diagnostics` is what the aggregator recorded in the last round.
    `server_loss(model, key)`, `cost(slice, batch_size)`, `message_bits(slice, sent_fraction)` and
    `memory` compute what a policy may ask before it decides.
    """

    blueprint: Blueprint
    devices: Devices  # what the fleet declared
    round_index: int
    now: float  # seconds since the start of the run
    started: float  # when this round began, likewise
    free: Callable[[Ints], Flags]  # of each of these devices, whether it could be asked now
    under_way: OrderStatuses  # issued, and neither replied to nor failed
    replied: OrderStatuses  # replies that will count in this round, unless a schedule defers them
    failed: OrderStatuses  # orders of which this round knows that no reply will count
    declined: OrderStatuses  # skipped by the plan or by the device itself: never sent
    model: Params
    diagnostics: Mapping[str, Any]  # of the last round
    conditions: Callable[[Ints], Conditions]  # what these devices would report at check-in
    free_memory: Callable[[Ints], Floats]  # the memory that they would report
    server_loss: Callable[[Params, Tensor], float]  # on a batch of the server split, drawn by a key
    cost: Callable[[Slice, int], Cost]  # of a slice, for a batch of that many samples
    training_cost: Callable[
        [Slice, int, int, int], Demand
    ]  # of a slice, by batch size, samples processed and local steps
    message_bits: Callable[[Slice, float], MessageBits]  # at a sent fraction; NaN: not asked
    most_devices: int | None = None  # a selection may return more; only this many are asked

    @cached_property
    def idle(self) -> Ints:
        """All devices that could be asked now; `free` looks at few of a large fleet."""
        return np.flatnonzero(self.free(np.arange(len(self.devices))))

    @cached_property
    def orders(self) -> OrderStatuses:
        """All orders that can be seen: under way, replied, failed and declined."""
        return join([self.under_way, self.replied, self.failed, self.declined])

    @cached_property
    def issued(self) -> OrderStatuses:
        """The training orders of this round, whatever became of them so far."""
        return self.orders.training.of_round(self.round_index)

    def memory(self, slice_: Slice, batch: int | None) -> float:
        """Return the bytes needed to train a slice with such batches; None: only to hold it."""
        if batch is None:
            return float(self.cost(slice_, 1).nbytes)
        return float(self.training_cost(slice_, batch, 0, 0).memory[0])
