"""AnycostFL's aggregation: small and coarse updates count less, each entry by who sent it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from anyfleet.arrays import Floats
from anyfleet.core.signals import Signal, diagnostics
from anyfleet.core.updates import Updates
from anyfleet.elastic import channel_share, trained_share
from anyfleet.formulas.anycost import (
    anycost_alpha,
    anycost_divergence,
    anycost_gain,
    anycost_weights,
)
from anyfleet.papers import ANYCOST, Paper
from anyfleet.parts.aggregate.directions import by_device
from anyfleet.parts.aggregate.mean import Mean, Weighted


@dataclass(frozen=True)
class Aio(Weighted):
    """The mean of each coordinate over the devices whose codecs sent it (specification §1.12.3).

    A weight of `base` is divided by the squared divergence of the update from a complete one. The
    divergence follows from how much of the model the device trained and from the measured sent
    fraction, and is at least `floor`. For complete updates this is `base` itself.
    """

    base: Mean = field(default_factory=Mean)
    floor: float = 1e-3

    papers: ClassVar[tuple[Paper, ...]] = (ANYCOST,)
    provides: ClassVar[frozenset[Signal]] = diagnostics("weights", "mean_gain", "mean_divergence")

    def __post_init__(self) -> None:
        if not 0 < self.floor <= 1:
            raise ValueError(f"Aio.floor must lie in (0, 1], got {self.floor}.")

    def weigh(self, updates: Updates) -> Floats:
        weights = self.base.weigh(updates)
        return anycost_weights(_alphas(updates), updates.sent_fraction, weights, self.floor)

    def counted(self, updates: Updates) -> Updates:
        return updates.only_sent()

    def diagnostics_of(self, updates: Updates) -> Mapping[str, Any]:
        facts = _alphas(updates), updates.sent_fraction
        return {
            "weights": by_device(updates, self.weigh(updates)),
            "mean_gain": float(np.mean(anycost_gain(*facts))),
            "mean_divergence": float(np.mean(anycost_divergence(*facts))),
        }


def _alphas(updates: Updates) -> Floats:
    """Return AnycostFL's measure of each sub-model: 1 for the whole model."""
    blueprint, slices = updates.blueprint, updates.distinct_slices
    shares = ((channel_share(s, blueprint), trained_share(s, blueprint)) for s in slices)
    return np.array([anycost_alpha(*each) for each in shares])[updates.slice_index]
