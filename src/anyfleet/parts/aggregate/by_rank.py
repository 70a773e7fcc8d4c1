"""Aggregators that order the values of every coordinate: the trimmed mean and the median.

Each coordinate is decided by the devices that trained it, whatever their slices and masks: one that
three devices trained has a median of three. All devices count alike, however many samples they
report, since such weights would let a single device outweigh the others.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from anyfleet.core.messages import Aggregated, Params
from anyfleet.core.slots import Aggregate, State
from anyfleet.core.updates import Updates, add_delta
from anyfleet.core.view import View
from anyfleet.papers import BYZANTINE, Paper


class _ByRank(Aggregate):
    """The base of both: which devices count, and what happens to the other coordinates."""

    papers: ClassVar[tuple[Paper, ...]] = (BYZANTINE,)

    @abstractmethod
    def change(self, updates: Updates) -> dict[str, Tensor]:
        """Return the change of every coordinate; zero where nobody trained it."""

    def __call__(
        self, model: Params, updates: Updates, view: View, state: State, key: Tensor
    ) -> Aggregated:
        # A device without samples has no vote, and what is not finite has no rank.
        voting = (updates.samples > 0) & np.isfinite(updates.norms())
        delta = self.change(updates.take(np.flatnonzero(voting)))
        return Aggregated(add_delta(model, delta), state)


@dataclass(frozen=True)
class TrimmedMean(_ByRank):
    """The mean of each coordinate over the devices that trained it, without the extremes.

    Of n values `floor(share * n)` are left out at either end. With ten devices a share of 0.2
    withstands two that send whatever they like. Where four or fewer devices trained a coordinate,
    that share leaves nothing out.
    """

    share: float = 0.2  # of the values left out at either end

    def __post_init__(self) -> None:
        if not 0 <= self.share < 0.5:
            raise ValueError(
                f"TrimmedMean.share must lie in [0, 0.5), got {self.share}. It is left out at both "
                "ends; for the median use CoordinateMedian()."
            )

    def change(self, updates: Updates) -> dict[str, Tensor]:
        """Return the trimmed mean of every coordinate."""
        return updates.trimmed(self.share)


@dataclass(frozen=True)
class CoordinateMedian(_ByRank):
    """The median of each coordinate over the devices that trained it.

    Of an even number of values it is the mean of the middle two. It withstands any minority of the
    devices that trained a coordinate.
    """

    def change(self, updates: Updates) -> dict[str, Tensor]:
        """Return the median of every coordinate."""
        return updates.median()
