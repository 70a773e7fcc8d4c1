"""Over-selection: ask more devices than are needed, and take the first answers."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from anyfleet.config.number_values import Unbounded
from anyfleet.core.slots import Schedule
from anyfleet.core.view import Request, View
from anyfleet.errors import refuse
from anyfleet.papers import AT_SCALE, Paper
from anyfleet.parts.schedule.patience import begun, end_of_patience, training


@dataclass(frozen=True)
class Overselected(Schedule):
    """Steps with the first `keep` answers of a larger cohort, for example of `Uniform(count=13)`.

    Those who come later are lost: their work is cancelled, and charged up to then. The step also
    closes, with what there is, when everybody asked has answered or is lost, and after `patience`
    seconds. With a cohort of `keep` or fewer that is `Synchronous` with a time limit.
    """

    keep: int
    patience: Unbounded = 3600.0
    staleness: ClassVar[int] = 0

    reports: ClassVar[frozenset[str]] = frozenset()
    papers: ClassVar[tuple[Paper, ...]] = (AT_SCALE,)

    def __post_init__(self) -> None:
        refuse(self._faults())

    def _faults(self) -> Iterator[str]:
        if self.keep < 1:
            yield f"Overselected.keep must be at least 1 answer, got {self.keep}."
        if not self.patience > 0:
            yield f"Overselected.patience must be positive seconds, got {self.patience}."

    def start(self, view: View) -> tuple[Request, ...]:
        return () if begun(view) else (Request(),)

    def ready(self, view: View) -> bool:
        answers, lost = training(view.replied), training(view.failed)
        landed = bool(answers or lost) and not training(view.under_way)
        late = view.now >= view.started + self.patience
        return len(answers) >= self.keep or landed or late

    def alarm(self, view: View) -> float | None:
        return end_of_patience(view, self.patience, asked=begun(view))

    def enough(self, view: View) -> int:
        # Never more than are missing: an answer beyond `keep` would count as well.
        missing = self.keep - len(training(view.replied))
        return max(1, min(missing, len(view.under_way)))

    def drop(self, view: View) -> tuple[int, ...]:
        return tuple(flight.order for flight in view.under_way)

    def later(self, view: View) -> tuple[int, ...]:
        return ()
