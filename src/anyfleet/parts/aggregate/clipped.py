"""A bound on the length of updates: longer ones are shortened before another aggregator."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from anyfleet.arrays import Floats
from anyfleet.core.messages import Aggregated, Params
from anyfleet.core.signals import Signal, diagnostics
from anyfleet.core.slots import Aggregate, State, Wrapper
from anyfleet.core.updates import Updates
from anyfleet.core.view import View
from anyfleet.errors import refuse
from anyfleet.papers import CLIPPING, Paper
from anyfleet.parts.aggregate.mean import Mean


@dataclass(frozen=True)
class Clipped(Wrapper, Aggregate):
    """Another aggregator, given updates of which none is much longer than the others.

    An update that is too long keeps its direction and is shortened to the bound: to the Euclidean
    `length` if one is given, else to `times` the median of the round. That median is of root mean
    squares over trained coordinates, so that narrow and wide slices compare; updates that change
    nothing do not enter it. `Clipped()` is the clipped mean. Updates that are not finite are left
    out.
    """

    inner: Aggregate = field(default_factory=Mean)  # aggregates the clipped updates
    times: float = 1.0
    length: float | None = None

    papers: ClassVar[tuple[Paper, ...]] = (CLIPPING,)
    provides: ClassVar[frozenset[Signal]] = diagnostics("clipped", "clipped_count")

    def __post_init__(self) -> None:
        refuse(
            [
                ""
                if 0 < self.times < np.inf
                else f"Clipped.times must be a positive number, got {self.times}.",
                ""
                if self.length is None or self.length > 0
                else f"Clipped.length must be positive, got {self.length}.",
            ]
        )

    def __call__(
        self, model: Params, updates: Updates, view: View, state: State, key: Tensor
    ) -> Aggregated:
        updates = updates.take(np.flatnonzero(np.isfinite(updates.norms())))
        if not len(updates):
            return Aggregated(model, state, _diagnostics(updates, np.ones(0)))
        factors = self._factors(updates)
        found = self.inner(model, updates.scaled(factors), view, state, key)
        diagnostics = {**found.diagnostics, **_diagnostics(updates, factors)}
        return Aggregated(found.model, found.state, diagnostics)

    def _factors(self, updates: Updates) -> Floats:
        """Return the number by which each update is multiplied: 1 leaves it as it is."""
        if self.length is not None:
            found, bound = updates.norms(), self.length
        else:
            found = updates.root_mean_squares()
            bound = self.times * float(np.median(found[found > 0])) if found.any() else np.inf
        long = found > bound
        return np.where(long, bound / np.where(long, found, 1.0), 1.0)


def _diagnostics(updates: Updates, factors: Floats) -> Mapping[str, Any]:
    """Return which devices' updates were shortened."""
    clipped = tuple(updates.device[factors < 1].tolist())
    return {"clipped": clipped, "clipped_count": len(clipped)}
