"""Comparisons: what runs with several seeds learned and spent, and how they differ.

>>> from anyfleet.analysis.comparison import Goal, compare
>>> from anyfleet.experiment import RoundRecord
>>> def run(accuracy):
...     nan = float("nan")
...     return [RoundRecord(0, 2.0, 1e6, 1e6, 1e9, 5.0, 4, 0, nan, nan, {"accuracy": accuracy})]
>>> runs = {"fedavg": {0: run(0.50), 1: run(0.60)}, "mine": {0: run(0.54), 1: run(0.66)}}
>>> found = compare(runs, Goal(target=0.5))
>>> difference = found.difference("score", "mine")
>>> f"{difference.mean:.2f} from {difference.low:.2f} to {difference.high:.2f}"
'0.05 from -0.08 to 0.18'
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeVar

from anyfleet.analysis.equal_budgets import Resource, Within, common_amount, within
from anyfleet.analysis.intervals import Estimate, estimate, paired_difference
from anyfleet.analysis.metric import Metric
from anyfleet.analysis.summaries import (
    Runs,
    Spent,
    Summary,
    ToTarget,
    at_widths,
    common_score,
    evaluated,
    known_metrics,
    measured_by,
    metric_of,
    summarise,
    to_target,
)
from anyfleet.experiment import RoundRecord

Axis = Literal["rounds", "time", "energy", "bytes", "flops"]  # over which runs are drawn
T = TypeVar("T")


@dataclass(frozen=True)
class Goal:
    """What runs are compared by: a metric, a target at a width, equal budgets, a reference.

    Without a metric it is that of each run; without a target, the best score that all reach;
    without a budget, what all runs spent; without a reference, the first run.
    """

    target: float | None = None
    width: float | None = None
    equal: tuple[Resource, ...] = ()
    budget: float | None = None  # of the only resource
    metric: str | None = None
    reference: str | None = None  # the run from which differences are taken
    over: tuple[Axis, ...] = ()  # horizontal axes of the picture; none: as is usual


@dataclass(frozen=True)
class Quantity:
    """One quantity of runs: by name and seed, with its unit. Where it is not known, it is left out.

    `metric` names the metric of a score, and is "" for the metric by which each run is measured.
    """

    values: Mapping[str, Mapping[int, float]]
    unit: str = ""  # s, J, B, FLOP; "": a count or a score
    metric: str | None = None  # None: an amount


@dataclass(frozen=True)
class Comparison:
    """What was found about runs; by name, then by seed. docs/runs.md lists the quantities."""

    goal: Goal
    runs: Runs  # as measured by the metric of the goal
    reference: str  # the run from which differences are taken
    common: float  # score that all reach; NaN if they are measured by different metrics
    target: float
    costs: Mapping[str, Mapping[int, ToTarget]]
    amounts: Mapping[Resource, float]
    lessons: Mapping[Resource, Mapping[str, Mapping[int, Within]]]
    quantities: Mapping[str, Quantity]

    def mean(self, number: str, name: str) -> Estimate:
        """Return the mean of a number over the seeds of a run, with its interval."""
        values = self.quantities[number].values.get(name, {})
        return estimate(list(values.values()), len(self.runs[name]))

    def difference(self, number: str, name: str) -> Estimate:
        """Return the mean of a run's number less that of the reference, over their common seeds.

        Nothing is known of scores by different metrics.
        """
        found, seeds = self.quantities[number], self.common_seeds(name)
        comparable = found.metric != "" or self.metric(name) == self.metric(self.reference)
        values = found.values if comparable else {}
        return paired_difference(values.get(name, {}), values.get(self.reference, {}), seeds)

    def common_seeds(self, name: str) -> tuple[int, ...]:
        """Return the seeds that a run has in common with the reference."""
        others = self.runs.get(self.reference, {})
        return tuple(seed for seed in self.runs[name] if seed in others)

    def metric(self, name: str) -> Metric | None:
        """Return the metric by which a run is measured; None if it has no seeds yet."""
        records = next(iter(self.runs[name].values()), None)
        return metric_of(records) if records else None

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """The metrics by which the runs are measured, each once."""
        found = (self.metric(name) for name in self.runs)
        return tuple(dict.fromkeys(metric for metric in found if metric))


def compare(runs: Runs, goal: Goal | None = None) -> Comparison:
    """Return what there is to tell about runs; raise ValueError for what they do not have.

    A name may have no seeds yet, or fewer than others, as in a study that is not finished.
    """
    goal = goal or Goal()
    reference = _reference(runs, goal)
    if goal.metric is not None:
        runs = _by_metric(runs, goal.metric)
    everybody = [records for group in runs.values() for records in group.values()]
    target = common_score(everybody, goal.width) if goal.target is None else goal.target
    amounts = {
        each: common_amount(everybody, each) if goal.budget is None else goal.budget
        for each in goal.equal
    }
    costs = _each(runs, lambda records: to_target(records, target, goal.width))
    lessons: dict[Resource, Mapping[str, Mapping[int, Within]]] = {}
    for resource, amount in amounts.items():
        lessons[resource] = _each(runs, _at_most(resource, amount, goal.width))
    quantities = dict(_quantities(runs, costs, lessons))
    common = common_score(everybody)
    return Comparison(goal, runs, reference, common, target, costs, amounts, lessons, quantities)


def _reference(runs: Runs, goal: Goal) -> str:
    if goal.reference is not None and goal.reference not in runs:
        known = ", ".join(runs) or "no runs"
        raise ValueError(f"there is no run {goal.reference!r} to compare with; there are {known}.")
    return goal.reference or next(iter(runs), "")


def _by_metric(runs: Runs, metric: str) -> Runs:
    known = dict.fromkeys(
        name
        for group in runs.values()
        for records in group.values()
        for name in known_metrics(records)
    )
    if known and metric not in known:
        raise ValueError(f"no run was measured by {metric!r}; there are {', '.join(known)}.")
    return _each(runs, lambda records: measured_by(records, metric))


def _each(runs: Runs, of: Callable[[Sequence[RoundRecord]], T]) -> dict[str, dict[int, T]]:
    """Return a value for every run."""
    return {
        name: {seed: of(records) for seed, records in group.items()} for name, group in runs.items()
    }


def _at_most(
    resource: Resource, amount: float, width: float | None
) -> Callable[[Sequence[RoundRecord]], Within]:
    return lambda records: within(records, resource, amount, width)


# --- quantities ---------------------------------------------------------------------------------

_ENDS: Mapping[str, tuple[str, Callable[[Summary], float]]] = MappingProxyType(
    {
        "rounds": ("", lambda end: end.rounds),
        "seconds": ("s", lambda end: end.time),
        "joules": ("J", lambda end: end.joules),
        "bytes_down": ("B", lambda end: end.down),
        "bytes_up": ("B", lambda end: end.up),
        "flops": ("FLOP", lambda end: end.flops),
        "failures": ("", lambda end: end.failures),
        "unmeasured": ("", lambda end: end.unmeasured),
    }
)
_SPENT: Mapping[str, tuple[str, Callable[[Spent], float]]] = MappingProxyType(
    {
        "seconds": ("s", lambda spent: spent.time),
        "joules": ("J", lambda spent: spent.joules),
        "bytes": ("B", lambda spent: spent.bytes),
        "flops": ("FLOP", lambda spent: spent.flops),
        "rounds": ("", lambda spent: spent.rounds),
    }
)


def _quantities(
    runs: Runs,
    costs: Mapping[str, Mapping[int, ToTarget]],
    lessons: Mapping[Resource, Mapping[str, Mapping[int, Within]]],
) -> Iterator[tuple[str, Quantity]]:
    """Yield every quantity of a comparison under its name."""
    measured = {
        name: {seed: records for seed, records in group.items() if evaluated(records)}
        for name, group in runs.items()
    }
    ends = _each(runs, summarise)
    scored = _each(measured, summarise)
    yield "score", Quantity(_taken(scored, lambda end: end.score), metric="")
    yield "best", Quantity(_taken(scored, lambda end: end.best), metric="")
    yield from _metrics(ends)
    yield from _widths(runs)
    for name, (unit, amount) in _ENDS.items():
        yield name, Quantity(_taken(ends, amount), unit)
    yield "deviation_over_devices", Quantity(_taken(ends, _over_devices), metric="accuracy")
    reached = {
        name: {seed: cost.spent for seed, cost in group.items() if cost.spent}
        for name, group in costs.items()
    }
    for name, (unit, spent) in _SPENT.items():
        yield f"target_{name}", Quantity(_taken(reached, spent), unit)
    for resource, found in lessons.items():
        known = {
            name: {seed: each for seed, each in group.items() if each.spent}
            for name, group in found.items()
        }
        yield f"{resource}_score", Quantity(_taken(known, lambda each: each.score), metric="")
        yield f"{resource}_best", Quantity(_taken(known, lambda each: each.best), metric="")
        by_then = {
            name: {seed: each.spent for seed, each in group.items() if each.spent}
            for name, group in known.items()
        }
        for name, (unit, spent) in _SPENT.items():
            yield f"{resource}_{name}", Quantity(_taken(by_then, spent), unit)


def _taken(
    groups: Mapping[str, Mapping[int, T]], number: Callable[[T], float | None]
) -> dict[str, dict[int, float]]:
    """Return a number of every run, without those that have none."""
    return {
        name: {seed: found for seed, each in group.items() if (found := number(each)) is not None}
        for name, group in groups.items()
    }


def _metrics(ends: Mapping[str, Mapping[int, Summary]]) -> Iterator[tuple[str, Quantity]]:
    """Yield the loss and all further metrics, at the last evaluation."""
    told = [end for group in ends.values() for end in group.values()]
    if any(not math.isnan(end.loss) for end in told):
        yield "metric_loss", Quantity(_taken(ends, lambda end: end.loss), metric="loss")
    for other in dict.fromkeys(name for end in told for name in end.others):
        yield f"metric_{other}", Quantity(_taken(ends, _of(other)), metric=other)


def _of(other: str) -> Callable[[Summary], float | None]:
    return lambda end: end.others.get(other)


def _over_devices(end: Summary) -> float | None:
    return end.fairness.deviation if end.fairness else None


def _widths(runs: Runs) -> Iterator[tuple[str, Quantity]]:
    """Yield the last scores of the shared model, width by width from the largest."""
    found = _each(runs, at_widths)
    widths = {width for group in found.values() for each in group.values() for width in each}
    for width in sorted(widths, reverse=True):
        yield f"score@{width:g}", Quantity(_taken(found, _at(width)), metric="")


def _at(width: float) -> Callable[[Mapping[float, float]], float | None]:
    return lambda scores: scores.get(width)
