"""Rounds that end after a time."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from anyfleet.config.number_values import Unbounded
from anyfleet.core.slots import Schedule
from anyfleet.core.view import Ids, Request, View
from anyfleet.errors import refuse


@dataclass(frozen=True)
class Deadline(Schedule):
    """Rounds that end after `seconds` at the latest, with the replies that have arrived.

    Late orders are `"dropped"` (they are cancelled), or `"counted"`: they go on, and their replies
    count in a later round if they are at most `staleness` rounds old.
    """

    seconds: Unbounded  # that a round may last
    late: Literal["dropped", "counted"] = "dropped"  # what becomes of late orders
    staleness: int = 0  # rounds that a late reply may be old

    def __post_init__(self) -> None:
        refuse(self._faults())

    def _faults(self) -> Iterator[str]:
        if not self.seconds > 0:
            yield f"Deadline.seconds must be positive, got {self.seconds}."
        if self.late == "dropped" and self.staleness:
            yield (
                'Deadline.staleness has no effect with late="dropped"; use late="counted" to let '
                "late replies count."
            )
        if self.late == "counted" and self.staleness < 1:
            yield (
                'Deadline with late="counted" needs a staleness of at least 1: a late reply '
                "arrives in a later round, and would never count."
            )

    def start(self, view: View) -> tuple[Request, ...]:
        return () if view.issued else (Request(),)

    def ready(self, view: View) -> bool:
        # The server cannot know that a device died: a missing reply costs the whole time
        # (specification §A.5).
        missing = (view.under_way + view.failed).of_round(view.round_index)
        everybody = bool(view.replied) and bool(view.issued) and not missing
        return everybody or view.now >= view.started + self.seconds

    def alarm(self, view: View) -> float:
        return view.started + self.seconds

    def enough(self, view: View) -> int:
        # One by one while older orders are under way: a reply to them may not be the one missing.
        fresh = len(view.under_way.of_round(view.round_index))
        return max(1, fresh if fresh == len(view.under_way) else 1)

    def drop(self, view: View) -> Ids:
        return view.under_way.order if self.late == "dropped" else ()
