"""Diagnostics that the theory asks for: who trained what, and how far the updates agree."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from anyfleet.core.messages import Aggregated, Params
from anyfleet.core.ordered_stacks import base
from anyfleet.core.signals import Signal, diagnostics
from anyfleet.core.slots import Aggregate, Measure, State, Wrapper
from anyfleet.core.updates import Updates
from anyfleet.core.view import View
from anyfleet.formulas.contribution import fedadp_dissimilarity, fedadp_expected_decrease
from anyfleet.parts.aggregate.directions import by_device, directions
from anyfleet.parts.aggregate.mean import Mean


@dataclass(frozen=True)
class Diagnosed(Wrapper, Aggregate):
    """Another aggregator with more diagnostics; its model stays the same, bit for bit.

    * `coverage`: the share of the trainable coordinates that somebody trained; `regions`: the
      number of sets of coordinates that the same devices trained; `fewest`: the devices of the
      region that fewest trained (specification §F.2, |S_r| and |M*|); `omega_squared`: the largest
      share of the model's squared length that a device did not train.
    * `norms` and `angles` of the updates by device, the angles to the mean by samples;
      `divergence`: their mean distance from it; `dissimilarity_least` and `_most`: A and B, the
      extremes of their lengths relative to its; `expected_decrease` of that mean (§F.4).

    Lengths are of updates, which are gradients times the learning rate and the local steps. With
    sub-models, a device is compared with the mean on its own coordinates. Where the inner
    aggregator has diagnostics of the same name, its own stay. Every device reports the numbers
    named in `reported` ("fisher", "norm"), which are fields of the ledger. `measures` brings in
    what devices measure for it, as `Fisher()`, unless another part does.
    """

    inner: Aggregate = field(default_factory=Mean)
    reported: tuple[str, ...] = ()
    measures: tuple[Measure, ...] = ()

    provides: ClassVar[frozenset[Signal]] = diagnostics(
        "coverage",
        "regions",
        "fewest",
        "omega_squared",
        "norms",
        "angles",
        "divergence",
        "dissimilarity_least",
        "dissimilarity_most",
        "expected_decrease",
    )

    @property
    def reports(self) -> frozenset[str]:
        return frozenset(self.reported)

    def __call__(
        self, model: Params, updates: Updates, view: View, state: State, key: Tensor
    ) -> Aggregated:
        found = self.inner(model, updates, view, state, key)
        diagnostics = {
            **_coverage(model, updates, view),
            **_agreement(updates),
            **found.diagnostics,
        }
        return Aggregated(found.model, found.state, diagnostics)


def _coverage(model: Params, updates: Updates, view: View) -> Mapping[str, Any]:
    """Return how much of the model was trained, and by how many devices."""
    regions = updates.regions()
    trainable = frozenset(view.blueprint.trained())
    varied = {base(name) for name in model if "@" in name}  # kept per width, under other names
    names = [name for name in model if base(name) in trainable and name not in varied]
    whole = sum(model[name].numel() for name in names)
    common = {name: model[name] for name in names if "@" not in name}
    length = np.sqrt(sum(float(value.double().square().sum()) for value in common.values()))
    inside = float(updates.tree_norms(common).min(initial=np.inf))
    return {
        "coverage": int(regions.coordinates.sum()) / whole if whole else 0.0,
        "regions": len(regions.devices),
        "fewest": int(regions.devices.min(initial=len(updates))),
        "omega_squared": max(0.0, 1 - (inside / length) ** 2) if length else 0.0,
    }


def _agreement(updates: Updates) -> Mapping[str, Any]:
    """Return how the updates lie around their mean."""
    found = directions(updates, updates.samples)
    total = found.weights.sum()
    shares = found.weights / total if total else found.weights
    moved = found.finite & ((found.norms > 0) | (found.means > 0))
    with np.errstate(divide="ignore"):  # beside a mean of length zero everything is infinite
        bounds = fedadp_dissimilarity(found.norms[moved] / found.means[moved], 1.0)
    return {
        "norms": by_device(updates, np.where(found.finite, found.norms, np.nan)),
        "angles": by_device(updates, found.angles),
        "divergence": float(found.distances[found.finite].mean()) if found.finite.any() else np.nan,
        "dissimilarity_least": bounds.least,
        "dissimilarity_most": bounds.most,
        "expected_decrease": fedadp_expected_decrease(shares, found.angles),
    }
