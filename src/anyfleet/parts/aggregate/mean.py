"""The weighted mean of the updates, coordinate by coordinate: FedAvg and HeteroFL."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from torch import Tensor

from anyfleet.arrays import Floats
from anyfleet.core.messages import Aggregated, Params
from anyfleet.core.slots import Aggregate, State
from anyfleet.core.updates import Updates, add_delta
from anyfleet.core.view import View
from anyfleet.papers import FEDAVG, Paper


class Weighted(Aggregate):
    """Aggregators that take the weighted mean of each coordinate; subclasses say the weights."""

    @abstractmethod
    def weigh(self, updates: Updates) -> Floats:
        """Return one weight for each update; they need not sum to 1."""

    def counted(self, updates: Updates) -> Updates:
        """Return what of the updates counts; by default everything that was trained."""
        return updates

    def diagnostics_of(self, updates: Updates) -> Mapping[str, Any]:
        """Return the diagnostics of the round; by default none."""
        return {}

    def __call__(
        self, model: Params, updates: Updates, view: View, state: State, key: Tensor
    ) -> Aggregated:
        delta = self.counted(updates).mean(self.weigh(updates))
        return Aggregated(add_delta(model, delta), state, self.diagnostics_of(updates))


@dataclass(frozen=True)
class Mean(Weighted):
    """The mean of each coordinate over the devices that trained it.

    Coordinates that nobody trained keep their value. Weights are the devices' samples (FedAvg) or
    `"equal"` (HeteroFL, specification §0.2), times `(1 + staleness) ** -discount`.
    """

    weights: Literal["samples", "equal"] = "samples"  # what a device weighs by
    discount: float = 0.0  # exponent by which old updates weigh less

    papers: ClassVar[tuple[Paper, ...]] = (FEDAVG,)

    def __post_init__(self) -> None:
        if self.weights not in ("samples", "equal"):
            raise ValueError(f'Mean.weights must be "samples" or "equal", got {self.weights!r}.')
        if self.discount < 0:
            raise ValueError(f"Mean.discount must not be negative, got {self.discount}.")

    def weigh(self, updates: Updates) -> Floats:
        """Return one weight for each update; they need not sum to 1."""
        faded = np.power(1.0 + updates.staleness.astype(np.float64), -self.discount)
        if self.weights == "samples":
            return updates.samples * faded
        return np.where(updates.samples > 0, faded, 0.0)  # without data there is no vote
