"""The mean of what arrived, coordinate by coordinate."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from torch import Tensor

from anyfleet.arrays import Floats
from anyfleet.core.messages import Aggregated, Params
from anyfleet.core.slots import Aggregate, State
from anyfleet.core.updates import Updates
from anyfleet.core.view import View
from anyfleet.papers import FEDAVG, Paper


class Weighted(Aggregate):
    """Per coordinate, a weighted mean over devices; subclasses say by which weights, of what."""

    @abstractmethod
    def weigh(self, updates: Updates) -> Floats:
        """One weight per arrival, not normalised."""

    def counted(self, updates: Updates) -> Updates:
        """What of the updates counts."""
        return updates

    def diagnostics_of(self, updates: Updates) -> Mapping[str, Any]:
        """What belongs into the record of the step."""
        return {}

    def __call__(
        self, model: Params, state: State, updates: Updates, view: View, key: Tensor
    ) -> Aggregated:
        change = self.counted(updates).mean(self.weigh(updates))
        moved = {name: model[name] + change[name] for name in change}
        return Aggregated({**model, **moved}, state, self.diagnostics_of(updates))


@dataclass(frozen=True)
class Mean(Weighted):
    """Per coordinate, the mean over the devices that trained it; the others keep their value.

    Weights are the devices' samples (FedAvg) or `"equal"` (HeteroFL), specification §0.2, times
    `(1 + staleness) ** -discount`.
    """

    weights: Literal["samples", "equal"] = "samples"
    discount: float = 0.0

    papers: ClassVar[tuple[Paper, ...]] = (FEDAVG,)

    def __post_init__(self) -> None:
        if self.weights not in ("samples", "equal"):
            raise ValueError(f'Mean.weights must be "samples" or "equal", got {self.weights!r}.')
        if self.discount < 0:
            raise ValueError(f"Mean.discount must not be negative, got {self.discount}.")

    def weigh(self, updates: Updates) -> Floats:
        """One weight per arrival, not normalised."""
        faded = np.power(1.0 + updates.staleness.astype(np.float64), -self.discount)
        if self.weights == "samples":
            return updates.samples * faded
        return np.where(updates.samples > 0, faded, 0.0)  # without data there is no vote
