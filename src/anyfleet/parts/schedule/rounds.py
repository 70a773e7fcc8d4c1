"""Schedules that ask a cohort, wait for it, and step."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from anyfleet.config.number_values import Unbounded
from anyfleet.core.slots import Schedule
from anyfleet.core.view import Request, View
from anyfleet.errors import refuse
from anyfleet.parts.schedule.patience import begun


@dataclass(frozen=True)
class Synchronous(Schedule):
    """Waits for everybody who was asked.

    Nobody is late; a device that dies is waited for until its loss is known. When nobody
    could be asked (all offline, all declined) the round ends empty after `patience` seconds.
    """

    patience: Unbounded = 60.0
    staleness: ClassVar[int] = 0

    reports: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        if not self.patience > 0:
            raise ValueError(f"Synchronous.patience must be positive seconds, got {self.patience}.")

    def start(self, view: View) -> tuple[Request, ...]:
        return () if begun(view) else (Request(),)

    def ready(self, view: View) -> bool:
        if view.under_way:
            return False
        tried = bool(view.replied or view.failed)
        return tried or view.now >= view.started + self.patience

    def alarm(self, view: View) -> float | None:
        return None if view.under_way else view.started + self.patience

    def enough(self, view: View) -> int:
        return max(1, len(view.under_way))

    def drop(self, view: View) -> tuple[int, ...]:
        return ()

    def later(self, view: View) -> tuple[int, ...]:
        return ()


@dataclass(frozen=True)
class Deadline(Schedule):
    """Closes the round after `seconds` at the latest and steps with what arrived.

    Those who are late are `"lost"` (their work is cancelled), or `"late"`: they work on, and
    count in a later step if they are at most `staleness` steps old.
    """

    seconds: Unbounded
    late: Literal["lost", "late"] = "lost"
    staleness: int = 0

    reports: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        refuse(self._faults())

    def _faults(self) -> Iterator[str]:
        if not self.seconds > 0:
            yield f"Deadline.seconds must be positive, got {self.seconds}."
        if self.late == "lost" and self.staleness:
            yield (
                'Deadline.staleness has no effect with late="lost"; use late="late" to let '
                "late answers count."
            )
        if self.late == "late" and self.staleness < 1:
            yield (
                'Deadline with late="late" needs a staleness of at least 1: a late answer arrives '
                "in a later step, and would always be lost."
            )

    def start(self, view: View) -> tuple[Request, ...]:
        return () if begun(view) else (Request(),)

    def ready(self, view: View) -> bool:
        # The server cannot know that a device died, so a missing one costs the whole time (§A.5).
        missing = view.of_this_round((*view.under_way, *view.failed))
        everybody = bool(view.replied) and begun(view) and not missing
        return everybody or view.now >= view.started + self.seconds

    def alarm(self, view: View) -> float | None:
        return view.started + self.seconds

    def enough(self, view: View) -> int:
        # One by one while old orders fly: only the schedule knows which answers it waits for.
        fresh = len(view.of_this_round(view.under_way))
        return max(1, fresh if fresh == len(view.under_way) else 1)

    def drop(self, view: View) -> tuple[int, ...]:
        return tuple(f.order for f in view.under_way) if self.late == "lost" else ()

    def later(self, view: View) -> tuple[int, ...]:
        return ()
