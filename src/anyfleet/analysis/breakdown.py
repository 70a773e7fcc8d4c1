"""Breakdowns: the accuracy of a model by class, by device and by group of devices."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from anyfleet.arrays import Floats, Ints
from anyfleet.core.evaluation import Examination, TestedModel, examine, own_tests
from anyfleet.core.objectives import Task

Detail = Literal["classes", "devices", "groups"]
_METRIC = "accuracy"
_TENTH = 10  # percentile


@dataclass(frozen=True)
class Fairness:
    """How unequal accuracies are over the devices with test data, each counting once."""

    mean: float
    deviation: float  # over all devices, not that of a sample
    worst: float
    tenth: float  # percentile: a tenth of the devices are at or below it


@dataclass(frozen=True)
class Breakdown:
    """The accuracy of the shared model at one width, by class, device and group.

    What was not asked for is empty. By class it is measured on the common test set, NaN for a class
    that is not in it; by device on the device's own test data, NaN without any; by group on those
    of its devices together.
    """

    width: float
    classes: tuple[float, ...] = ()
    devices: tuple[float, ...] = ()
    groups: dict[str, float] = field(default_factory=dict)

    @property
    def fairness(self) -> Fairness:
        """The spread over devices; NaN if they were not asked for, or none has test data."""
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
    """The groups of a fleet, and the group of every device."""

    names: tuple[str, ...]
    of: Ints  # the group of every device, as an index into `names`


def named(names: Sequence[str], of: Ints) -> Groups:
    """Return groups by name; one without a name of its own gets its number."""
    called = [name or f"group {number}" for number, name in enumerate(names)]
    apart = (
        name if called.count(name) == 1 else f"{name} ({number})"
        for number, name in enumerate(called)
    )
    return Groups(tuple(apart), of.astype(np.int64))


def complaints(details: Collection[Detail], task: Task) -> list[str]:
    """Return why the accuracy of a task cannot be broken down like this; empty if it can."""
    found = []
    if details and _METRIC not in task.metrics:
        measured = ", ".join(task.metrics) or "nothing but its loss"
        found.append(f"needs a task that measures accuracy; this one measures {measured}.")
    if "classes" in details and not (task.classified and task.test.y.ndim == 1):
        found.append(
            '"classes" needs a task whose samples have one class each; leave it out for this one.'
        )
    if {"devices", "groups"} & set(details) and not len(own_tests(task)[0]):
        found.append(
            '"devices" and "groups" need test data on devices, and there are none: give the task '
            "a test_share above 0."
        )
    return found


@dataclass(frozen=True, eq=False)
class Examinations:
    """What models do on test data, as far as an evaluation asks for it."""

    common: Examination  # on the common test set
    own: Examination | None  # on the devices' own test data


def examine_all(
    task: Task, models: Sequence[TestedModel], details: Collection[Detail], workers: int = 1
) -> Examinations:
    """Measure models on all test data that scores and `details` need; `examine` says how."""
    keep = _METRIC if "classes" in details else ""
    common = examine(task, models, task.test, keep=keep, workers=workers)
    if not {"devices", "groups"} & set(details):
        return Examinations(common, None)
    data, _ = own_tests(task)
    return Examinations(common, examine(task, models, data, keep=_METRIC, workers=workers))


def take_apart(
    task: Task,
    found: Examinations,
    details: Collection[Detail],
    groups: Groups,
    widths: Sequence[float],
) -> tuple[Breakdown, ...]:
    """Return the accuracy at every width by class, device or group, as asked for."""
    if not details:
        return ()
    breakdowns = [Breakdown(width) for width in widths]
    if "classes" in details:
        labels = task.test.y.cpu().numpy()
        breakdowns = [
            replace(each, classes=_means(hits, labels, task.classes))
            for each, hits in zip(breakdowns, found.common.samples(), strict=True)
        ]
    if found.own is not None:
        _, owners = own_tests(task)
        breakdowns = [
            replace(
                each,
                devices=_means(hits, owners, task.devices) if "devices" in details else (),
                groups=_by_group(hits, owners, groups) if "groups" in details else {},
            )
            for each, hits in zip(breakdowns, found.own.samples(), strict=True)
        ]
    return tuple(breakdowns)


def _by_group(hits: Floats, owners: Ints, groups: Groups) -> dict[str, float]:
    """Return the mean of the values of every group."""
    shares = _means(hits, groups.of[owners], len(groups.names))
    return dict(zip(groups.names, shares, strict=True))


def _means(values: Floats, numbers: Ints, count: int) -> tuple[float, ...]:
    """Return the mean of the values with each number from 0 on, NaN for a number without any."""
    known = (numbers >= 0) & (numbers < count)
    values, numbers = values[known], numbers[known]
    sizes = np.bincount(numbers, minlength=count)
    sums = np.bincount(numbers, weights=values, minlength=count)
    means = np.divide(sums, sizes, out=np.full(count, np.nan), where=sizes > 0)
    return tuple(means.tolist())
