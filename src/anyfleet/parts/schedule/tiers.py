"""Tiers of equally fast devices: rounds within a tier, no waiting between tiers (FedAT)."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from anyfleet.config.number_values import Unbounded
from anyfleet.core.slots import Schedule
from anyfleet.core.view import OrderStatus, Request, View
from anyfleet.papers import FEDAT, Paper
from anyfleet.parts.schedule.patience import end_of_patience, training


@dataclass(frozen=True)
class Tiers(Schedule):
    """One cohort per declared level; the server steps whenever one of them has landed.

    A tier is synchronous within itself: its cohort starts from one model, and the tier is asked
    again, in the next step, only when the last of them has answered or is lost. Tiers do not wait
    for each other: what a slow tier has answered so far is left to the step in which its last
    answer is in. An answer more than `staleness` steps old is lost;
    `aggregate.Mean(discount=…)` lets older ones weigh less.

    The method's selection draws every cohort, among the free devices of the level: `Uniform(3)`
    means three of each. A level without free devices is left out until there are. A step also
    closes, with what there is, when nobody is left to wait for, and after `patience` seconds;
    nothing is cancelled.
    """

    staleness: int = 20
    patience: Unbounded = 3600.0

    reports: ClassVar[frozenset[str]] = frozenset()
    papers: ClassVar[tuple[Paper, ...]] = (FEDAT,)

    def __post_init__(self) -> None:
        if self.staleness < 0:
            raise ValueError(f"Tiers.staleness must not be negative, got {self.staleness}.")
        if not self.patience > 0:
            raise ValueError(f"Tiers.patience must be positive seconds, got {self.patience}.")

    def start(self, view: View) -> tuple[Request, ...]:
        tried = _levels(view, (*view.under_way, *view.replied, *view.failed, *view.declined))
        return tuple(Request(level=level) for level in view.devices.levels if level not in tried)

    def ready(self, view: View) -> bool:
        answered = _levels(view, view.replied).keys()
        flying = _levels(view, view.under_way).keys()
        # Losses alone make no step while others fly: it would only make those staler.
        nothing_left = not flying and bool(answered or training(view.failed))
        late = view.now >= view.started + self.patience
        return bool(answered - flying) or nothing_left or late

    def alarm(self, view: View) -> float | None:
        return end_of_patience(view, self.patience, asked=bool(view.under_way))

    def enough(self, view: View) -> int:
        # No tier can have landed before as many came in as the smallest cohort misses.
        return min(_levels(view, view.under_way).values(), default=1)

    def drop(self, view: View) -> tuple[int, ...]:
        return ()

    def later(self, view: View) -> tuple[int, ...]:
        flying = _levels(view, view.under_way)
        answered = training(view.replied)
        # After a long wait the cohorts count as far as they have come.
        if view.now >= view.started + self.patience:
            return ()
        return tuple(f.order for f in answered if view.devices.level[f.device] in flying)


def _levels(view: View, flights: Iterable[OrderStatus]) -> Counter[int]:
    """How many of the training flights belong to each level."""
    devices = [flight.device for flight in training(flights)]
    return Counter(view.devices.level[devices].tolist())
