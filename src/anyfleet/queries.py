"""Questions to a finished run: where it ended, what a target cost, where the energy went."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from anyfleet.breakdown import Breakdown, Fairness
from anyfleet.ledger import Entries
from anyfleet.study import Point


@dataclass(frozen=True)
class Summary:
    """A run in one line: where it ended, and its best evaluation. NaN: never evaluated."""

    steps: int
    accuracy: float
    best: float
    loss: float  # on the test set
    time: float  # simulated seconds
    down: float  # bytes
    up: float  # bytes
    flops: float
    joules: float
    lost: int
    fairness: Fairness | None = None  # at the first width; None unless devices were told apart


def summarise(points: Sequence[Point]) -> Summary:
    """Of a run with at least one step."""
    last, judged = points[-1], evaluated(points)
    scored = [point.scores["loss"] for point in points if "loss" in point.scores]
    return Summary(
        steps=len(points),
        accuracy=judged[-1].accuracy if judged else math.nan,
        best=best(points),
        loss=scored[-1] if scored else math.nan,
        time=last.time,
        down=last.down,
        up=last.up,
        flops=last.flops,
        joules=last.joules,
        lost=sum(point.lost for point in points),
        fairness=next((each.fairness for each in taken_apart(points) if each.devices), None),
    )


def taken_apart(points: Sequence[Point]) -> tuple[Breakdown, ...]:
    """The accuracy of the last evaluation by group, device and class; one entry for each width."""
    return next((point.details for point in reversed(points) if point.details), ())


def evaluated(points: Iterable[Point], width: float | None = None) -> tuple[Point, ...]:
    """The points at which an accuracy is known, of the run or at a width."""
    return tuple(point for point in points if not math.isnan(point.at(width)))


def best(points: Iterable[Point], width: float | None = None) -> float:
    """The best accuracy of a run, or NaN."""
    return max((point.at(width) for point in evaluated(points, width)), default=math.nan)


def common_accuracy(runs: Iterable[Sequence[Point]], width: float | None = None) -> float:
    """The highest accuracy that every run reaches, or NaN."""
    tops = [best(points, width) for points in runs]
    return math.nan if not tops or any(map(math.isnan, tops)) else min(tops)


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

    def __str__(self) -> str:
        if self.spent is None:
            return not_reached(self.best)
        cost = self.spent
        amounts = f"{cost.time:,.1f} s, {cost.joules:,.1f} J, {cost.bytes / 1e6:,.1f} MB"
        return f"{amounts}, {cost.rounds} rounds"


def to_target(points: Sequence[Point], target: float, width: float | None = None) -> ToTarget:
    """Up to the first evaluation at or above the target, of the run or at a width."""
    need_width(points, width)
    judged = evaluated(points, width)
    first = next((point for point in judged if point.at(width) >= target), None)
    return ToTarget(target, best(judged, width), None if first is None else spent_by(first))


def spent_by(point: Point) -> Spent:
    """What a run had spent by a point."""
    both = point.down + point.up
    return Spent(point.time, point.joules, both, point.flops, point.step + 1)


def not_reached(best: float) -> str:
    """How a run that missed its target appears in tables."""
    return f"not reached (best {percent(best)})"


def percent(share: float) -> str:
    """A share, for people."""
    return "–" if math.isnan(share) else f"{100 * share:.1f} %"


def need_width(points: Iterable[Point], width: float | None) -> None:
    """A width that nobody evaluated is a slip, not a target that was missed."""
    if width is None:
        return
    scored = [point.scores for point in points if point.scores]
    if scored and not any(f"accuracy@{width:g}" in scores for scores in scored):
        known = sorted(name for name in scored[0] if name.startswith("accuracy@"))
        raise ValueError(f"width {width:g} was not evaluated; there are {', '.join(known)}.")


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


Column = Literal["device", "level", "kind", "step", "width", "reason"]


def by(entries: Entries, column: Column) -> dict[Any, Totals]:
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


def _amounts(entries: Entries) -> dict[str, Any]:
    return {
        "seconds": entries.seconds,
        "joules": entries.joules,
        "down": entries.bits_down / 8,
        "up": entries.bits_up / 8,
        "flops": entries.flops,
    }


def reasons(entries: Entries) -> tuple[str, ...]:
    """Why each order was lost, without the numbers of the single case; "" if it was not."""
    return tuple(reason.partition(":")[0] for reason in entries.lost)


def losses(entries: Entries) -> dict[str, int]:
    """How many orders were lost for each reason, most frequent first."""
    return dict(Counter(reason for reason in reasons(entries) if reason).most_common())
