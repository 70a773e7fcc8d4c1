"""A comparison of runs: what they are compared by."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from anyfleet.analysis.equal_budgets import Resource
from anyfleet.experiment import RoundRecord

Runs = Mapping[str, Mapping[int, Sequence[RoundRecord]]]  # by name, then by seed


@dataclass(frozen=True)
class Goal:
    """What runs are compared by: a target score at a width, and equal budgets of resources.

    Without a target it is the best score that all reach; without a budget, what all runs spent;
    without a metric, the one that the task is measured by.
    """

    target: float | None = None
    width: float | None = None
    equal: tuple[Resource, ...] = ()
    budget: float | None = None  # of the only resource
    metric: str | None = None
