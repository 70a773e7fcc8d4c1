"""The directions of the updates of a round, compared with their mean."""

from dataclasses import dataclass

import numpy as np

from anyfleet.arrays import Flags, Floats
from anyfleet.core.updates import Updates
from anyfleet.formulas.contribution import fedadp_angles


@dataclass(frozen=True, eq=False)
class Directions:
    """Every update beside the mean of all, on the coordinates that its device trained.

    The mean is over those updates that are finite; the others have no direction.
    """

    finite: Flags
    weights: Floats  # in the mean, not normalised
    norms: Floats  # of the updates
    means: Floats  # the length of the mean
    dots: Floats  # of both
    angles: Floats  # radians; pi/2 where one of the two has no direction

    @property
    def known(self) -> Flags:
        """The updates whose angle means something, as booleans."""
        known: Flags = (self.norms > 0) & (self.means > 0)
        return known

    @property
    def distances(self) -> Floats:
        """The distance from every update to the mean."""
        squares = self.norms**2 - 2 * self.dots + self.means**2
        distances: Floats = np.sqrt(np.maximum(squares, 0.0))
        return distances


def directions(updates: Updates, weights: Floats) -> Directions:
    """Return how the updates compare with their mean by these weights."""
    norms = updates.norms()
    finite = np.isfinite(norms)
    counted = np.where(finite, weights, 0.0)
    mean = updates.mean(counted)
    dots = np.where(finite, updates.dots(mean), 0.0)
    norms, means = np.where(finite, norms, 0.0), updates.tree_norms(mean)
    return Directions(finite, counted, norms, means, dots, fedadp_angles(dots, norms, means))


def by_device(updates: Updates, values: Floats) -> dict[int, float]:
    """Return one number for each device, for the record; the last if it sent two updates."""
    return dict(zip(updates.device.tolist(), values.tolist(), strict=True))
