"""AnycostFL: channels by norm, updates compressed by kernel and grid, element-wise aggregation."""

import math
from typing import NamedTuple

import numpy as np

from anyfleet.arrays import Flags, Floats, Ints
from anyfleet.formulas.sub_models import kept_channels, overlap_mean

# A message says its smallest and largest magnitude and its number of levels.
HEADER_BITS = 3 * 32

# --- shrinking --------------------------------------------------------------------------------


def channel_norms(producers: list[Floats]) -> Floats:
    """Norms of a group's output channels (AnycostFL, specification §1.12).

    Of every tensor that produces the group, the first axis are the channels; their squared norms
    add up. Biases do not count.
    """
    squares = [(np.asarray(each, dtype=np.float64) ** 2) for each in producers]
    norms: Floats = np.sqrt(sum(square.reshape(len(square), -1).sum(axis=1) for square in squares))
    return norms


def channel_order(norms: Floats) -> Ints:
    """Channels by descending norm, ties by index (AnycostFL, specification §1.12)."""
    order: Ints = np.argsort(-np.asarray(norms, dtype=np.float64), kind="stable")
    return order


def strongest_channels(norms: Floats, alpha: float) -> Ints:
    """The channels of a model of cost alpha, ascending (AnycostFL, specification §1.12).

    So many that the width is `sqrt(alpha)`; in natural order, so that alpha 1 is the whole model.
    """
    kept: Ints = np.sort(channel_order(norms)[: anycost_width(alpha, len(norms))])
    return kept


def anycost_width(alpha: float, size: int) -> int:
    """How many channels a model of cost alpha keeps (AnycostFL, specification §1.12)."""
    return kept_channels(math.sqrt(alpha), size, "round")


# --- compressing ------------------------------------------------------------------------------


def kept_kernels(norms: Floats, keep: float) -> Ints:
    """The kernels with the largest norms, ascending, at least one (AnycostFL, specification §1.12).

    `keep` is the kept share, rounded up; exactly so many, ties by index.
    """
    count = kept_channels(keep, len(norms))
    kept: Ints = np.sort(channel_order(norms)[:count])
    return kept


def kernel_threshold(norms: Floats, keep: float) -> float:
    """Pi: the smallest norm that is kept (AnycostFL, specification §1.12)."""
    return float(np.asarray(norms)[kept_kernels(norms, keep)].min())


class Magnitudes(NamedTuple):
    """The smallest and largest magnitude of what is not zero; 0 and 0 if all is."""

    low: float
    high: float


def magnitudes(values: Floats) -> Magnitudes:
    """The ends of the grid of an update (AnycostFL, specification §1.12)."""
    sizes = np.abs(np.asarray(values, dtype=np.float64))
    some = sizes[sizes > 0]
    return Magnitudes(float(some.min()), float(some.max())) if some.size else Magnitudes(0.0, 0.0)


def grid(ends: Magnitudes, levels: int) -> Floats:
    """The magnitudes that a message can say, `Q_0 ... Q_L` (AnycostFL, specification §1.12).

    The printed grid starts at `Q_1`, which leaves the smallest values without an interval.
    """
    return np.linspace(ends.low, ends.high, max(1, levels) + 1)


def grid_levels(values: Floats, ends: Magnitudes, levels: int, u: Floats) -> Ints:
    """Each value's place on the grid, drawn so that the mean is exact (specification §1.12).

    `u` are uniforms in [0, 1), one per value. Zeros get -1. Where all magnitudes are equal there
    is one place, 0.
    """
    sizes, steps = np.abs(np.asarray(values, dtype=np.float64)), max(1, levels)
    spread = ends.high - ends.low
    if not spread > 0:
        return np.where(sizes > 0, 0, -1)
    place = (sizes - ends.low) / spread * steps
    below = np.clip(np.floor(place), 0, steps - 1)
    drawn = below + (np.asarray(u) < place - below)
    level: Ints = np.where(sizes > 0, drawn, -1).astype(np.int64)
    return level


def grid_values(level: Ints, signs: Floats, ends: Magnitudes, levels: int) -> Floats:
    """What the receiver of `grid_levels` and signs has (AnycostFL, specification §1.12)."""
    sizes = grid(ends, levels)[np.maximum(level, 0)]
    values: Floats = np.where(level >= 0, np.sign(signs) * sizes, 0.0)
    return values


class Rate(NamedTuple):
    """How a rate is met: the kept share of the kernels, and the levels of the grid."""

    keep: float
    levels: float


def analytic_rate(beta: float) -> Rate:
    """Kept share and levels of the theory, `sqrt(beta)` and `2^(32 sqrt(beta))` (specification §1.12).

    Signs and mask not counted: real messages of this pair are 1.3 to 2.4 times too long.
    """
    half = math.sqrt(beta)
    return Rate(half, 2 ** (32 * half))


def entropy_bits(symbols: Ints) -> float:
    """The least bits for these symbols when their frequencies are known (specification §F.7)."""
    if not symbols.size:
        return 0.0
    counts = np.unique(symbols, return_counts=True)[1]
    return float((counts * np.log2(counts.sum() / counts)).sum())


def anycost_bits(kept: Flags, level: Ints) -> float:
    """Bits of a message: header, mask, levels, and the signs that the paper forgot (specification §1.12).

    `kept` says of every kernel whether it survived, `level` is the grid place of every element in
    the survivors, -1 for zeros. Mask and levels at their entropy. Nothing to say: the header.
    """
    nonzero = int((np.asarray(level) >= 0).sum())
    if not nonzero:
        return float(HEADER_BITS)
    mask = entropy_bits(np.asarray(kept, dtype=np.int64))
    return HEADER_BITS + mask + entropy_bits(np.asarray(level)) + nonzero


# --- aggregating ------------------------------------------------------------------------------


def anycost_weights(
    alpha: Floats | float,
    beta: Floats | float,
    sizes: Floats | Ints | float = 1.0,
    floor: float = 1e-3,
) -> Floats:
    """Shares `p ∝ n / (1 - alpha (2 - alpha) sqrt(beta))²` of the devices (specification §1.12).

    A complete update would have infinite weight: the bracket is at least `floor`. Data sizes are
    our addition; leave them out for the paper's own weights. All 0 without data.
    """
    part = np.asarray(alpha, dtype=np.float64)
    bracket = np.maximum(1 - part * (2 - part) * np.sqrt(beta), floor)
    raw = np.asarray(sizes, dtype=np.float64) / bracket**2
    total = raw.sum()
    weights: Floats = raw / total if total > 0 else np.zeros_like(raw)
    return weights


def all_in_one(updates: Floats, masks: Flags, weights: Floats) -> Floats:
    """The update of every element: the mean of those who sent it, 0 if nobody (specification §1.12).

    To be subtracted: `w - u`, where `u` is before minus after.
    """
    return overlap_mean(np.zeros(np.shape(updates)[1:]), updates, masks, weights)
