"""What policies see of a run, and what a schedule may ask for."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from anyfleet.arrays import Flags, Ints
from anyfleet.core.check_in import Traffic
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
    of: tuple[int, ...] = ()  # FETCH: the held orders; the selection names those to upload


@dataclass(frozen=True, eq=False)
class Flight:
    """An order under way or answered, as policies see it: never its simulated future."""

    order: int
    device: int
    step: int
    kind: Kind
    report: Report = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class View:
    """All that a policy may see."""

    blueprint: Blueprint
    devices: Devices
    step: int
    now: float
    started: float  # when this step began
    free: Callable[[Ints], Flags]  # which of these could be asked now
    flying: tuple[Flight, ...]
    arrived: tuple[Flight, ...]
    lost: tuple[Flight, ...]
    declined: tuple[Flight, ...]  # a planner skipped them: they were never asked
    model: Params
    notes: Mapping[str, Any]
    conditions: Callable[[Ints], Conditions]
    judge: Callable[[Params, Tensor], float]  # loss on a batch of the server split
    cost: Callable[[Slice, int], Cost]  # of a slice, for a batch of that many samples
    training: Callable[[Slice, int, int, int], Demand]  # by batch, samples processed, steps
    traffic: Callable[[Slice, float], Traffic]  # at a rate; 1: no particular one
    most: int | None = None  # for a selection: more than so many will not be asked

    @cached_property
    def idle(self) -> Ints:
        """All devices that could be asked now. Looks at the whole fleet: `free` asks about few."""
        return np.flatnonzero(self.free(np.arange(len(self.devices))))

    def memory(self, slice_: Slice, batch: int | None) -> float:
        """Bytes to train a slice with such batches; without one, to have it at all."""
        if batch is None:
            return float(self.cost(slice_, 1).nbytes)
        return float(self.training(slice_, batch, 0, 0).memory[0])

    def fresh(self, flights: Iterable[Flight]) -> tuple[Flight, ...]:
        """Those that were issued in this very step."""
        return tuple(flight for flight in flights if flight.step == self.step)
