"""Runs at equal budgets: what they had learned for the same time, energy, FLOP or traffic."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from anyfleet.analysis.metric import Metric
from anyfleet.analysis.summaries import Spent, best, evaluated, metric_of, need_width, spent_by
from anyfleet.analysis.units import quantity
from anyfleet.experiment import RoundRecord

Resource = Literal["flops", "time", "energy", "bytes"]
_USED: Mapping[Resource, Callable[[RoundRecord], float]] = MappingProxyType(
    {
        "flops": lambda record: record.flops,
        "time": lambda record: record.time,
        "energy": lambda record: record.joules,
        "bytes": lambda record: record.down + record.up,
    }
)
UNITS: Mapping[Resource, str] = MappingProxyType(
    {"flops": "FLOP", "time": "s", "energy": "J", "bytes": "B"}
)


def used(record: RoundRecord, resource: Resource) -> float:
    """Return what a run had used by the end of a round: FLOP, simulated seconds, joules or bytes.

    Bytes count both ways.
    """
    if resource not in _USED:
        raise ValueError(f"a resource must be one of {', '.join(_USED)}; got {resource!r}.")
    return _USED[resource](record)


def common_amount(runs: Iterable[Sequence[RoundRecord]], resource: Resource) -> float:
    """Return the largest amount that every run used, or NaN without runs."""
    return min((used(records[-1], resource) for records in runs), default=math.nan)


@dataclass(frozen=True)
class Within:
    """What a run had learned for an amount, by its last evaluation within it.

    A run that ended with less counts as it ended. Of a run whose first evaluation came later,
    nothing is known.
    """

    resource: Resource
    amount: float
    total: float  # what the whole run used of the resource
    first: float  # what it had used by its first evaluation; NaN: never evaluated
    score: float  # NaN: not evaluated by then, or a model with NaN among its parameters
    best: float  # score until then, or NaN likewise
    spent: Spent | None  # by the last evaluation within the amount; None without one
    metric: str = "accuracy"

    @property
    def accuracy(self) -> float:
        """The score of a run that is measured by accuracy; NaN for any other."""
        return self.score if self.metric == "accuracy" else math.nan

    @property
    def ended(self) -> bool:
        """True if the run ended before it had used the amount."""
        return self.total < self.amount

    def __str__(self) -> str:
        if self.spent is None:
            return first_after([self])
        metric = Metric(self.metric)
        told = f"{metric.told(self.score)} (best {metric.told(self.best)})"
        return f"{told}, {ended_after([self])}" if self.ended else told


def within(
    records: Sequence[RoundRecord], resource: Resource, amount: float, width: float | None = None
) -> Within:
    """Return what a run, or its model at a width, had learned for an amount of a resource.

    Nothing is interpolated: between two evaluations a run is as good as at the first of them.
    """
    if not amount >= 0:
        raise ValueError(f"an amount must be 0 or more, got {amount}.")
    need_width(records, width)
    measured = evaluated(records, width)
    before = [record for record in measured if used(record, resource) <= amount]
    return Within(
        resource=resource,
        amount=amount,
        total=used(records[-1], resource),
        first=used(measured[0], resource) if measured else math.nan,
        score=before[-1].at(width) if before else math.nan,
        best=best(before, width),
        spent=spent_by(before[-1]) if before else None,
        metric=metric_of(records).name,
    )


# --- for people ---------------------------------------------------------------------------------


def ended_after(runs: Sequence[Within]) -> str:
    """Return how runs that ended before they had used an amount appear in tables."""
    return f"ended after {_range([each.total for each in runs], runs[0].resource)}"


def first_after(runs: Sequence[Within]) -> str:
    """Return how runs that were not evaluated within an amount appear in tables."""
    known = [each.first for each in runs if not math.isnan(each.first)]
    return (
        f"first evaluated after {_range(known, runs[0].resource)}" if known else "never evaluated"
    )


def _range(amounts: Sequence[float], resource: Resource) -> str:
    ends = dict.fromkeys(quantity(end, UNITS[resource]) for end in (min(amounts), max(amounts)))
    return " to ".join(ends)
