"""Summaries of a finished run: where it ended, what a target cost, where the energy went."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from anyfleet.analysis.breakdown import Breakdown, Fairness
from anyfleet.analysis.metric import Metric
from anyfleet.analysis.units import quantity
from anyfleet.core.ledger import Ledger, known
from anyfleet.experiment import RoundRecord

Runs = Mapping[str, Mapping[int, Sequence[RoundRecord]]]  # by name, then by seed


@dataclass(frozen=True)
class Summary:
    """A run in one line: where it ended, and its best evaluation. NaN: never evaluated.

    A score that is NaN although the run was evaluated (`evaluated` says so) is that of a model with
    NaN among its parameters.
    """

    rounds: int
    metric: str  # by which the run is measured
    score: float  # of the last evaluation
    best: float
    loss: float  # on the test set
    time: float  # simulated seconds
    down: float  # bytes
    up: float  # bytes
    flops: float
    joules: float
    failures: int
    unmeasured: int = 0  # orders whose joules are not known: `joules` is without them
    fairness: Fairness | None = None  # at the first width; None unless devices were evaluated
    others: dict[str, float] = field(default_factory=dict)  # further metrics at the last evaluation

    @property
    def accuracy(self) -> float:
        """The score of a run that is measured by accuracy; NaN for any other."""
        return self.score if self.metric == "accuracy" else math.nan


def summarise(records: Sequence[RoundRecord]) -> Summary:
    """Return the summary of a run with at least one round."""
    last, measured = records[-1], evaluated(records)
    scores = next((record.scores for record in reversed(records) if record.scores), {})
    others = (name for name in scores if name not in (last.metric, "loss") and "@" not in name)
    return Summary(
        rounds=len(records),
        metric=last.metric,
        score=measured[-1].score if measured else math.nan,
        best=best(records),
        loss=scores.get("loss", math.nan),
        time=last.time,
        down=last.down,
        up=last.up,
        flops=last.flops,
        joules=last.joules,
        failures=sum(record.failures for record in records),
        unmeasured=last.unmeasured,
        fairness=next((each.fairness for each in taken_apart(records) if each.devices), None),
        others={name: scores[name] for name in others},
    )


def at_widths(records: Sequence[RoundRecord]) -> dict[float, float]:
    """Return the score of the shared model at every width, by the last evaluation."""
    last = next((record for record in reversed(records) if record.widths), records[-1])
    return {width: last.at(width) for width in last.widths}


def metric_of(records: Sequence[RoundRecord]) -> Metric:
    """Return the metric by which a run with at least one round is measured."""
    return Metric(records[-1].metric)


def known_metrics(records: Iterable[RoundRecord]) -> tuple[str, ...]:
    """Return the names of the metrics that were measured in a run, without widths."""
    names = (name for record in records for name in (record.metric, *record.scores))
    return tuple(dict.fromkeys(name for name in names if "@" not in name))


def measured_by(records: Sequence[RoundRecord], metric: str) -> tuple[RoundRecord, ...]:
    """Return the records of a run as if it were measured by another of its metrics.

    Of devices' own models only the run's own metric is known. By any other, a run that evaluates
    these counts as never evaluated: its shared model is not what it is about.
    """
    if all(record.metric == metric for record in records):
        return tuple(records)
    own = any(not math.isnan(record.on_devices) for record in records)
    return tuple(
        replace(record, metric=metric, on_devices=math.nan, scores={} if own else record.scores)
        for record in records
    )


def taken_apart(records: Sequence[RoundRecord]) -> tuple[Breakdown, ...]:
    """Return the last accuracy by group, device and class, one entry for each width."""
    return next((record.details for record in reversed(records) if record.details), ())


def evaluated(
    records: Iterable[RoundRecord], width: float | None = None
) -> tuple[RoundRecord, ...]:
    """Return the records of rounds in which the run, or its model at a width, was evaluated."""
    return tuple(record for record in records if record.evaluated(width))


def best(records: Iterable[RoundRecord], width: float | None = None) -> float:
    """Return the best score of a run by its metric, or NaN if it was never evaluated."""
    measured = evaluated(records, width)
    return (
        metric_of(measured).best(record.at(width) for record in measured) if measured else math.nan
    )


def common_score(runs: Iterable[Sequence[RoundRecord]], width: float | None = None) -> float:
    """Return the best score that every run reaches; NaN if there is none, or metrics differ."""
    known = [records for records in runs if records]
    metrics = {metric_of(records) for records in known}
    if len(metrics) != 1:
        return math.nan
    return metrics.pop().worst(best(records, width) for records in known)


# --- targets ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spent:
    """What a run had spent by some evaluation."""

    time: float  # simulated seconds
    joules: float
    bytes: float  # both ways
    flops: float
    rounds: int
    unmeasured: int = 0  # orders whose joules are not known: `joules` is without them


@dataclass(frozen=True)
class ToTarget:
    """What a target cost a run, or how far a run came that missed it."""

    target: float
    best: float  # NaN: never evaluated
    spent: Spent | None  # None: not reached
    metric: str = "accuracy"

    def __str__(self) -> str:
        if self.spent is None:
            return not_reached(self.best, Metric(self.metric), self.target)
        cost = self.spent
        least = "at least " if cost.unmeasured else ""
        energy = f"{least}{quantity(cost.joules, 'J')}"
        amounts = f"{quantity(cost.time, 's')}, {energy}, {quantity(cost.bytes, 'B')}"
        return f"{amounts}, {cost.rounds} rounds"


def to_target(
    records: Sequence[RoundRecord], target: float, width: float | None = None
) -> ToTarget:
    """Return what was spent up to the first evaluation that reaches the target."""
    need_width(records, width)
    measured, metric = evaluated(records, width), metric_of(records)
    first = next((record for record in measured if metric.reaches(record.at(width), target)), None)
    cost = None if first is None else spent_by(first)
    return ToTarget(target, best(measured, width), cost, metric.name)


def spent_by(record: RoundRecord) -> Spent:
    """Return what a run had spent by the end of a round."""
    both = record.down + record.up
    rounds = record.round_index + 1
    return Spent(record.time, record.joules, both, record.flops, rounds, record.unmeasured)


def not_reached(best: float, metric: Metric, target: float) -> str:
    """Return how a run that missed its target appears in tables."""
    return f"not reached (best {metric.apart(best, target)})"


def need_width(records: Iterable[RoundRecord], width: float | None) -> None:
    """Raise ValueError for a width at which a run was not evaluated."""
    scored = [record for record in records if record.scores]
    if width is None or not scored or any(record.evaluated(width) for record in scored):
        return
    known = ", ".join(f"{scored[0].metric}@{each:g}" for each in scored[0].widths)
    raise ValueError(f"width {width:g} was not evaluated; there are {known or 'none'}.")


# --- the ledger ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Totals:
    """The sums over some orders, whether they counted or failed, without what is not known."""

    orders: int
    counted: int  # replies that arrived and were used
    seconds: float  # that devices worked
    joules: float
    down: float  # bytes
    up: float  # bytes
    flops: float
    unmeasured: int  # orders whose joules are not known


Field = Literal["device", "level", "kind", "round_index", "slice_width", "failure"]


def by(ledger: Ledger, name: Field) -> dict[Any, Totals]:
    """Return the sums of a ledger for each value of a field, sorted by value.

    The "failure" of orders that counted is "".
    """
    values = failures(ledger) if name == "failure" else getattr(ledger, name)
    found, which = np.unique(np.array(values), return_inverse=True)
    sums = {
        name: np.bincount(which, weights=amounts, minlength=len(found)).tolist()
        for name, amounts in _amounts(ledger).items()
    }
    orders = np.bincount(which, minlength=len(found)).tolist()
    counted, unknown = (
        np.bincount(which[rows], minlength=len(found)).tolist()
        for rows in (ledger.counted, np.isnan(ledger.joules))
    )
    rows = zip(orders, counted, *sums.values(), unknown, strict=True)
    return {value: Totals(*row) for value, row in zip(found.tolist(), rows, strict=True)}


def _amounts(ledger: Ledger) -> dict[str, Any]:
    return {
        "seconds": ledger.known_seconds,
        "joules": ledger.known_joules,
        "down": known(ledger.bits_down / 8),
        "up": known(ledger.bits_up / 8),
        "flops": known(ledger.flops),
    }


def failures(ledger: Ledger) -> tuple[str, ...]:
    """Return why each order failed, without the numbers of the single case; "" if it did not."""
    return tuple(reason.partition(":")[0] for reason in ledger.failure)


def failure_counts(ledger: Ledger) -> dict[str, int]:
    """Return how many orders failed for each reason, most frequent first."""
    return dict(Counter(reason for reason in failures(ledger) if reason).most_common())
