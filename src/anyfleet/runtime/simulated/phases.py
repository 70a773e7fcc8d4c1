"""The phases of orders (download, compute, upload), followed as bit rates and loads change.

All orders of a cohort are followed together, each from a moment of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np

from anyfleet.arrays import Arrays, Flags, Floats, Ints, listed
from anyfleet.core.time_and_energy import transfer_joules, transfer_seconds
from anyfleet.world.quantities import Moments

# A link or a device that changes all the time must not keep the simulation busy for ever.
MOST_CHANGES = 10_000
# Pieces of a phase that are looked at together: further ones may never be reached.
AHEAD = 16
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
        return self.having(first=first, points=self.points[self._places()[1]])


Cost = Callable[[Ints, Moments], SteadyCost]  # of these rows at their moments
Until = Callable[[Ints, Moments], Floats]  # the second at which each of these costs changes


class Pieces(NamedTuple):
    """Times in which nothing changes, those of one row after those of the other."""

    row: Ints  # its place among the rows that were asked about
    place: Ints  # among the pieces of its row
    start: Moments
    end: Floats


def pieces(rows: Ints, start: Moments, until: Until, horizon: Floats, most: Ints) -> Pieces:
    """Return the pieces of each row from `start` to its horizon, but at most so many of them."""
    going, now = np.arange(len(rows)), start.now
    found = []
    while len(going):
        end = until(rows[going], Moments(now, start.round_index[going]))
        found.append((going, now, end))
        more = (end < horizon[going]) & (len(found) < most[going])
        going, now = going[more], end[more]
    row, begun, ends = map(np.concatenate, zip(*found, strict=True))
    place = np.repeat(np.arange(len(found)), [len(each) for each, _, _ in found])
    order = np.argsort(row, kind="stable")
    row = row[order]
    return Pieces(row, place[order], Moments(begun[order], start.round_index[row]), ends[order])


def follow(start: Moments, about: Floats, cost: Cost, until: Until) -> Phases:
    """Return the phases that begin at `start`; `cost` applies at each time, until it changes.

    `about` so many seconds are expected of each: that far changes are looked up together.
    """
    count = len(start)
    progress, ended = np.zeros((3, count)), np.zeros(count, dtype=bool)
    going, moments, changes = np.arange(count), start, np.zeros(count, dtype=np.int64)
    rows, points = [going[:0]], [np.empty((0, 3))]
    while len(going):
        most = np.minimum(AHEAD, MOST_CHANGES - changes[going])
        ahead = pieces(going, moments, until, moments.now + 1.5 * about, most)
        costs = cost(going[ahead.row], ahead.start)
        if len(rows) == 1 and np.isinf(ahead.end).all():
            return Phases.steady(*costs)
        found = _walk(ahead, costs, start.now[going], progress[:, going])
        ends, here = found.last.any(axis=1), np.bincount(ahead.row)
        passed = np.where(ends, found.last.argmax(axis=1), here)
        rows.append(np.repeat(going, passed))
        points.append(found.after[:, np.arange(here.max()) < passed[:, None]].T)
        # Some end within a piece; the others are as far as their last one goes.
        at = np.arange(len(going)), passed - ~ends
        progress[:, going] = np.where(ends, found.whole[:, *at], found.after[:, *at])
        changes[going] += passed
        ended[going] = ends
        more = np.flatnonzero(~ends & (changes[going] < MOST_CHANGES))
        latest, going = (np.cumsum(here) - 1)[more], going[more]
        about = costs.seconds[latest] * (1.0 - progress[1, going])
        moments = Moments(ahead.end[latest], start.round_index[going])
    if not ended.all():
        # What still goes on is carried on as it was on average so far.
        seconds, done, joules = progress[:, ~ended]
        with np.errstate(invalid="ignore", divide="ignore"):
            progress[0, ~ended] = np.where(done > 0, seconds / done, np.inf)
            progress[2, ~ended] = np.where(done > 0, joules / done, joules)
    order = np.argsort(np.concatenate(rows), kind="stable")
    first = np.cumsum(changes) - changes
    return Phases(progress[0], progress[2], changes, first, np.concatenate(points)[order])


class _Walk(NamedTuple):
    """How far phases are, piece by piece: [rows, pieces], before that in the order of `Progress`.

    Beyond the last piece of a row there is NaN.
    """

    after: Floats  # at the end of a piece
    whole: Floats  # at the end of the phase, if it lies within the piece
    last: Flags  # whether it does, or would if the phase had not ended before


def _walk(ahead: Pieces, costs: SteadyCost, start: Floats, before: Floats) -> _Walk:
    """Return how far phases are that began at `start` and have come so far `before`."""
    table = np.full((4, len(start), ahead.place.max() + 1), np.nan)
    table[:, ahead.row, ahead.place] = ahead.start.now, ahead.end, *costs
    begun, end, seconds, joules = table
    with np.errstate(invalid="ignore", divide="ignore"):
        room = end - begun
        share = room / seconds
        # What a phase of no end has spent stays as it is: 0 joules each second.
        after = np.stack([end - start[:, None], share, share * joules])
        after[1:, :, 0] += before[1:]
        after[1:] = np.cumsum(after[1:], axis=2)
        earlier = np.concatenate([before[:, :, None], after[:, :, :-1]], axis=2)
        left = 1.0 - earlier[1]
        last = np.isinf(room) | (left * seconds <= room * (1 + ROUNDING))
        whole = earlier + left * np.stack([seconds, np.ones_like(left), joules])
    return _Walk(after, whole, last)


def transfer_cost(bits: Floats, bit_rate: Floats, watts: Floats) -> SteadyCost:
    """Return the cost of sending bits over links; seconds are infinite without a link."""
    seconds = transfer_seconds(bits, bit_rate)
    return SteadyCost(seconds, transfer_joules(seconds, watts))
