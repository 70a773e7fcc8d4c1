"""The width of a slice, and its leading part up to a width: models that arrive in columns."""

import math
from functools import lru_cache

from anyfleet.elastic.blueprint import Blueprint, Slice


def columns(width: float, column_width: float) -> int:
    """Return how many columns a width of the whole model takes, at least one."""
    return max(1, math.ceil(width / column_width - 1e-9))


@lru_cache(maxsize=4096)
def width(slice: Slice, blueprint: Blueprint) -> float:
    """Return the width that a plain cut of this size has; of other cuts, the widest axis's."""
    kept = _kept(slice, blueprint)
    # A width w keeps ceil(w × size) of every axis: the width lies in (above, least].
    above = max(((count - 1) / size for count, size in kept), default=0.0)
    widths = [count / size for count, size in kept]
    least = min(widths, default=1.0)
    return least if above < least else max(widths, default=1.0)


@lru_cache(maxsize=4096)
def channel_share(slice: Slice, blueprint: Blueprint) -> float:
    """Return the share of all channels that a slice keeps, 1 where there is nothing to cut.

    Channels of all layers count alike, however a width was rounded or spread over the layers.
    """
    kept = _kept(slice, blueprint)
    return sum(count for count, _ in kept) / sum(size for _, size in kept) if kept else 1.0


@lru_cache(maxsize=4096)
def trained_share(slice: Slice, blueprint: Blueprint) -> float:
    """Return the share of a sub-model's trainable parameters that it trains, 1 without any."""
    local = blueprint.local(slice)
    every = local.numel(local.trained())
    trained = local.numel(local.trained(slice.first_trained_layer))
    return trained / every if every else 1.0


def _kept(slice: Slice, blueprint: Blueprint) -> list[tuple[int, int]]:
    """Return how many indices are kept, of how many, for every axis that a width cuts."""
    sizes = {axis: blueprint.axes[axis].size for axis in blueprint.counts(1.0)}
    return [(len(slice.kept(axis) or range(size)), size) for axis, size in sizes.items()]


@lru_cache(maxsize=4096)
def narrowed(slice: Slice, width: float, blueprint: Blueprint) -> Slice:
    """Return the leading part of a slice, up to a width of the whole model.

    Indices stay in the slice's own order. Of an axis that is cut otherwise than by its leading
    indices, it keeps as many indices as that width has. Width 0 is the caller's case: nothing
    arrived.
    """
    if width >= 1:
        return slice
    counts = blueprint.counts(width)
    kept = {axis: slice.kept(axis) or range(blueprint.axes[axis].size) for axis in counts}
    others = {axis: indices for axis, indices in slice.keep if axis not in counts}
    short = {axis: kept[axis][: counts[axis]] for axis in counts}
    return Slice.of({**others, **short}, blueprint, slice.first_trained_layer)


@lru_cache(maxsize=4096)
def within(slice: Slice, width: float, blueprint: Blueprint) -> Slice:
    """Return `narrowed(…)` in the coordinates of the small model that the slice makes."""
    local = blueprint.local(slice)
    short = narrowed(slice, width, blueprint)
    sizes = blueprint.local(short).sizes
    free = (axis for axis, each in local.axes.items() if each.free)
    return Slice.of({axis: range(sizes[axis]) for axis in free}, local, slice.first_trained_layer)
