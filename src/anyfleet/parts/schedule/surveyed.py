"""Asking devices something besides training."""

from dataclasses import dataclass

from anyfleet.core.messages import Kind
from anyfleet.core.signals import Signal
from anyfleet.core.slots import Schedule
from anyfleet.core.view import Request, View

_ASKS = (Kind.EVALUATE, Kind.STATISTICS, Kind.REPORT)


@dataclass(frozen=True)
class Surveyed(Schedule):
    """Another schedule, with a survey of all idle devices at the end of every `every`-th step.

    The answers come with the step (`Round.answers`). Devices are asked after they have trained and
    before the server aggregates: what they keep is new, what the server sends is not. What the
    inner schedule leaves flying goes on meanwhile, and counts when it lands before the survey ends.
    """

    inner: Schedule
    ask: Kind = Kind.EVALUATE
    every: int = 1

    def __post_init__(self) -> None:
        if self.ask not in _ASKS:
            raise ValueError(
                f"Surveyed.ask must be one of {', '.join(_ASKS)}, got {self.ask}. "
                "Training is the business of the inner schedule."
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

    def start(self, view: View) -> tuple[Request, ...]:
        if self._asked(view):
            return ()
        if not self.inner.ready(view):
            return self.inner.start(view)
        if self._due(view):
            return (Request(kind=self.ask, devices=tuple(view.idle.tolist())),)
        return ()

    def ready(self, view: View) -> bool:
        asking = any(flight.kind == self.ask for flight in view.under_way)
        return not asking and self.inner.ready(view) and not self._due(view)

    def alarm(self, view: View) -> float | None:
        if any(flight.kind == self.ask for flight in view.under_way):
            return None
        return self.inner.alarm(view)

    def enough(self, view: View) -> int:
        asking = sum(flight.kind == self.ask for flight in view.under_way)
        return asking or self.inner.enough(view)

    def drop(self, view: View) -> tuple[int, ...]:
        return self.inner.drop(view)

    def later(self, view: View) -> tuple[int, ...]:
        return self.inner.later(view)

    def _asked(self, view: View) -> bool:
        flights = view.of_this_round((*view.under_way, *view.replied, *view.failed, *view.declined))
        return any(flight.kind == self.ask for flight in flights)

    def _due(self, view: View) -> bool:
        # Last whether anybody is there: that looks at the whole fleet.
        return view.round_index % self.every == 0 and not self._asked(view) and len(view.idle) > 0
