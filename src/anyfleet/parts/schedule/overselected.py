"""Over-selection: more devices are asked than are needed, and the first replies count."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from anyfleet.arrays import Ints
from anyfleet.config.number_values import Unbounded
from anyfleet.core.slots import Schedule
from anyfleet.core.view import Request, View
from anyfleet.errors import refuse
from anyfleet.papers import AT_SCALE, Paper
from anyfleet.parts.schedule.patience import end_of_patience


@dataclass(frozen=True)
class Overselected(Schedule):
    """Rounds that end with the first `keep` replies of a larger cohort (`Uniform(count=13)`, say).

    The orders still under way are cancelled, and charged up to then. The round also ends, with
    what has arrived, when every order has been replied to or has failed, and after `patience`
    seconds. With a cohort of `keep` or fewer that is `Synchronous` with a time limit.
    """

    keep: int  # replies that end a round
    patience: Unbounded = 3600.0  # seconds after which a round ends

    papers: ClassVar[tuple[Paper, ...]] = (AT_SCALE,)

    def __post_init__(self) -> None:
        refuse(self._faults())

    def _faults(self) -> Iterator[str]:
        if self.keep < 1:
            yield f"Overselected.keep must be at least 1 reply, got {self.keep}."
        if not self.patience > 0:
            yield f"Overselected.patience must be positive seconds, got {self.patience}."

    def start(self, view: View) -> tuple[Request, ...]:
        return () if view.issued else (Request(),)

    def ready(self, view: View) -> bool:
        replies, failures = view.replied.training, view.failed.training
        closed = bool(replies or failures) and not view.under_way.training
        late = view.now >= view.started + self.patience
        return len(replies) >= self.keep or closed or late

    def alarm(self, view: View) -> float:
        return end_of_patience(view, self.patience, asked=bool(view.issued))

    def enough(self, view: View) -> int:
        # Never more than are missing: a reply beyond `keep` would count as well.
        missing = self.keep - len(view.replied.training)
        return max(1, min(missing, len(view.under_way)))

    def drop(self, view: View) -> Ints:
        return view.under_way.order
