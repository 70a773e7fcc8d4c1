"""Five ways to treat batch normalisation in federated learning."""

import hashlib
from dataclasses import dataclass
from typing import ClassVar

from anyfleet.core.slots import Norm
from anyfleet.elastic import EVALUATE, EVALUATE_BATCH, STATIC, TRAIN, Blueprint, Mode, Slice
from anyfleet.papers import FEDBN, HETEROFL, SLIMMABLE, Paper


def _names(blueprint: Blueprint) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of the parameters and of the buffers of all batch normalisations."""
    params = {n for site in blueprint.norms for n in (site.weight, site.bias) if n is not None}
    buffers = {n for site in blueprint.norms for n in (site.mean, site.variance) if n is not None}
    return frozenset(params), frozenset(buffers)


@dataclass(frozen=True)
class BatchStatistics(Norm):
    """Batch statistics in training and in tests, and no running statistics (specification §C)."""

    training: ClassVar[Mode] = STATIC
    evaluation: ClassVar[Mode] = EVALUATE_BATCH


@dataclass(frozen=True)
class Tracked(Norm):
    """Running statistics that devices send, averaged like parameters."""

    training: ClassVar[Mode] = TRAIN
    evaluation: ClassVar[Mode] = EVALUATE

    def travels(self, blueprint: Blueprint) -> frozenset[str]:
        return _names(blueprint)[1]


@dataclass(frozen=True)
class OnDevice(Norm):
    """Normalisation parameters and statistics that never leave the device (FedBN)."""

    papers: ClassVar[tuple[Paper, ...]] = (FEDBN,)
    training: ClassVar[Mode] = TRAIN
    evaluation: ClassVar[Mode] = EVALUATE

    def stays(self, blueprint: Blueprint) -> frozenset[str]:
        params, buffers = _names(blueprint)
        return params | buffers


@dataclass(frozen=True)
class Static(Norm):
    """Batch statistics in training; one pass over data measures them before a test (§1.5 d)."""

    papers: ClassVar[tuple[Paper, ...]] = (HETEROFL,)
    training: ClassVar[Mode] = STATIC
    evaluation: ClassVar[Mode] = EVALUATE
    calibrated: ClassVar[bool] = True


@dataclass(frozen=True)
class PerWidth(Norm):
    """A normalisation for each width, with parameters and running statistics of its own."""

    papers: ClassVar[tuple[Paper, ...]] = (SLIMMABLE,)
    training: ClassVar[Mode] = TRAIN
    evaluation: ClassVar[Mode] = EVALUATE

    def travels(self, blueprint: Blueprint) -> frozenset[str]:
        return _names(blueprint)[1]

    def variant(self, blueprint: Blueprint, slice_: Slice) -> str:
        params, buffers = _names(blueprint)
        names, local = params or buffers, blueprint.local(slice_)
        kept = {n: local.shape(n)[0] for n in sorted(names)}
        whole = sum(blueprint.shape(n)[0] for n in names)
        if sum(kept.values()) == whole:
            return ""
        # Two slices may have the same width in different layers: the digest tells them apart.
        digest = hashlib.sha256(repr(kept).encode()).hexdigest()[:6]
        return f"{sum(kept.values()) / whole:.3g}-{digest}"
