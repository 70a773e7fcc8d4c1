"""What policies see of a run, and what a schedule may ask for."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from anyfleet.arrays import Flags, Ints
from anyfleet.core.check_in import MessageBits
from anyfleet.core.messages import Conditions, Devices, Kind, Params, Report
from anyfleet.core.time_and_energy import Demand
from anyfleet.elastic import Blueprint, Cost, Slice


@dataclass(frozen=True)
class Request:
    """What a schedule wants issued now. Without `devices` the method's selection names them."""

    kind: Kind = Kind.TRAIN
    count: int | None = None  # at most
    level: int | None = None  # only devices of this declared level
    devices: tuple[int, ...] | None = None
    held_orders: tuple[int, ...] = ()  # FETCH: the held orders; the selection names those to upload


@dataclass(frozen=True, eq=False)
class OrderStatus:
    """An order under way or answered, as policies see it: never its simulated future."""

    order: int
    device: int
    round_index: int
    kind: Kind
    report: Report = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class View:
    """All that a policy may see."""

    blueprint: Blueprint
    devices: Devices
    round_index: int
    now: float
    started: float  # when this step began
    free: Callable[[Ints], Flags]  # which of these could be asked now
    under_way: tuple[OrderStatus, ...]
    replied: tuple[OrderStatus, ...]
    failed: tuple[OrderStatus, ...]
    declined: tuple[OrderStatus, ...]  # a planner skipped them: they were never asked
    model: Params
    diagnostics: Mapping[str, Any]
    conditions: Callable[[Ints], Conditions]
    server_loss: Callable[[Params, Tensor], float]  # loss on a batch of the server split
    cost: Callable[[Slice, int], Cost]  # of a slice, for a batch of that many samples
    training_cost: Callable[[Slice, int, int, int], Demand]  # by batch, samples processed, steps
    message_bits: Callable[[Slice, float], MessageBits]  # at a sent fraction; NaN: not asked
    most_devices: int | None = None  # for a selection: more than so many will not be asked

    @cached_property
    def idle(self) -> Ints:
        """All devices that could be asked now. Looks at the whole fleet: `free` asks about few."""
        return np.flatnonzero(self.free(np.arange(len(self.devices))))

    def memory(self, slice_: Slice, batch: int | None) -> float:
        """Bytes to train a slice with such batches; without one, to have it at all."""
        if batch is None:
            return float(self.cost(slice_, 1).nbytes)
        return float(self.training_cost(slice_, batch, 0, 0).memory[0])

    def of_this_round(self, flights: Iterable[OrderStatus]) -> tuple[OrderStatus, ...]:
        """Those that were issued in this very step."""
        return tuple(flight for flight in flights if flight.round_index == self.round_index)
