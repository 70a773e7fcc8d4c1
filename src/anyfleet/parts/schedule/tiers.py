"""Tiers of equally fast devices: rounds within a tier, no waiting between tiers (FedAT)."""

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from anyfleet.config.number_values import Unbounded
from anyfleet.core.slots import Schedule
from anyfleet.core.view import Ids, OrderStatuses, Request, View
from anyfleet.papers import FEDAT, Paper
from anyfleet.parts.schedule.patience import end_of_patience


@dataclass(frozen=True)
class Tiers(Schedule):
    """One cohort for each declared level; a round ends whenever one of the cohorts is complete.

    A tier is synchronous within itself: its cohort starts from one model, and the tier is asked
    again, in the next round, only when the last of its devices has replied or failed. Tiers do not
    wait for each other: the replies of a slow tier are left to the round in which its last reply
    arrives. A reply more than `staleness` rounds old does not count;
    `aggregate.Mean(discount=…)` lets older ones weigh less.

    The method's selection draws every cohort, among the free devices of the level: `Uniform(3)`
    means three of each. A level without free devices is left out until it has some. A round also
    ends, with what has arrived, when no order is under way, and after `patience` seconds; nothing
    is cancelled.
    """

    staleness: int = 20  # rounds that a reply may be old
    patience: Unbounded = 3600.0  # seconds after which a round ends

    papers: ClassVar[tuple[Paper, ...]] = (FEDAT,)

    def __post_init__(self) -> None:
        if self.staleness < 0:
            raise ValueError(f"Tiers.staleness must not be negative, got {self.staleness}.")
        if not self.patience > 0:
            raise ValueError(f"Tiers.patience must be positive seconds, got {self.patience}.")

    def start(self, view: View) -> tuple[Request, ...]:
        tried = _levels(view, view.orders)
        return tuple(Request(level=level) for level in view.devices.levels if level not in tried)

    def ready(self, view: View) -> bool:
        replied = _levels(view, view.replied).keys()
        under_way = _levels(view, view.under_way).keys()
        # Failures alone do not end a round while other orders are under way: that would only
        # make those staler.
        nothing_left = not under_way and bool(replied or view.failed.training)
        late = view.now >= view.started + self.patience
        return bool(replied - under_way) or nothing_left or late

    def alarm(self, view: View) -> float:
        return end_of_patience(view, self.patience, asked=bool(view.under_way))

    def enough(self, view: View) -> int:
        # No tier is complete before as many came in as the smallest cohort misses.
        return min(_levels(view, view.under_way).values(), default=1)

    def later(self, view: View) -> Ids:
        # After a long wait the cohorts count as far as they have come.
        if view.now >= view.started + self.patience:
            return ()
        replied = view.replied.training
        incomplete = list(_levels(view, view.under_way))
        return replied.order[np.isin(view.devices.level[replied.device], incomplete)]


def _levels(view: View, statuses: OrderStatuses) -> Counter[int]:
    """Return how many of the training orders each level has; levels without any are left out."""
    return Counter(view.devices.level[statuses.training.device].tolist())
