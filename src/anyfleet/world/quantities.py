"""Numbers of a fleet: a plain number, a distribution, or a number that changes with time.

Nothing is stored. A number is a function of its key (which device, which field) and of the time,
so a fleet of a million devices costs nothing until somebody asks about a few of them.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from anyfleet.arrays import Floats


@dataclass(frozen=True)
class When:
    """A point in time: seconds since the start of the run, and the round under way."""

    now: float
    round_index: int


class Quantity(Protocol):
    """A number that each device has, and that may change with time."""

    @property
    def changes(self) -> bool:
        """True if time or a new round may change the number of a device."""

    def at(self, keys: Tensor, when: When) -> Floats:
        """Return one number for each key."""

    def until(self, when: When) -> float:
        """Return the second of the next change; infinity if only a new round changes it."""

    def bounds(self) -> tuple[float, float]:
        """Return the least and the largest number that `at` can return."""


class Distribution(Quantity, Protocol):
    """A quantity that is drawn once for each key, and then stays."""

    def draw(self, keys: Tensor) -> Floats:
        """Return one draw for each key."""


Number = float | Quantity

# What a physical number may be, in any unit that a fleet uses: far beyond every device there is,
# and such that products and quotients of a few of them stay finite, so that the clock does.
LEAST, MOST = 1e-9, 1e30


def at(number: Number, keys: Tensor, when: When) -> Floats:
    """Return the value of a number for each key."""
    if isinstance(number, int | float):
        return np.full(len(keys), float(number))
    return number.at(keys, when)


def until(number: Number, when: When) -> float:
    """Return the second at which time next changes a number, or infinity."""
    return math.inf if isinstance(number, int | float) else number.until(when)


def changes(number: Number) -> bool:
    """Return whether a number may change for the same device."""
    return False if isinstance(number, int | float) else number.changes


def bounds(number: Number) -> tuple[float, float]:
    """Return the least and the largest value that a number can have."""
    if isinstance(number, int | float):
        return float(number), float(number)
    return number.bounds()


def slot(when: When, every: float | None) -> int:
    """Return the index of the draw in force: the round, or the period of `every` seconds."""
    if every is None:
        return when.round_index
    count = math.floor(when.now / every)
    # The quotient may be rounded across a border, and the draw would end at or before now.
    if (count + 1) * every <= when.now:
        return count + 1
    return count - 1 if count * every > when.now else count


def slot_end(when: When, every: float | None) -> float:
    """Return the second at which the draw in force ends; infinity if a new round ends it."""
    return math.inf if every is None else (slot(when, every) + 1) * every
