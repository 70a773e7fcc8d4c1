"""The phases of orders (download, compute, upload), followed as bit rates and loads change.

All orders of a cohort are followed together, each from a moment of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import numpy as np

from anyfleet.arrays import Arrays, Floats, Ints, listed
from anyfleet.core.time_and_energy import transfer_joules, transfer_seconds
from anyfleet.world.quantities import Moments

# A link or a device that changes all the time must not keep the simulation busy for ever.
MOST_CHANGES = 10_000
# Sums of seconds round: a phase that is complete but for this share is complete.
ROUNDING = 1e-12


class SteadyCost(NamedTuple):
    """What whole phases would take if nothing changed; infinite seconds: they stand still."""

    seconds: Floats
    joules: Floats


class Progress(NamedTuple):
    """How far phases are."""

    seconds: Floats  # since each began
    done: Floats  # share of the work, 0 to 1
    joules: Floats  # spent so far


@dataclass(frozen=True, eq=False)
class Phases(Arrays):
    """One phase of each of many orders, from beginning to end, linear between its points.

    Points lie where the pace changes: [points, 3], in the order of `Progress`. Most phases have
    none between their beginning and their end.
    """

    seconds: Floats  # the length of each; infinite if it never ends
    joules: Floats  # of the whole phase
    changes: Ints  # how many points it has
    first: Ints  # where they begin
    points: Floats = listed("first")  # noqa: RUF009 - a field, as `dataclasses.field` makes it

    @classmethod
    def steady(cls, seconds: Floats, joules: Floats) -> "Phases":
        """Return phases whose pace does not change."""
        nothing = np.zeros(len(seconds), dtype=np.int64)
        return cls(seconds, joules, nothing, nothing, np.empty((0, 3)))

    def progress_at(self, seconds: Floats) -> Progress:
        """Return how far each phase is after so many seconds of its own."""
        passed = np.maximum(0.0, seconds)
        with np.errstate(invalid="ignore", divide="ignore"):
            done, joules = self._between(0, passed, (1, 2))
        over = seconds >= self.seconds
        return Progress(
            np.where(over, self.seconds, seconds),
            np.where(over, 1.0, done),
            np.where(over, self.joules, joules),
        )

    def seconds_for(self, joules: Floats) -> Floats:
        """Return when each phase has spent so many joules; they must not suffice for all of it."""
        with np.errstate(invalid="ignore", divide="ignore"):
            (seconds,) = self._between(2, joules, (0,))
        return seconds

    def _between(self, field: int, value: Floats, wanted: tuple[int, ...]) -> list[Floats]:
        """Return other fields of `Progress` where one of them has a value, row by row."""
        after = 1 + self._reached(field, value)
        one, two = self._points(after - 1), self._points(after)
        passed = (value - one[field]) / (two[field] - one[field])
        return [one[each] + passed * (two[each] - one[each]) for each in wanted]

    def _reached(self, field: int, value: Floats) -> Ints:
        """Return how many points of each phase lie at or before a value."""
        if not len(self.points):
            return np.zeros(len(self), dtype=np.int64)
        row, place = self._places()
        there = self.points[place, field] <= value[row]
        return np.bincount(row[there], minlength=len(self))

    def _places(self) -> tuple[Ints, Ints]:
        """Return the phase of every point, and its place among the points."""
        row = np.repeat(np.arange(len(self)), self.changes)
        before = np.cumsum(self.changes) - self.changes
        return row, np.arange(len(row)) + (self.first - before)[row]

    def _points(self, number: Ints) -> tuple[Floats, Floats, Floats]:
        """Return one point of each phase: its beginning, a change, or its end."""
        start, end = number <= 0, number > self.changes
        ends = self.seconds, np.ones(len(self)), self.joules
        inner = np.zeros((len(self), 3))
        middle = np.flatnonzero(~start & ~end)
        inner[middle] = self.points[self.first[middle] + number[middle] - 1]
        found = [np.where(end, last, inner[:, field]) for field, last in enumerate(ends)]
        return cast("tuple[Floats, Floats, Floats]", tuple(found))

    def pruned(self) -> "Phases":
        """Return the same phases without the points of others."""
        if self.changes.sum() == len(self.points):
            return self
        first = np.cumsum(self.changes) - self.changes
        return replace(self, first=first, points=self.points[self._places()[1]])


Cost = Callable[[Ints, Moments], SteadyCost]  # of these rows at their moments
Until = Callable[[Ints, Moments], Floats]  # the second at which each of these costs changes


def follow(start: Moments, cost: Cost, until: Until) -> Phases:
    """Return the phases that begin at `start`; `cost` applies at each time, until it changes."""
    count = len(start)
    seconds, done, joules = np.zeros(count), np.zeros(count), np.zeros(count)
    going, moments = np.arange(count), start
    rows: list[Ints] = []
    points: list[Floats] = []
    for _ in range(MOST_CHANGES):
        now, end = cost(going, moments), until(going, moments)
        if not rows and np.isinf(end).all():
            return Phases.steady(now.seconds, now.joules)
        left, room = 1.0 - done[going], end - moments.now
        with np.errstate(invalid="ignore", divide="ignore"):
            last = np.isinf(room) | (left * now.seconds <= room * (1 + ROUNDING))
            share = np.where(last, left, room / now.seconds)
            whole = seconds[going] + left * now.seconds
        # What a phase of no end has spent stays as it is: 0 joules each second.
        seconds[going] = np.where(last, whole, end - start.now[going])
        done[going] = np.where(last, 1.0, done[going] + share)
        joules[going] += share * now.joules
        going, more = going[~last], end[~last]
        if not len(going):
            break
        rows.append(going)
        points.append(np.stack([seconds[going], done[going], joules[going]], axis=1))
        moments = Moments(more, start.round_index[going])
    # What still goes on is carried on as it was on average so far.
    with np.errstate(invalid="ignore", divide="ignore"):
        some = done[going] > 0
        seconds[going] = np.where(some, seconds[going] / done[going], np.inf)
        joules[going] = np.where(some, joules[going] / done[going], joules[going])
    if not rows:
        return Phases.steady(seconds, joules)
    row = np.concatenate(rows)
    changes = np.bincount(row, minlength=count)
    ordered = np.concatenate(points)[np.argsort(row, kind="stable")]
    return Phases(seconds, joules, changes, np.cumsum(changes) - changes, ordered)


def transfer_cost(bits: Floats, bit_rate: Floats, watts: Floats) -> SteadyCost:
    """Return the cost of sending bits over links; seconds are infinite without a link."""
    seconds = transfer_seconds(bits, bit_rate)
    return SteadyCost(seconds, transfer_joules(seconds, watts))
