"""Aggregates that order the values of every coordinate: the trimmed mean and the median.

Each coordinate is decided by those who trained it, whatever their slices and masks: one that three
devices trained has a median of three. All of them count alike, however many samples they say they
have, since such weights would let a single device outweigh the others.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from anyfleet.core.messages import Aggregated, Params
from anyfleet.core.slots import Aggregate, State
from anyfleet.core.updates import Updates
from anyfleet.core.view import View
from anyfleet.papers import BYZANTINE, Paper


class _ByRank(Aggregate):
    """What both have in common: who counts, and what becomes of the rest."""

    papers: ClassVar[tuple[Paper, ...]] = (BYZANTINE,)

    @abstractmethod
    def change(self, updates: Updates) -> dict[str, Tensor]:
        """Return the change of every coordinate; zero where nobody trained."""

    def __call__(
        self, model: Params, state: State, updates: Updates, view: View, key: Tensor
    ) -> Aggregated:
        # Without data there is no vote, and what is not finite has no rank.
        voting = (updates.samples > 0) & np.isfinite(updates.norms())
        change = self.change(updates.take(np.flatnonzero(voting)))
        moved = {name: model[name] + change[name] for name in change}
        return Aggregated({**model, **moved}, state)


@dataclass(frozen=True)
class TrimmedMean(_ByRank):
    """Per coordinate, the mean of those who trained it, without the extremes at both ends.

    Of n values `floor(share * n)` are left out at either end, so that with ten devices a share of
    0.2 withstands two that send whatever they like. Where few devices trained a coordinate,
    nothing may be left out: of four or fewer with that share.
    """

    share: float = 0.2

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
    """Per coordinate, the median of those who trained it; of an even number, of the middle two.

    It withstands any minority of those who trained a coordinate.
    """

    def change(self, updates: Updates) -> dict[str, Tensor]:
        """Return the median of every coordinate."""
        return updates.median()
