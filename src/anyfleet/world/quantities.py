"""Numbers of a fleet: a value, a law that draws one for each device, or one that changes.

Nothing is stored: a number is a function of its key (which device, which column) and of the time,
so that a fleet of a million devices costs nothing until somebody asks about a few of them.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from anyfleet.arrays import Floats


@dataclass(frozen=True)
class When:
    """A moment: seconds since the start, and the server step that is under way."""

    now: float
    round_index: int


class Quantity(Protocol):
    """A number of each device, which may change with time."""

    @property
    def changes(self) -> bool:
        """Whether time or a new server step may make it another number."""

    def at(self, keys: Tensor, when: When) -> Floats:
        """One number for each key."""

    def until(self, when: When) -> float:
        """When time next changes it; infinity for what only a new server step changes."""

    def bounds(self) -> tuple[float, float]:
        """No number lies outside of these."""


class Law(Quantity, Protocol):
    """A distribution: one number for each key, whenever it is asked."""

    def draw(self, keys: Tensor) -> Floats: ...


Number = float | Quantity

# What a physical number may be, in any unit that a fleet uses: far beyond every device there is,
# and such that products and quotients of a few of them stay finite, so that the clock does.
LEAST, MOST = 1e-9, 1e30


def at(number: Number, keys: Tensor, when: When) -> Floats:
    """What a number is now, for each key."""
    if isinstance(number, int | float):
        return np.full(len(keys), float(number))
    return number.at(keys, when)


def until(number: Number, when: When) -> float:
    """When time next changes a number."""
    return math.inf if isinstance(number, int | float) else number.until(when)


def changes(number: Number) -> bool:
    """Whether a number may become another one for the same device."""
    return False if isinstance(number, int | float) else number.changes


def bounds(number: Number) -> tuple[float, float]:
    """The least and the largest a number can be."""
    if isinstance(number, int | float):
        return float(number), float(number)
    return number.bounds()


def slot(when: When, every: float | None) -> int:
    """Which draw of a law is in force: one for each server step, or one every so many seconds."""
    if every is None:
        return when.round_index
    count = math.floor(when.now / every)
    # The quotient may be rounded across a border, and the draw would end at or before now.
    if (count + 1) * every <= when.now:
        return count + 1
    return count - 1 if count * every > when.now else count


def slot_end(when: When, every: float | None) -> float:
    """When the draw in force ends."""
    return math.inf if every is None else (slot(when, every) + 1) * every
