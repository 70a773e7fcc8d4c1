"""Virtual time: a heap of (time, sequence, event). Ties go to the event scheduled first."""

import heapq
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Event:
    """Something that happens to an order."""

    kind: Literal["trained", "arrived", "failed"]
    order: int


@dataclass
class Clock:
    """A clock that jumps from event to event."""

    now: float = 0.0
    _sequence: int = 0
    _heap: list[tuple[float, int, Event]] = field(default_factory=list)

    def schedule(self, time: float, event: Event) -> None:
        """Add an event; raise ValueError if its time has passed."""
        if time < self.now:
            raise ValueError(f"cannot schedule {event} at {time}: it is already {self.now}")
        # A NumPy number would spread into everything that is added to it, and be printed as such.
        heapq.heappush(self._heap, (float(time), self._sequence, event))
        self._sequence += 1

    def pop(self, until: float | None) -> Event | None:
        """Return the next event; if `until` comes first, set the clock to it and return None."""
        if self._heap and (until is None or self._heap[0][0] <= until):
            self.now, _, event = heapq.heappop(self._heap)
            return event
        if until is not None:
            self.now = max(self.now, float(until))
        return None

    def cancel(self, orders: set[int]) -> None:
        """Remove all events of these orders."""
        self._heap = [entry for entry in self._heap if entry[2].order not in orders]
        heapq.heapify(self._heap)

    def consistent_with(self, orders: Collection[int]) -> bool:
        """Return whether all events are in the future, belong to these orders, and are numbered."""
        numbers = {sequence for _, sequence, _ in self._heap}
        return len(numbers) == len(self._heap) and all(
            event.order in orders and time >= self.now and sequence < self._sequence
            for time, sequence, event in self._heap
        )

    def copy(self) -> "Clock":
        """Return a clock with the same time and the same events."""
        return Clock(self.now, self._sequence, list(self._heap))
