"""Weights by agreement: who points where the others point counts more (FedAdp)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import numpy as np
from torch import Tensor

from anyfleet.arrays import Floats
from anyfleet.core.messages import Aggregated, Params
from anyfleet.core.slots import Aggregate
from anyfleet.core.updates import Updates
from anyfleet.core.view import View
from anyfleet.formulas.contribution import (
    fedadp_expected_decrease,
    fedadp_smoothed_angles,
    fedadp_weights,
)
from anyfleet.papers import FEDADP, Paper
from anyfleet.parts.aggregate.directions import Directions, by_device, directions
from anyfleet.parts.aggregate.mean import Mean, Weighted


class Angle(NamedTuple):
    """What is remembered of a device."""

    mean: float  # radians, over its visits
    visits: int  # in which it had a direction


Angles = Mapping[int, Angle]  # of devices that were there, by device


@dataclass(frozen=True)
class AngleWeighted(Aggregate):
    """The mean, with weights by how well a device's updates agree with the mean (specification §1.17).

    A weight of `base` is multiplied by e to the power of a map of the device's angle to the mean by
    `base`, averaged over its visits: from `sharpness` (agreement) down to 0 (opposition). With
    sub-models, angles are measured on the coordinates that the device trained.

    Without a direction (an update of length zero) a device keeps the angle it has, or has pi/2 if
    it has none; if the mean has none, the weights are those of `base`. An update that is not finite
    has no weight.
    """

    sharpness: float = 5.0
    base: Weighted = field(default_factory=Mean)

    papers: ClassVar[tuple[Paper, ...]] = (FEDADP,)
    provides: ClassVar[frozenset[str]] = frozenset(
        {
            "angles",
            "smoothed_angles",
            "weights",
            "expected_decrease",
            "expected_decrease_instantaneous",
            "expected_decrease_of_mean",
        }
    )

    def __post_init__(self) -> None:
        if not self.sharpness > 0:
            raise ValueError(
                f"AngleWeighted.sharpness must be positive, got {self.sharpness}. "
                "For weights that do not go by angles use Mean()."
            )

    def init(self, view: View) -> Angles:
        return {}

    def __call__(
        self, model: Params, state: Angles, updates: Updates, view: View, key: Tensor
    ) -> Aggregated:
        weighed, noted = self.base.weigh(updates), self.base.diagnostics_of(updates)
        updates = self.base.counted(updates)
        found = directions(updates, weighed)
        after = _learned(state, updates, found)
        angles = _remembered(after, updates, found)
        weights = self._weights(found, angles)
        change = updates.mean(weights)
        moved = {name: model[name] + change[name] for name in change}
        now = self._weights(found, found.angles)
        notes = {
            **noted,
            "angles": by_device(updates, found.angles),
            "smoothed_angles": by_device(updates, angles),
            "weights": by_device(updates, _shares(weights)),
            # specification §F.4: only with the angles of this very step it is never below the mean's.
            "expected_decrease": fedadp_expected_decrease(_shares(weights), found.angles),
            "expected_decrease_instantaneous": fedadp_expected_decrease(_shares(now), found.angles),
            "expected_decrease_of_mean": fedadp_expected_decrease(
                _shares(found.weights), found.angles
            ),
        }
        return Aggregated({**model, **moved}, after, notes)

    def _weights(self, found: Directions, angles: Floats) -> Floats:
        if not (found.means > 0).any():
            return found.weights  # no direction to agree with
        # Equal angles then give the weights of the mean, bit for bit.
        if np.ptp(angles[found.weights > 0]) == 0:
            return found.weights
        return fedadp_weights(found.weights, angles, self.sharpness)


def _learned(state: Angles, arrivals: Updates, found: Directions) -> Angles:
    """The angles of all devices after this step."""
    after = dict(state)
    for row in np.flatnonzero(found.known):
        device = int(arrivals.device[row])
        before = after.get(device, Angle(0.0, 0))
        visits = before.visits + 1
        mean = fedadp_smoothed_angles(
            np.array([before.mean]), np.array([visits]), found.angles[[row]]
        )
        after[device] = Angle(float(mean[0]), visits)
    return after


def _remembered(state: Angles, arrivals: Updates, found: Directions) -> Floats:
    """The angles that count, row by row."""
    pairs = zip(arrivals.device.tolist(), found.angles.tolist(), strict=True)
    return np.array([state[d].mean if d in state else now for d, now in pairs], dtype=np.float64)


def _shares(weights: Floats) -> Floats:
    total = weights.sum()
    return weights / total if total > 0 else weights
