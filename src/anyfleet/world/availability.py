"""When devices can be reached."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anyfleet import rng
from anyfleet.arguments import checked
from anyfleet.errors import refuse
from anyfleet.world.processes import period_faults
from anyfleet.world.quantities import (
    LEAST,
    MOST,
    Seconds,
    TakesMoments,
    Time,
    When,
    slot,
    slot_end,
)

__all__ = ["Always", "Availability", "Diurnal", "Intermittent"]

Booleans = NDArray[np.bool_]

# Devices decided at a time: intermediate results stay in the processor's cache.
_BLOCK = 1 << 15


class Availability(Protocol):
    """The rule that says when a device can be reached."""

    def online(self, keys: Tensor, when: When) -> Booleans:
        """Return for each key whether its device can be reached."""

    def until(self, when: When) -> Seconds:
        """Return the second of the next possible change; infinity if only a new round brings it."""


@checked
@dataclass(frozen=True)
class Always(TakesMoments):
    """Devices that can always be reached."""

    def online(self, keys: Tensor, when: Time) -> Booleans:
        return np.ones(len(keys), dtype=np.bool_)

    def until(self, when: Time) -> Seconds:
        return math.inf


@checked
@dataclass(frozen=True)
class Intermittent(TakesMoments):
    """A random `share` of all devices, drawn anew in each round, or every `every` seconds."""

    share: float
    every: float | None = None  # seconds between draws; none: each round

    def __post_init__(self) -> None:
        refuse(self._faults())

    def _faults(self) -> Iterator[str]:
        if not 0 < self.share <= 1:
            yield f"Intermittent.share must lie in (0, 1], got {self.share}."
        yield from period_faults("Intermittent", self.every)

    def online(self, keys: Tensor, when: Time) -> Booleans:
        now = slot(when, self.every)
        return _in_blocks(keys, now, lambda block, now: _chance(block, now) < self.share)

    def until(self, when: Time) -> Seconds:
        return slot_end(when, self.every)


@checked
@dataclass(frozen=True)
class Diurnal(TakesMoments):
    """Devices that are online at their own time of day.

    The probability is `mean` + `swing` · cos(2π (time / `period` - phase)), cut to [0, 1], at the
    start of each slot of `every` seconds. A device draws anew in each slot. Its phase, the time at
    which it is online most, is uniform within a `spread` of the day. With spread 0 all devices
    live in one time zone, and their best hour is the start of the run. With spread 1 the fleet as
    a whole has no time of day. The average over a day is the mean unless the probability is cut.
    """

    mean: float = 0.5
    swing: float = 0.4
    period: float = 86_400.0
    every: float = 600.0
    spread: float = 1.0

    def __post_init__(self) -> None:
        refuse(self._faults())

    def _faults(self) -> Iterator[str]:
        for name, value in (("mean", self.mean), ("swing", self.swing), ("spread", self.spread)):
            if not 0 <= value <= 1:
                yield f"Diurnal.{name} must lie in [0, 1], got {value}."
        if self.mean == self.swing == 0:
            yield (
                "Diurnal.mean and Diurnal.swing are both 0: no device is ever online. Raise one "
                "of them."
            )
        if not LEAST <= self.period <= MOST:
            yield (
                f"Diurnal.period must be a positive number of seconds, from {LEAST:g} to "
                f"{MOST:g}; got {self.period}."
            )
        yield from period_faults("Diurnal", self.every)

    def online(self, keys: Tensor, when: Time) -> Booleans:
        def decide(block: Tensor, now: int | Tensor) -> Tensor:
            hour = torch.as_tensor(now).double() * self.every / self.period
            phase = self.spread * _chance(block, "phase")
            likely = self.mean + self.swing * torch.cos(2 * math.pi * (hour - phase))
            # No cut to [0, 1] is needed: the draw is never below 0 and always below 1.
            return _chance(block, now) < likely

        return _in_blocks(keys, slot(when, self.every), decide)

    def until(self, when: Time) -> Seconds:
        return slot_end(when, self.every)


def _chance(keys: Tensor, address: int | str | Tensor) -> Tensor:
    return rng.uniforms(rng.fold(keys, address), 1)[:, 0]


def _in_blocks(
    keys: Tensor, now: int | Tensor, decide: Callable[[Tensor, int | Tensor], Tensor]
) -> Booleans:
    """Return `decide` for all keys, block by block, so that a large fleet needs little memory."""
    if len(keys) <= _BLOCK:
        return np.asarray(decide(keys, now))
    blocks = torch.split(keys, _BLOCK)
    slots = torch.split(now, _BLOCK) if isinstance(now, Tensor) else [now] * len(blocks)
    online: Booleans = torch.cat([*map(decide, blocks, slots)]).numpy()
    return online
