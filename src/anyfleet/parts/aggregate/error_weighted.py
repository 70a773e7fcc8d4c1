"""FedHQ's aggregation: coarsely quantised updates count less."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from anyfleet.arrays import Floats
from anyfleet.core.updates import Updates
from anyfleet.formulas.fedhq import fedhq_weights
from anyfleet.papers import FEDHQ, Paper
from anyfleet.parts.aggregate.directions import by_device
from anyfleet.parts.aggregate.mean import Mean, Weighted


@dataclass(frozen=True)
class ErrorWeighted(Weighted):
    """The mean, with a weight of `base` divided by 1 + q (specification §1.16).

    q is the error of a device's own message, squared and relative to its update, which it reports.
    That the weights have this very form is not verified: the published abstract says that they go
    by each device's error.
    """

    base: Mean = field(default_factory=Mean)

    papers: ClassVar[tuple[Paper, ...]] = (FEDHQ,)
    reports: ClassVar[frozenset[str]] = frozenset({"distortion"})
    provides: ClassVar[frozenset[str]] = frozenset({"weights"})

    def weigh(self, updates: Updates) -> Floats:
        reported = updates.report("distortion")
        # What is not reported, or nonsense, is no reason to count more than an exact update.
        errors = np.maximum(np.where(np.isnan(reported), np.inf, reported), 0.0)
        return fedhq_weights(errors, self.base.weigh(updates))

    def diagnostics_of(self, updates: Updates) -> Mapping[str, Any]:
        return {"weights": by_device(updates, self.weigh(updates))}
