"""Surveys: devices are asked something besides training."""

from collections.abc import Sequence
from dataclasses import dataclass

from anyfleet.core.messages import Kind
from anyfleet.core.signals import Signal
from anyfleet.core.slots import Schedule
from anyfleet.core.view import Ids, Request, View

_SURVEYS = (Kind.EVALUATE, Kind.STATISTICS, Kind.REPORT)


@dataclass(frozen=True)
class Surveyed(Schedule):
    """Another schedule, with a survey of all idle devices at the end of every `every`-th round.

    The replies come with the round (`Round.replies`). Devices are asked after they have trained and
    before the server aggregates: what they keep is new, what the server sends is not. What the
    inner schedule has under way goes on meanwhile, and counts if it arrives before the survey ends.
    """

    inner: Schedule  # the schedule of training
    ask: Kind = Kind.EVALUATE  # evaluate, statistics or report
    every: int = 1  # rounds between surveys

    def __post_init__(self) -> None:
        if self.ask not in _SURVEYS:
            raise ValueError(
                f"Surveyed.ask must be one of {', '.join(_SURVEYS)}, got {self.ask}. "
                "Training is ordered by the inner schedule."
            )
        if self.every < 1:
            raise ValueError(f"Surveyed.every must be at least 1, got {self.every}.")

    @property
    def staleness(self) -> int:
        return self.inner.staleness

    @property
    def reports(self) -> frozenset[str]:
        return self.inner.reports

    @property
    def provides(self) -> frozenset[Signal]:
        return self.inner.provides

    def start(self, view: View) -> Sequence[Request]:
        if self._asked(view):
            return ()
        if not self.inner.ready(view):
            return self.inner.start(view)
        if self._due(view):
            return (Request(kind=self.ask, devices=view.idle),)
        return ()

    def ready(self, view: View) -> bool:
        asking = bool(view.under_way.of_kind(self.ask))
        return not asking and self.inner.ready(view) and not self._due(view)

    def alarm(self, view: View) -> float | None:
        return None if view.under_way.of_kind(self.ask) else self.inner.alarm(view)

    def enough(self, view: View) -> int:
        return len(view.under_way.of_kind(self.ask)) or self.inner.enough(view)

    def drop(self, view: View) -> Ids:
        return self.inner.drop(view)

    def later(self, view: View) -> Ids:
        return self.inner.later(view)

    def _asked(self, view: View) -> bool:
        """Return whether this round has made its survey, or is making it."""
        return bool(view.orders.of_round(view.round_index).of_kind(self.ask))

    def _due(self, view: View) -> bool:
        """Return whether a survey is due and somebody is there to be asked."""
        # The idle devices last: that looks at the whole fleet.
        return view.round_index % self.every == 0 and not self._asked(view) and len(view.idle) > 0
