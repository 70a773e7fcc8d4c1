"""Numbers of a fleet: a plain number, a distribution, or a number that changes with time.

No number is stored. It is a function of its key (which device, which field) and of the time, so a
fleet of a million devices costs no more than their keys, for fields that somebody asks about.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anyfleet.arrays import Arrays, Floats, Ints


@dataclass(frozen=True)
class When:
    """A point in time: seconds since the start of the run, and the round under way."""

    now: float
    round_index: int


@dataclass(frozen=True, eq=False)
class Moments(Arrays):
    """Points in time, one for each of many devices."""

    now: Floats
    round_index: Ints

    def distinct(self) -> list[tuple[When, Ints]]:
        """Return each distinct point in time with its rows."""
        pairs = np.stack([self.now, self.round_index.astype(np.float64)])
        found, which = np.unique(pairs, axis=1, return_inverse=True)
        return [
            (When(now, int(round_index)), np.flatnonzero(which.ravel() == number))
            for number, (now, round_index) in enumerate(found.T.tolist())
        ]


Time = When | Moments  # one point in time for all devices, or one for each
Seconds = float | Floats


class TakesMoments:
    """A part of a world whose functions take `Moments` too.

    A part of a user's own need not: it is asked once for each distinct point in time.
    """


class Changing(Protocol):
    """A part of a world that changes with time."""

    def until(self, when: When) -> Seconds:
        """Return the second of the next change; infinity if only a new round changes it."""


class Quantity(Protocol):
    """A number that each device has, and that may change with time."""

    @property
    def changes(self) -> bool:
        """True if time or a new round may change the number of a device."""

    def at(self, keys: Tensor, when: When) -> Floats:
        """Return one number for each key."""

    def until(self, when: When) -> Seconds:
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


_T = TypeVar("_T", bound=np.generic)


Rows = Ints | slice  # of an array: a slice where that is all of them, which costs nothing
ALL = slice(None)


def ask(part: object, when: Time, call: Callable[[When, Rows], NDArray[_T]]) -> NDArray[_T]:
    """Return what a part answers: `call` takes a time, and the rows it is for."""
    if isinstance(when, When) or isinstance(part, TakesMoments):
        return call(cast("When", when), ALL)
    distinct = when.distinct()
    answers = np.concatenate([call(moment, rows) for moment, rows in distinct])
    found = np.empty_like(answers)
    found[np.concatenate([rows for _, rows in distinct])] = answers
    return found


def of_rows(when: Time, rows: Rows) -> Time:
    """Return the points in time of these rows."""
    return when if isinstance(when, When) or isinstance(rows, slice) else when.take(rows)


def some(keys: Tensor, rows: Rows) -> Tensor:
    """Return the keys of these rows."""
    # Torch is slow with an index that is a NumPy array.
    return keys if isinstance(rows, slice) else keys[torch.from_numpy(rows)]


def at(number: Number, keys: Tensor, when: Time) -> Floats:
    """Return the value of a number for each key."""
    if isinstance(number, int | float):
        return np.full(len(keys), float(number))
    quantity = number
    return ask(number, when, lambda moment, rows: quantity.at(some(keys, rows), moment))


def until(number: float | Changing, when: Time) -> Seconds:
    """Return the second at which time next changes a number or a part, or infinity."""
    if isinstance(number, int | float):
        return math.inf
    if isinstance(when, When) or isinstance(number, TakesMoments):
        return number.until(cast("When", when))
    part, now = number, when.now
    return ask(part, when, lambda moment, rows: np.full(len(now[rows]), part.until(moment)))


def changes(number: Number) -> bool:
    """Return whether a number may change for the same device."""
    return False if isinstance(number, int | float) else number.changes


def bounds(number: Number) -> tuple[float, float]:
    """Return the least and the largest value that a number can have."""
    if isinstance(number, int | float):
        return float(number), float(number)
    return number.bounds()


def slot(when: Time, every: float | None) -> int | Tensor:
    """Return the index of the draw in force: the round, or the period of `every` seconds."""
    if isinstance(when, Moments):
        index = when.round_index if every is None else _periods(when.now, every).astype(np.int64)
        return torch.from_numpy(index)
    return when.round_index if every is None else int(_periods(when.now, every))


def slot_end(when: Time, every: float | None) -> Seconds:
    """Return the second at which the draw in force ends; infinity if a new round ends it."""
    if every is None:
        return math.inf
    end = (_periods(when.now, every) + 1) * every
    return end if isinstance(when, Moments) else float(end)


def _periods(now: Seconds, every: float) -> Floats:
    """Return how many periods have passed, each of `every` seconds."""
    count: Floats = np.floor(np.divide(now, every))
    # The quotient may be rounded across a border, and the draw would end at or before now.
    count += (count + 1) * every <= now
    count -= count * every > now
    return count
