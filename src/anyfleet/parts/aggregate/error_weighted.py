"""FedHQ's aggregation: updates that were quantised coarsely count less."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from anyfleet.arrays import Floats
from anyfleet.core.signals import Signal, diagnostics
from anyfleet.core.updates import Updates
from anyfleet.formulas.fedhq import fedhq_weights
from anyfleet.papers import FEDHQ, Paper
from anyfleet.parts.aggregate.directions import by_device
from anyfleet.parts.aggregate.mean import Mean, Weighted


@dataclass(frozen=True)
class ErrorWeighted(Weighted):
    """The mean, with the weights of `base` divided by 1 + q (specification §1.16).

    q is the distortion of a device's own message, which it reports: squared error over squared
    norm. The published abstract says that weights depend on each device's error; that they have
    this very form is not verified.
    """

    base: Mean = field(default_factory=Mean)

    papers: ClassVar[tuple[Paper, ...]] = (FEDHQ,)
    reports: ClassVar[frozenset[str]] = frozenset({"distortion"})
    provides: ClassVar[frozenset[Signal]] = diagnostics("weights")

    def weigh(self, updates: Updates) -> Floats:
        reported = updates.report("distortion")
        # What is not reported, or nonsense, is no reason to count more than an exact update.
        errors = np.maximum(np.where(np.isnan(reported), np.inf, reported), 0.0)
        return fedhq_weights(errors, self.base.weigh(updates))

    def diagnostics_of(self, updates: Updates) -> Mapping[str, Any]:
        return {"weights": by_device(updates, self.weigh(updates))}
