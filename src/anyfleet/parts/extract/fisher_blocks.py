"""WHALE-FL's Algorithm 2: blocks of channels, by Fisher information and by how often trained."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
from torch import Tensor

from anyfleet.arrays import Flags, Floats, Ints
from anyfleet.core.messages import SubModelSize
from anyfleet.core.slots import Extract, Measure
from anyfleet.core.updates import Updates
from anyfleet.core.view import View
from anyfleet.elastic import Blueprint, Slice
from anyfleet.errors import refuse
from anyfleet.formulas.whale import (
    WhaleRegionFisher,
    WhaleScore,
    whale_blocks,
    whale_importance,
    whale_region_fisher,
    whale_scores,
)
from anyfleet.measure import Fisher
from anyfleet.measure.fisher import produced
from anyfleet.papers import WHALE, Paper


class _Kept(NamedTuple):
    fisher: WhaleRegionFisher
    counts: Mapping[int, Ints]  # how often each device has trained each region


@dataclass(frozen=True)
class FisherBlocks(Extract):
    """The best of `regions` equal blocks of channels of every hidden layer, for each device.

    Region j is block j of every layer. A width of the model is that share of the regions, those
    with the highest `score` (specification §1.11): "recommended" favours important and rarely
    trained regions, "literal" and "maxmin" are readings of the paper. Devices report the Fisher
    information of every channel of the model that they received. `epsilon` is added to it, and
    should be small beside the mean squared gradients of the network at hand. Where channels do not
    divide evenly, the best blocks are cut or filled up to the number that the width has. An
    evaluation takes the leading channels. `fisher` says how devices measure it.
    """

    regions: int = 16
    score: WhaleScore = "recommended"
    epsilon: float = 1e-3
    fisher: Fisher = field(default_factory=Fisher)

    personal: ClassVar[bool] = True
    reports: ClassVar[frozenset[str]] = frozenset({"channels"})
    papers: ClassVar[tuple[Paper, ...]] = (WHALE,)

    def __post_init__(self) -> None:
        refuse(self._faults())

    def _faults(self) -> Iterator[str]:
        if self.regions < 1:
            yield f"FisherBlocks.regions must be at least 1, got {self.regions}."
        if self.score not in ("recommended", "literal", "maxmin"):
            yield (
                'FisherBlocks.score must be "recommended", "literal" or "maxmin", '
                f"got {self.score!r}."
            )
        if not self.epsilon > 0:
            yield f"FisherBlocks.epsilon must be positive, got {self.epsilon}."

    @property
    def measures(self) -> tuple[Measure, ...]:
        return (self.fisher,)

    def init(self, view: View) -> _Kept:
        nothing = np.zeros(self.regions)
        return _Kept(WhaleRegionFisher(nothing, nothing, nothing), {})

    def diagnostics(self, state: _Kept) -> Mapping[str, Any]:
        return {"region_fisher": state.fisher.mean}

    def __call__(
        self, size: SubModelSize, view: View, state: _Kept, key: Tensor, device: int | None
    ) -> Slice:
        assert device is not None  # it is personal
        counts = state.counts.get(device, np.zeros(self.regions, dtype=np.int64))
        fisher = state.fisher
        important = whale_importance(fisher.mean, fisher.low, fisher.high, self.epsilon)
        score = whale_scores(important, counts, self.score)
        # A width is so many regions, and at least one.
        budget = max(1.0, size.width * self.regions)
        taken = whale_blocks(score, counts, np.ones(self.regions), budget)
        rank = np.lexsort((np.arange(self.regions), counts, -score))
        first = np.concatenate([rank[np.isin(rank, taken)], rank[~np.isin(rank, taken)]])
        wanted = size.counts(view.blueprint)
        kept = {axis: self._channels(axis, n, first, view.blueprint) for axis, n in wanted.items()}
        return Slice.of(kept, view.blueprint, size.first_trained_layer)

    def _channels(self, axis: str, count: int, first: Ints, blueprint: Blueprint) -> list[int]:
        """Return `count` channels of an axis, out of the regions in this order; ascending."""
        region = regions_of(blueprint.axes[axis].size, self.regions)
        place = np.empty(self.regions, dtype=np.int64)
        place[first] = np.arange(self.regions)
        order = np.argsort(place[region], kind="stable")
        return sorted(order[:count].tolist())

    def learn(
        self, updates: Updates | None, diagnostics: Mapping[str, Any], view: View, state: _Kept
    ) -> _Kept:
        if updates is None:
            return state
        values = np.zeros((len(updates), self.regions))
        trained = np.zeros((len(updates), self.regions), dtype=bool)
        counts = dict(state.counts)
        for row, update in enumerate(updates):
            if not update.samples:
                continue  # it trained nothing
            held = self._held(update.slice, view.blueprint)
            before = counts.get(update.device, np.zeros(self.regions, dtype=np.int64))
            counts[update.device] = before + (held >= 0.5)
            told = update.report.get("channels", ())
            values[row], trained[row] = self._told(told, update.slice, view.blueprint)
        return _Kept(whale_region_fisher(state.fisher, values, trained), counts)

    def _held(self, slice_: Slice, blueprint: Blueprint) -> Floats:
        """Return the share of the channels of every region that a slice has."""
        have, there = np.zeros(self.regions), np.zeros(self.regions)
        for axis in blueprint.counts(1.0):
            size = blueprint.axes[axis].size
            region = regions_of(size, self.regions)
            kept = slice_.kept(axis)
            np.add.at(there, region, 1)
            np.add.at(have, region if kept is None else region[list(kept)], 1)
        return np.divide(have, there, out=np.zeros(self.regions), where=there > 0)

    def _told(
        self, told: tuple[float, ...], slice_: Slice, blueprint: Blueprint
    ) -> tuple[Floats, Flags]:
        """Return the mean squared gradient of each region, and which of them are known.

        `told` is what a device reported of the channels in its slice.
        """
        local = blueprint.local(slice_)
        squares, coordinates = np.zeros(self.regions), np.zeros(self.regions)
        channels = coordinates_of(local, slice_.sent(blueprint))
        start = 0
        if len(told) != sum(local.sizes[axis] for axis in channels):
            return squares, coordinates > 0  # of another slice: a link cut this one
        for axis, each in channels.items():
            size = local.sizes[axis]
            region = regions_of(blueprint.axes[axis].size, self.regions)
            kept = slice_.kept(axis)
            region = region if kept is None else region[list(kept)]
            np.add.at(squares, region, np.array(told[start : start + size]))
            np.add.at(coordinates, region, each)
            start += size
        known = (coordinates > 0) & np.isfinite(squares)
        return np.divide(squares, coordinates, out=np.zeros(self.regions), where=known), known


def regions_of(size: int, regions: int) -> Ints:
    """Return the region of every channel of an axis: equal blocks, as far as it divides."""
    channel = np.arange(size)
    return channel * regions // size


def coordinates_of(local: Blueprint, trained: tuple[str, ...]) -> dict[str, float]:
    """Return how many trained coordinates each channel of an axis has, in the order of reports."""
    found: dict[str, float] = {}
    for name in trained:
        axis = produced(name, local)
        if axis is not None:
            found[axis] = found.get(axis, 0.0) + local.numel([name]) / local.sizes[axis]
    return dict(sorted(found.items()))
