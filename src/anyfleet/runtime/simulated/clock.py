"""Virtual time: which events of the orders under way come next.

Every order has two events. Its training ends, at a time known from the beginning; then it ends
itself, with a reply or a failure. An order that fails before its training ends has only the second.
Events at the same time come in the sequence in which they were scheduled: the first event of an
order when it is submitted, the end of a trained order when its training ends.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from anyfleet.arrays import Arrays, Flags, Floats, Ints


@dataclass(frozen=True, eq=False)
class Events(Arrays):
    """The next event of each order under way."""

    training: Flags  # whether its training has yet to end
    trained: Floats  # the second at which it does; any for other orders
    ends: Floats  # the second at which the order ends; infinite while that is not known
    sequence: Ints  # of the next event


class Passed(NamedTuple):
    """What happens while the clock goes on to `now`."""

    now: float
    trained: Ints  # rows whose training ends, in this order
    ended: Ints  # rows whose orders end, in this order


@dataclass(frozen=True)
class Clock:
    """A clock that jumps from event to event."""

    now: float = 0.0
    sequence: int = 0  # of the next event that is scheduled

    def scheduled(self, times: Floats) -> "tuple[Clock, Ints]":
        """Return the numbers of new events at these times; raise ValueError if one has passed."""
        if len(times) and times.min() < self.now:
            raise ValueError(f"cannot schedule an event at {times.min()}: it is already {self.now}")
        after = replace(self, sequence=self.sequence + len(times))
        return after, np.arange(self.sequence, after.sequence)

    def due(self, events: Events, until: float | None, enough: int) -> Flags:
        """Return whose training may end before there are `enough` ends: all, or none of them.

        The ends of these must be known before the clock goes on.
        """
        last = math.inf if until is None else until
        ending = np.flatnonzero(~events.training)
        ending = ending[_in_sequence(events.ends[ending], events.sequence[ending])]
        if len(ending) >= enough:
            bound = ending[enough - 1]
            before = _before(events, events.ends[bound], events.sequence[bound])
        else:
            before = np.ones(len(events), dtype=bool)
        return events.training & before & (events.trained <= last)

    def passed(self, events: Events, until: float | None, enough: int) -> Passed:
        """Return what happens until `enough` orders have ended, or until a time."""
        last = math.inf if until is None else until
        waiting = np.flatnonzero(events.training)
        waiting = waiting[_in_sequence(events.trained[waiting], events.sequence[waiting])]
        # Ends of training schedule the ends of their orders, one after the other.
        sequence = events.sequence.copy()
        sequence[waiting] = self.sequence + np.arange(len(waiting))
        known = np.flatnonzero(~events.training | (events.trained <= last))
        known = known[events.ends[known] <= last]
        ended = known[_in_sequence(events.ends[known], sequence[known])][:enough]
        if len(ended) == enough:
            now = events.ends[ended[-1]]
            trained = _before(events, now, sequence[ended[-1]])[waiting]
        else:
            trained = events.trained[waiting] <= last
            now = events.ends[ended[-1]] if len(ended) else self.now
            now = now if until is None else max(self.now, until)
        # A NumPy number would spread into everything that is added to it, and be printed as such.
        return Passed(float(now), waiting[trained], ended)


def _in_sequence(times: Floats, sequence: Ints) -> Ints:
    """Return the rows in the order of their times; ties go to the event scheduled first."""
    return np.lexsort((sequence, times))


def _before(events: Events, time: float, sequence: int) -> Flags:
    """Return whose training ends before an event at this time, with this number."""
    same: Flags = (events.trained == time) & (events.sequence < sequence)
    return same | (events.trained < time)
