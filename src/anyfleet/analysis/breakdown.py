"""Whom a model serves: its accuracy by class, by device and by group of devices."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from anyfleet.arrays import Floats, Ints
from anyfleet.core.evaluation import TestedModel, own_tests, sample_scores
from anyfleet.core.objectives import Task

Detail = Literal["classes", "devices", "groups"]
_METRIC = "accuracy"
_TENTH = 10  # percentile


@dataclass(frozen=True)
class Fairness:
    """How unequally devices are served; over those that have test data, each counting once."""

    mean: float
    deviation: float  # of the devices as they are: nobody was sampled
    worst: float
    tenth: float  # a tenth of the devices are at or below it


@dataclass(frozen=True)
class Breakdown:
    """The accuracy of the shared model at one width, taken apart; empty what was not asked for.

    By class on the common test set, NaN for a class that is not in it. By device on the device's
    own test data, NaN without any; by group on those of its devices together.
    """

    width: float
    classes: tuple[float, ...] = ()
    devices: tuple[float, ...] = ()
    groups: dict[str, float] = field(default_factory=dict)

    @property
    def fairness(self) -> Fairness:
        """Over the devices; NaN when they were not asked for, or none has test data."""
        known = np.array([share for share in self.devices if not math.isnan(share)])
        if not len(known):
            return Fairness(math.nan, math.nan, math.nan, math.nan)
        return Fairness(
            mean=float(known.mean()),
            deviation=float(known.std()),
            worst=float(known.min()),
            tenth=float(np.percentile(known, _TENTH)),
        )


@dataclass(frozen=True, eq=False)
class Groups:
    """Which devices belong together."""

    names: tuple[str, ...]
    of: Ints  # of every device


def named(names: Sequence[str], of: Ints) -> Groups:
    """Groups by name; one without a name, or with that of another, gets its number."""
    called = [name or f"group {number}" for number, name in enumerate(names)]
    apart = (
        name if called.count(name) == 1 else f"{name} ({number})"
        for number, name in enumerate(called)
    )
    return Groups(tuple(apart), of.astype(np.int64))


def complaints(details: Collection[Detail], task: Task) -> list[str]:
    """Why a task's accuracy cannot be taken apart like this."""
    found = []
    if details and _METRIC not in task.metrics:
        measured = ", ".join(task.metrics) or "nothing but its loss"
        found.append(f"need a task that is judged by accuracy; this one measures {measured}.")
    if "classes" in details and not (task.classified and task.test.y.ndim == 1):
        found.append(
            '"classes" needs a task whose samples each have one class; leave it out for this one.'
        )
    if {"devices", "groups"} & set(details) and not len(own_tests(task)[0]):
        found.append(
            '"devices" and "groups" need test data on devices, and there are none: give the task '
            "a test_share above 0."
        )
    return found


def take_apart(
    task: Task, model: TestedModel, details: Collection[Detail], groups: Groups, width: float
) -> Breakdown:
    """The accuracy of a model by whatever was asked for."""
    classes: tuple[float, ...] = ()
    devices: tuple[float, ...] = ()
    by_group: dict[str, float] = {}
    if "classes" in details:
        hits = sample_scores(task, model, task.test, _METRIC)
        classes = _means(hits, task.test.y.cpu().numpy(), task.classes)
    if {"devices", "groups"} & set(details):
        data, owners = own_tests(task)
        hits = sample_scores(task, model, data, _METRIC)
        if "devices" in details:
            devices = _means(hits, owners, task.devices)
        if "groups" in details:
            shares = _means(hits, groups.of[owners], len(groups.names))
            by_group = dict(zip(groups.names, shares, strict=True))
    return Breakdown(width, classes, devices, by_group)


def _means(values: Floats, numbers: Ints, count: int) -> tuple[float, ...]:
    """The mean of the values with each number; what carries none of them is left out."""
    known = (numbers >= 0) & (numbers < count)
    values, numbers = values[known], numbers[known]
    sizes = np.bincount(numbers, minlength=count)
    sums = np.bincount(numbers, weights=values, minlength=count)
    means = np.divide(sums, sizes, out=np.full(count, np.nan), where=sizes > 0)
    return tuple(means.tolist())
