"""Optimal Aggregation: updates that work against the others are left out."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, get_args

import numpy as np
from torch import Tensor

from anyfleet import rng
from anyfleet.arrays import Floats, Ints
from anyfleet.core.messages import Aggregated, Params
from anyfleet.core.signals import ServerSamples, Signal, diagnostics
from anyfleet.core.slots import Aggregate, State, Wrapper
from anyfleet.core.updates import Updates
from anyfleet.core.view import View
from anyfleet.errors import refuse
from anyfleet.formulas.contribution import OptimalSubset as Remaining
from anyfleet.formulas.contribution import Statistic, Stopping, optimal_subset, update_alignment
from anyfleet.papers import FEDPNS, THESIS, Paper
from anyfleet.parts.aggregate.mean import Mean


@dataclass(frozen=True)
class Subset(Wrapper, Aggregate):
    """Another aggregator, given the updates that go well together (specification §1.18).

    The device whose removal makes the other updates agree most is `labelled`. If the server loss
    does not rise without its update, it is `excluded` and the next one is looked for; if it rises,
    the update stays and the search ends. At least a `share` of the updates remains
    (`left="thesis"`: one fewer; `"code"`: all but two). Updates that are not finite are excluded
    from the beginning, without a label.

    `statistic="mean"` is the thesis' own, which labels a device in every round. With sub-models,
    updates are compared on the coordinates that everybody trained.
    """

    inner: Aggregate = field(default_factory=Mean)  # aggregates the updates that remain
    share: float = 0.7
    statistic: Statistic = "sum"
    left: Stopping = "share"

    papers: ClassVar[tuple[Paper, ...]] = (FEDPNS, THESIS)
    requires: ClassVar[frozenset[Signal]] = frozenset({ServerSamples()})
    provides: ClassVar[frozenset[Signal]] = diagnostics(
        "labelled", "excluded", "labelled_count", "excluded_count", "alignment", "alignment_after"
    )

    def __post_init__(self) -> None:
        refuse(
            [
                ""
                if 0 < self.share <= 1
                else f"Subset.share must lie in (0, 1], got {self.share}.",
                _one_of("statistic", self.statistic, get_args(Statistic)),
                _one_of("left", self.left, get_args(Stopping)),
            ]
        )

    def __call__(
        self, model: Params, updates: Updates, view: View, state: State, key: Tensor
    ) -> Aggregated:
        finite = np.isfinite(updates.norms())
        healthy = updates.take(np.flatnonzero(finite))
        trials: dict[tuple[int, ...], Aggregated] = {}

        def aggregated(rows: Ints) -> Aggregated:
            """Return what the inner aggregator makes of these rows; computed once."""
            name = tuple(rows.tolist())
            if name not in trials:
                trials[name] = self.inner(model, healthy.take(rows), view, state, key)
            return trials[name]

        gram = healthy.gram(common=True)
        found = optimal_subset(
            gram,
            healthy.samples,
            _comparison(aggregated, view, rng.fold(key, "check loss")),
            share=self.share,
            statistic=self.statistic,
            rule=self.left,
        )
        result = aggregated(found.kept) if len(found.kept) else Aggregated(model, state)
        broken = tuple(updates.device[~finite].tolist())
        own = self._diagnostics(healthy, gram, found, broken)
        return Aggregated(result.model, result.state, {**result.diagnostics, **own})

    def _diagnostics(
        self, healthy: Updates, gram: Floats, found: Remaining, broken: tuple[int, ...]
    ) -> Mapping[str, Any]:
        """Return who was labelled and excluded, and how well the updates agree before and after."""
        labelled = tuple(healthy.device[found.labelled].tolist())
        excluded = (*broken, *healthy.device[found.excluded].tolist())
        kept = gram[np.ix_(found.kept, found.kept)], healthy.samples[found.kept]
        return {
            "labelled": labelled,
            "excluded": excluded,
            "labelled_count": len(labelled),
            "excluded_count": len(excluded),
            "alignment": update_alignment(gram, healthy.samples, self.statistic),
            "alignment_after": update_alignment(*kept, self.statistic),
        }


def _one_of(name: str, value: str, known: tuple[str, ...]) -> str:
    """Return a complaint unless the value of a field is known, else ""."""
    if value in known:
        return ""
    return f"Subset.{name} must be one of {', '.join(known)}, got {value!r}."


def _comparison(
    aggregated: Callable[[Ints], Aggregated], view: View, key: Tensor
) -> Callable[[Ints, Ints], bool]:
    """Return a function that says whether the server loss rises without some rows.

    Both models meet the same batch, and every comparison a new one.
    """
    done = 0

    def worse(rows: Ints, without: Ints) -> bool:
        nonlocal done
        batch = rng.fold(key, done)
        done += 1
        before, after = (
            view.server_loss(aggregated(which).model, batch) for which in (rows, without)
        )
        return math.isnan(after) or before < after  # a broken model is never better

    return worse
