"""Questions to a finished run: where it ended, what a target cost, where the energy went."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from anyfleet.analysis.breakdown import Breakdown, Fairness
from anyfleet.analysis.metric import Metric
from anyfleet.core.ledger import Ledger
from anyfleet.experiment import RoundRecord


@dataclass(frozen=True)
class Summary:
    """A run in one line: where it ended, and its best evaluation. NaN: never evaluated.

    A score that is NaN although the run was evaluated (`evaluated` says so) is that of a model
    whose numbers are none.
    """

    steps: int
    metric: str  # what the run is judged by
    score: float  # of the last evaluation
    best: float
    loss: float  # on the test set
    time: float  # simulated seconds
    down: float  # bytes
    up: float  # bytes
    flops: float
    joules: float
    lost: int
    fairness: Fairness | None = None  # at the first width; None unless devices were told apart
    others: dict[str, float] = field(default_factory=dict)  # further metrics, likewise

    @property
    def accuracy(self) -> float:
        """The score of a run that is judged by its accuracy; NaN of every other."""
        return self.score if self.metric == "accuracy" else math.nan


def summarise(points: Sequence[RoundRecord]) -> Summary:
    """Of a run with at least one step."""
    last, judged = points[-1], evaluated(points)
    scores = next((point.scores for point in reversed(points) if point.scores), {})
    besides = (name for name in scores if name not in (last.metric, "loss") and "@" not in name)
    return Summary(
        steps=len(points),
        metric=last.metric,
        score=judged[-1].score if judged else math.nan,
        best=best(points),
        loss=scores.get("loss", math.nan),
        time=last.time,
        down=last.down,
        up=last.up,
        flops=last.flops,
        joules=last.joules,
        lost=sum(point.failures for point in points),
        fairness=next((each.fairness for each in taken_apart(points) if each.devices), None),
        others={name: scores[name] for name in besides},
    )


def at_widths(points: Sequence[RoundRecord]) -> dict[float, float]:
    """Return the score of the shared model at every width, by the last evaluation of them."""
    last = next((point for point in reversed(points) if point.widths), points[-1])
    return {width: last.at(width) for width in last.widths}


def metric_of(points: Sequence[RoundRecord]) -> Metric:
    """Return what a run with at least one step is judged by."""
    return Metric(points[-1].metric)


def taken_apart(points: Sequence[RoundRecord]) -> tuple[Breakdown, ...]:
    """The accuracy of the last evaluation by group, device and class; one entry for each width."""
    return next((point.details for point in reversed(points) if point.details), ())


def evaluated(points: Iterable[RoundRecord], width: float | None = None) -> tuple[RoundRecord, ...]:
    """The points at which the run was evaluated, or its model at a width."""
    return tuple(point for point in points if point.evaluated(width))


def best(points: Iterable[RoundRecord], width: float | None = None) -> float:
    """The best score of a run, or NaN; which way is better, its metric says."""
    judged = evaluated(points, width)
    return metric_of(judged).best(point.at(width) for point in judged) if judged else math.nan


def common_score(runs: Iterable[Sequence[RoundRecord]], width: float | None = None) -> float:
    """The best score that every run reaches; NaN if there is none, or metrics differ."""
    known = [points for points in runs if points]
    metrics = {metric_of(points) for points in known}
    if len(metrics) != 1:
        return math.nan
    return metrics.pop().worst(best(points, width) for points in known)


@dataclass(frozen=True)
class Spread:
    """A number over several seeds; the deviation is that of a sample, NaN for a single one."""

    mean: float
    deviation: float


def spread(values: Sequence[float]) -> Spread:
    """Mean and deviation."""
    deviation = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
    return Spread(float(np.mean(values)), deviation)


# --- targets ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spent:
    """What a run had spent by some evaluation."""

    time: float  # simulated seconds
    joules: float
    bytes: float  # both ways
    flops: float
    rounds: int


@dataclass(frozen=True)
class ToTarget:
    """What a target cost a run; a run that never got there says how far it came."""

    target: float
    best: float  # NaN: never evaluated
    spent: Spent | None  # None: not reached
    metric: str = "accuracy"

    def __str__(self) -> str:
        if self.spent is None:
            return not_reached(self.best, Metric(self.metric))
        cost = self.spent
        amounts = f"{cost.time:,.1f} s, {cost.joules:,.1f} J, {cost.bytes / 1e6:,.1f} MB"
        return f"{amounts}, {cost.rounds} rounds"


def to_target(points: Sequence[RoundRecord], target: float, width: float | None = None) -> ToTarget:
    """Up to the first evaluation as good as the target, of the run or at a width."""
    need_width(points, width)
    judged, metric = evaluated(points, width), metric_of(points)
    first = next((point for point in judged if metric.reaches(point.at(width), target)), None)
    cost = None if first is None else spent_by(first)
    return ToTarget(target, best(judged, width), cost, metric.name)


def spent_by(point: RoundRecord) -> Spent:
    """What a run had spent by a point."""
    both = point.down + point.up
    return Spent(point.time, point.joules, both, point.flops, point.round_index + 1)


def not_reached(best: float, metric: Metric) -> str:
    """How a run that missed its target appears in tables."""
    return f"not reached (best {metric.told(best)})"


def need_width(points: Iterable[RoundRecord], width: float | None) -> None:
    """A width that nobody evaluated is a slip, not a target that was missed."""
    scored = [point for point in points if point.scores]
    if width is None or not scored or any(point.evaluated(width) for point in scored):
        return
    known = ", ".join(f"{scored[0].metric}@{each:g}" for each in scored[0].widths)
    raise ValueError(f"width {width:g} was not evaluated; there are {known or 'none'}.")


# --- the ledger ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Totals:
    """Of some orders together, whether they counted or were lost."""

    orders: int
    counted: int  # answers that came in and were used
    seconds: float  # devices were busy
    joules: float
    down: float  # bytes
    up: float  # bytes
    flops: float


Column = Literal["device", "level", "kind", "round_index", "slice_width", "reason"]


def by(entries: Ledger, column: Column) -> dict[Any, Totals]:
    """The ledger added up for each value of a column, in the order of the values.

    The "reason" of orders that counted is "".
    """
    values = reasons(entries) if column == "reason" else getattr(entries, column)
    found, which = np.unique(np.array(values), return_inverse=True)
    sums = {
        name: np.bincount(which, weights=amounts, minlength=len(found)).tolist()
        for name, amounts in _amounts(entries).items()
    }
    orders = np.bincount(which, minlength=len(found)).tolist()
    counted = np.bincount(which[entries.counted], minlength=len(found)).tolist()
    rows = zip(orders, counted, *sums.values(), strict=True)
    return {value: Totals(*row) for value, row in zip(found.tolist(), rows, strict=True)}


def _amounts(entries: Ledger) -> dict[str, Any]:
    return {
        "seconds": entries.seconds,
        "joules": entries.joules,
        "down": entries.bits_down / 8,
        "up": entries.bits_up / 8,
        "flops": entries.flops,
    }


def reasons(entries: Ledger) -> tuple[str, ...]:
    """Why each order was lost, without the numbers of the single case; "" if it was not."""
    return tuple(reason.partition(":")[0] for reason in entries.failure)


def losses(entries: Ledger) -> dict[str, int]:
    """How many orders were lost for each reason, most frequent first."""
    return dict(Counter(reason for reason in reasons(entries) if reason).most_common())
