"""Virtual time: a heap of (time, sequence, event). Ties break in the order of scheduling."""

import heapq
from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Event:
    """Something that happens to an order."""

    kind: str  # "trained", "arrived", "lost"
    order: int


@dataclass
class Clock:
    """A clock that jumps from event to event."""

    now: float = 0.0
    _sequence: int = 0
    _heap: list[tuple[float, int, Event]] = field(default_factory=list)

    def at(self, time: float, event: Event) -> None:
        """Schedules an event."""
        if time < self.now:
            raise ValueError(f"cannot schedule {event} at {time}: it is already {self.now}")
        # A number of numpy would spread into everything that is added to it, and be told.
        heapq.heappush(self._heap, (float(time), self._sequence, event))
        self._sequence += 1

    def pop(self, until: float | None) -> Event | None:
        """The next event, or None with the clock at `until` if that comes first."""
        if self._heap and (until is None or self._heap[0][0] <= until):
            self.now, _, event = heapq.heappop(self._heap)
            return event
        if until is not None:
            self.now = max(self.now, float(until))
        return None

    def forget(self, orders: set[int]) -> None:
        """Removes all events of these orders."""
        self._heap = [entry for entry in self._heap if entry[2].order not in orders]
        heapq.heapify(self._heap)

    def concerns(self, orders: Collection[int]) -> bool:
        """Whether all its events are yet to come, belong to these orders, and are numbered."""
        numbers = {sequence for _, sequence, _ in self._heap}
        return len(numbers) == len(self._heap) and all(
            event.order in orders and time >= self.now and sequence < self._sequence
            for time, sequence, event in self._heap
        )

    def copy(self) -> "Clock":
        return Clock(self.now, self._sequence, list(self._heap))
