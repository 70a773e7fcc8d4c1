"""FedAdp's aggregation: updates that point where the mean points count more."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import numpy as np
from torch import Tensor

from anyfleet.arrays import Floats
from anyfleet.core.messages import Aggregated, Params
from anyfleet.core.signals import Signal, diagnostics
from anyfleet.core.slots import Aggregate
from anyfleet.core.updates import Updates, add_delta
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
    """The angle of a device, averaged over its updates."""

    mean: float  # radians
    visits: int  # updates that had a direction


Angles = Mapping[int, Angle]  # by device, of those that sent an update


@dataclass(frozen=True)
class AngleWeighted(Aggregate):
    """The mean, weighted by how well each device agrees with it (FedAdp, specification §1.17).

    A weight of `base` is multiplied by e to the power of a function of the device's angle to the
    mean of `base`: `sharpness` where they agree, down to 0 where they oppose each other. The angle
    is averaged over the updates of a device so far. With sub-models it is measured on the
    coordinates that the device trained.

    An update of length zero has no direction: its device keeps the angle it has, or pi/2 before it
    has one. If the mean has no direction, the weights are those of `base`. An update that is not
    finite has no weight.
    """

    sharpness: float = 5.0
    base: Weighted = field(default_factory=Mean)

    papers: ClassVar[tuple[Paper, ...]] = (FEDADP,)
    provides: ClassVar[frozenset[Signal]] = diagnostics(
        "angles",
        "smoothed_angles",
        "weights",
        "expected_decrease",
        "expected_decrease_instantaneous",
        "expected_decrease_of_mean",
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
        self, model: Params, updates: Updates, view: View, state: Angles, key: Tensor
    ) -> Aggregated:
        weights, inner = self.base.weigh(updates), self.base.diagnostics_of(updates)
        updates = self.base.counted(updates)
        found = directions(updates, weights)
        after = _averaged(state, updates, found)
        angles = _known_angles(after, updates, found)
        weights, now = self._weights(found, angles), self._weights(found, found.angles)
        diagnostics = {
            **inner,
            "angles": by_device(updates, found.angles),
            "smoothed_angles": by_device(updates, angles),
            "weights": by_device(updates, _shares(weights)),
            # Only with the angles of this very round never below the mean's (specification §F.4).
            "expected_decrease": fedadp_expected_decrease(_shares(weights), found.angles),
            "expected_decrease_instantaneous": fedadp_expected_decrease(_shares(now), found.angles),
            "expected_decrease_of_mean": fedadp_expected_decrease(
                _shares(found.weights), found.angles
            ),
        }
        return Aggregated(add_delta(model, updates.mean(weights)), after, diagnostics)

    def _weights(self, found: Directions, angles: Floats) -> Floats:
        if not (found.means > 0).any():
            return found.weights  # no direction to agree with
        # Equal angles then give the weights of the mean, bit for bit.
        if np.ptp(angles[found.weights > 0]) == 0:
            return found.weights
        return fedadp_weights(found.weights, angles, self.sharpness)


def _averaged(state: Angles, updates: Updates, found: Directions) -> Angles:
    """Return the angles of all devices after this round."""
    after = dict(state)
    device, angles = updates.device[found.known], found.angles[found.known]
    while len(device):
        # All devices at once; those that replied twice have their second angles after it.
        first = np.sort(np.unique(device, return_index=True)[1])
        own = device[first].tolist()
        before = [after.get(each, Angle(0.0, 0)) for each in own]
        visits = np.array([each.visits for each in before]) + 1
        past = np.array([each.mean for each in before])
        means = fedadp_smoothed_angles(past, visits, angles[first])
        after.update(zip(own, map(Angle, means.tolist(), visits.tolist()), strict=True))
        device, angles = np.delete(device, first), np.delete(angles, first)
    return after


def _known_angles(state: Angles, updates: Updates, found: Directions) -> Floats:
    """Return the angle that counts for each update."""
    pairs = zip(updates.device.tolist(), found.angles.tolist(), strict=True)
    return np.array([state[d].mean if d in state else now for d, now in pairs], dtype=np.float64)


def _shares(weights: Floats) -> Floats:
    """Return the weights divided by their sum, or as they are where it is 0."""
    total = weights.sum()
    return weights / total if total > 0 else weights
