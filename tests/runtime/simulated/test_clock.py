"""Virtual time: events come as from a heap of (time, sequence)."""

import heapq
import math
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyfleet.runtime.simulated.clock import Clock, Events, Passed


def events(*rows: tuple[float | None, float], first: int = 0) -> Events:
    """Of each order the second at which its training ends, if it does, and that of its end."""
    trained, ends = zip(*rows, strict=True)
    return Events(
        training=np.array([each is not None for each in trained]),
        trained=np.array([math.inf if each is None else each for each in trained]),
        ends=np.array(ends, dtype=np.float64),
        sequence=first + np.arange(len(rows)),
    )


class Popped(NamedTuple):
    now: float
    trained: list[int]
    ended: list[int]


def by_heap(given: Events, clock: Clock, until: float | None, enough: int) -> Popped:
    """Return what a heap of single events gives: the reference."""
    heap = [
        (float(given.trained[i] if given.training[i] else given.ends[i]), int(s), i, t)
        for i, (s, t) in enumerate(zip(given.sequence, given.training, strict=True))
    ]
    heapq.heapify(heap)
    now, sequence, trained, ended = clock.now, clock.sequence, list[int](), list[int]()
    while len(ended) < enough:
        if not heap or (until is not None and heap[0][0] > until):
            now = now if until is None else max(now, until)
            break
        now, _, row, training = heapq.heappop(heap)
        (trained if training else ended).append(row)
        if training:
            heapq.heappush(heap, (float(given.ends[row]), sequence, row, np.False_))
            sequence += 1
    return Popped(now, trained, ended)


def plain(passed: Passed) -> Popped:
    return Popped(passed.now, passed.trained.tolist(), passed.ended.tolist())


# Few different times, so that many events are at the same one.
TIMES = st.integers(0, 4).map(float)
ROWS = st.lists(st.tuples(st.one_of(st.none(), TIMES), TIMES), min_size=1, max_size=8)


@given(ROWS, st.one_of(st.none(), TIMES), st.integers(1, 9), st.randoms())
def test_events_come_as_from_a_heap(
    rows: list[tuple[float | None, float]], until: float | None, enough: int, shuffle: object
) -> None:
    """Ties go to the event that was scheduled first; uploads may take no time at all."""
    made = events(*((t, e if t is None else t + e) for t, e in rows))
    order = np.argsort([shuffle.random() for _ in rows])  # type: ignore[attr-defined]
    made = Events(made.training, made.trained, made.ends, order)
    clock = Clock(0.0, len(rows))
    expected = by_heap(made, clock, until, enough)
    due = clock.due(made, until, enough)
    assert set(expected.trained) <= set(np.flatnonzero(due).tolist())
    assert bool(expected.trained) == due.any()
    # Only the ends of those whose training is due need be known.
    hidden = np.where(due | ~made.training, made.ends, math.inf)
    known = Events(made.training, made.trained, hidden, made.sequence)
    found = clock.passed(known, until, enough)
    assert plain(found) == expected
    assert type(found.now) is float


def test_time_stops_where_it_is_told() -> None:
    clock, order = Clock(0.0, 1), events((None, 5.0))
    assert plain(clock.passed(order, np.float64(3.0), 1)) == (3.0, [], [])
    assert type(clock.passed(order, np.float64(3.0), 1).now) is float
    assert plain(clock.passed(order, 5.0, 1)) == (5.0, [], [0])


def test_the_past_cannot_be_scheduled() -> None:
    with pytest.raises(ValueError, match="already 4"):
        Clock(now=4.0).scheduled(np.array([5.0, 3.0]))


def test_events_are_numbered_one_after_the_other() -> None:
    clock, first = Clock().scheduled(np.array([5.0, 3.0]))
    clock, second = clock.scheduled(np.array([1.0]))
    assert [*first, *second, clock.sequence] == [0, 1, 2, 3]
