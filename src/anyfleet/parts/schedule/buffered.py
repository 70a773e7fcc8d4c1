"""Asynchronous training with a buffer (FedBuff)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from anyfleet.config.number_values import Unbounded
from anyfleet.core.slots import Schedule
from anyfleet.core.view import Request, View
from anyfleet.errors import refuse
from anyfleet.papers import FEDBUFF, Paper
from anyfleet.parts.schedule.patience import end_of_patience


@dataclass(frozen=True)
class Buffered(Schedule):
    """Asynchronous rounds: `concurrency` devices are busy, `buffer_size` replies end a round.

    Nothing is cancelled: a reply counts in the round in which it arrives, unless it is more than
    `staleness` rounds old. A round also ends, with what has arrived, after `patience` seconds or
    after twice `concurrency` failures: a fleet that only fails must neither stop the clock nor
    fill the ledger. New devices are asked when `refill` of them are missing, all together: a
    larger number is faster to simulate, and leaves some devices idle a little longer.
    """

    concurrency: int  # devices that are busy at a time
    buffer_size: int  # replies that end a round
    staleness: int = 20  # rounds that a reply may be old
    patience: Unbounded = 3600.0  # seconds after which a round ends
    refill: int = 1  # devices that must be missing before new ones are asked

    papers: ClassVar[tuple[Paper, ...]] = (FEDBUFF,)

    def __post_init__(self) -> None:
        refuse(self._faults())

    def _faults(self) -> Iterator[str]:
        for name, count in (("concurrency", self.concurrency), ("buffer_size", self.buffer_size)):
            if count < 1:
                yield f"Buffered.{name} must be at least 1, got {count}."
        if not 1 <= self.refill <= max(1, self.concurrency):
            yield f"Buffered.refill must lie in 1 to concurrency, got {self.refill}."
        if self.staleness < 0:
            yield f"Buffered.staleness must not be negative, got {self.staleness}."
        if not self.patience > 0:
            yield f"Buffered.patience must be positive seconds, got {self.patience}."

    def start(self, view: View) -> tuple[Request, ...]:
        missing = self.concurrency - len(view.under_way)
        return (Request(count=missing),) if missing >= self.refill else ()

    def ready(self, view: View) -> bool:
        hopeless = len(view.failed) >= 2 * self.concurrency
        late = view.now >= view.started + self.patience
        return len(view.replied) >= self.buffer_size or hopeless or late

    def enough(self, view: View) -> int:
        missing = self.concurrency - len(view.under_way)
        return max(1, min(self.refill - missing, self.buffer_size - len(view.replied)))

    def alarm(self, view: View) -> float:
        # Asking unwilling devices again and again would fill the ledger, too.
        asked = bool(view.under_way or view.declined)
        return end_of_patience(view, self.patience, asked=asked)
