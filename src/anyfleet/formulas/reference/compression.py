"""Compressed updates: sparse ternary, stochastic levels, dithered lattices, kernels on a grid."""

import math
from typing import Literal, NamedTuple

import numpy as np

from anyfleet.arrays import Flags, Floats, Ints
from anyfleet.formulas.anycost import anycost_channel_order
from anyfleet.formulas.sub_models import kept_channels

# What a message says besides its entries: one magnitude or norm.
SCALAR_BITS = 32
# A message says its smallest and largest magnitude and its number of levels.
HEADER_BITS = 3 * 32
# E‖e‖²/2 of the hexagonal lattice's cell, in units of its area.
HEXAGON_MOMENT = 5 / (36 * math.sqrt(3))


# --- STC ------------------------------------------------------------------------------------------


def stc_top_entries(values: Floats, share: float) -> Ints:
    """Return the indices of the largest magnitudes, ascending (STC, specification §1.13).

    Exactly `max(1, ceil(share × n))`, ties to the lower index.
    """
    sizes = np.abs(np.asarray(values, dtype=np.float64))
    count = kept_channels(share, len(sizes))
    kept: Ints = np.sort(np.argsort(-sizes, kind="stable")[:count])
    return kept


class StcMessage(NamedTuple):
    """A message of STC: what is sent, and what is left for the next message."""

    magnitude: float
    sent: Floats
    residual: Floats


def stc_sparse_ternary(values: Floats, share: float) -> StcMessage:
    """Return the largest entries, all with their mean magnitude (STC, specification §1.13).

    `values` are the update plus the residual of the last message. Nothing but zeros: magnitude
    0.
    """
    every = np.asarray(values, dtype=np.float64)
    kept = stc_top_entries(every, share)
    magnitude = float(np.abs(every[kept]).mean()) if len(kept) else 0.0
    sent = np.zeros_like(every)
    sent[kept] = magnitude * np.sign(every[kept])
    return StcMessage(magnitude, sent, every - sent)


def stc_golomb_parameter(share: float) -> int:
    """Return b*: how many bits of a gap are sent as they are (STC, specification §1.13)."""
    if share >= 1:
        return 0
    golden = math.log((math.sqrt(5) - 1) / 2)
    return max(0, 1 + math.floor(math.log2(golden / math.log1p(-share))))


def stc_golomb_position_bits(share: float) -> float:
    """Return the expected bits of a position, sent as a gap (STC, specification §1.13)."""
    bits = stc_golomb_parameter(share)
    return float(bits + 1 / (1 - (1 - share) ** (2**bits)))


def stc_position_entropy(share: float) -> float:
    """Return the least bits of a position that any code can reach (STC, specification §1.13)."""
    if share >= 1:
        return 0.0
    return -math.log2(share) - (1 - share) / share * math.log2(1 - share)


def stc_rice_bits(gaps: Ints, parameter: int) -> int:
    """Return the bits of gaps, each at least 1, in a Rice code (STC, specification §1.13)."""
    long = (np.asarray(gaps, dtype=np.int64) - 1) >> parameter
    return int((long + 1 + parameter).sum())


def stc_bits(positions: Ints, size: int, share: float) -> int:
    """Return the measured bits of a tensor's message (STC, specification §1.13).

    Positions (ascending) by their gaps, or a bitmap where that is shorter; a sign each; the
    magnitude. No positions: the magnitude alone.
    """
    if not len(positions):
        return SCALAR_BITS
    gaps = np.diff(positions, prepend=-1)
    places = min(size, stc_rice_bits(gaps, stc_golomb_parameter(share)))
    return places + len(positions) + SCALAR_BITS


def stc_expected_bits(count: int, share: float) -> float:
    """Return the expected bits of a message with so many entries (STC, specification §1.13)."""
    return count * (stc_golomb_position_bits(share) + 1) + SCALAR_BITS


# --- QSGD -----------------------------------------------------------------------------------------


class QsgdMessage(NamedTuple):
    """Quantisation levels with their signs, and the norm of every bucket."""

    levels: Ints
    norms: Floats


def qsgd(values: Floats, levels: int, u: Floats, bucket: int | None = 512) -> QsgdMessage:
    """Return every entry's quantisation level relative to its bucket's norm (specification §1.14).

    `u` are uniforms in [0, 1), one per entry. Buckets are cut in order, the last may be short;
    None takes all as one, which is much worse on long updates.
    """
    every = np.asarray(values, dtype=np.float64)
    starts = _starts(len(every), bucket)
    norms = np.sqrt(np.add.reduceat(every**2, starts)) if len(every) else np.zeros(0)
    scale = _spread(norms, len(every), bucket)
    place = np.where(scale > 0, levels * np.abs(every) / np.where(scale > 0, scale, 1.0), 0.0)
    below = np.floor(place)
    # An entry that is its bucket's norm has level `levels`, not one more by rounding.
    drawn = np.minimum(below + (np.asarray(u) < place - below), levels)
    return QsgdMessage((np.sign(every) * drawn).astype(np.int64), norms)


def qsgd_values(message: QsgdMessage, levels: int, bucket: int | None = 512) -> Floats:
    """Return what the receiver has: norm × level / levels (QSGD, specification §1.14)."""
    scale = _spread(message.norms, len(message.levels), bucket)
    values: Floats = scale * message.levels / levels
    return values


def qsgd_variance(values: Floats, levels: int) -> float:
    """Return `E‖Q(v) - v‖²` of one bucket, exactly (QSGD, specification §1.14)."""
    every = np.asarray(values, dtype=np.float64)
    norm = float(np.linalg.norm(every))
    if norm == 0:
        return 0.0
    part = np.modf(levels * np.abs(every) / norm)[0]
    return (norm / levels) ** 2 * float((part * (1 - part)).sum())


def qsgd_error_bound(size: Floats | float, levels: Ints | int) -> Floats:
    """Return a bound of `E‖Q(v) - v‖² / ‖v‖²` for a bucket of this size (specification §1.14)."""
    steps = np.asarray(levels, dtype=np.float64)
    bound: Floats = np.minimum(size / steps**2, np.sqrt(size) / steps)
    return bound


def _starts(count: int, bucket: int | None) -> Ints:
    return np.arange(0, max(count, 1), bucket or max(count, 1))


def _spread(norms: Floats, count: int, bucket: int | None) -> Floats:
    """Return the norm of its bucket for every entry."""
    spread: Floats = np.repeat(norms, bucket or max(count, 1))[:count]
    return spread


# --- UVeQFed --------------------------------------------------------------------------------------


def uveq_scale(norm: float, bits: float, blocks: int) -> float:
    """Return the scale `zeta ‖v‖` of an update in so many sub-vectors (specification §1.15).

    `bits` per entry.
    """
    return (2 + bits / 5) / math.sqrt(blocks) * norm


def uveq_lattice(step: float, dimension: Literal[1, 2] = 2) -> Floats:
    """Return the basis vectors in rows: whole steps, or hexagons (UVeQFed, specification §1.15)."""
    if dimension == 1:
        return np.array([[step]])
    return step * np.array([[1, 1 / math.sqrt(3)], [1, -1 / math.sqrt(3)]])


def uveq_dither(u: Floats, basis: Floats) -> Floats:
    """Return a uniform point of the lattice's cell for every block (UVeQFed, specification §1.15).

    `u` are uniforms in [0, 1), a row per block.
    """
    points: Floats = (np.asarray(u, dtype=np.float64) - 0.5) @ basis
    return points


def uveq_lattice_indices(points: Floats, basis: Floats) -> Ints:
    """Return the nearest lattice point of each row (UVeQFed, specification §1.15).

    In whole multiples of the basis. Nearest in space: rounding the coordinates alone is not enough
    for hexagons, whose nearest point is one of the corners around.
    """
    below = np.floor(np.asarray(points, dtype=np.float64) @ np.linalg.inv(basis))
    corners = np.stack(np.meshgrid(*[[0.0, 1.0]] * len(basis), indexing="ij"), -1)
    around = below[:, np.newaxis] + corners.reshape(-1, len(basis))
    distance = ((around @ basis - points[:, np.newaxis]) ** 2).sum(axis=-1)
    nearest = around[np.arange(len(points)), distance.argmin(axis=1)]
    indices: Ints = nearest.astype(np.int64)
    return indices


def uveq(values: Floats, scale: float, basis: Floats, noise: Floats) -> Ints:
    """Return the lattice indices of the dithered blocks of an update (specification §1.15).

    `noise` is the `uveq_dither` that sender and receiver share, a row per block; the last block is
    filled with zeros. An update of zeros has indices 0.
    """
    blocks = np.zeros(np.shape(noise))
    blocks.ravel()[: len(values)] = values
    if scale == 0:
        return np.zeros(blocks.shape, dtype=np.int64)
    return uveq_lattice_indices(blocks / scale + noise, basis)


def uveq_values(indices: Ints, scale: float, basis: Floats, noise: Floats, size: int) -> Floats:
    """Return what the receiver has after taking the dither away (UVeQFed, specification §1.15)."""
    if scale == 0:
        return np.zeros(size)
    values: Floats = (scale * (indices @ basis - noise)).ravel()[:size]
    return values


def uveq_variance(scale: float, basis: Floats) -> float:
    """Return the error's variance per entry, whatever the update (UVeQFed, specification §1.15)."""
    cell = abs(float(np.linalg.det(basis)))
    moment = cell**2 / 12 if len(basis) == 1 else HEXAGON_MOMENT * cell
    return moment * scale**2


# --- AnycostFL ------------------------------------------------------------------------------------


def anycost_kept_kernels(norms: Floats, keep: float) -> Ints:
    """Return the kernels with the largest norms, ascending, at least one (specification §1.12).

    `keep` is the kept share, rounded up; exactly so many, ties by index.
    """
    count = kept_channels(keep, len(norms))
    kept: Ints = np.sort(anycost_channel_order(norms)[:count])
    return kept


def anycost_kernel_threshold(norms: Floats, keep: float) -> float:
    """Return Pi: the smallest norm that is kept (AnycostFL, specification §1.12)."""
    return float(np.asarray(norms)[anycost_kept_kernels(norms, keep)].min())


class AnycostMagnitudes(NamedTuple):
    """The smallest and the largest magnitude that are not zero; 0 and 0 if all are."""

    low: float
    high: float


def anycost_magnitudes(values: Floats) -> AnycostMagnitudes:
    """Return the ends of the grid of an update (AnycostFL, specification §1.12)."""
    sizes = np.abs(np.asarray(values, dtype=np.float64))
    some = sizes[sizes > 0]
    return (
        AnycostMagnitudes(float(some.min()), float(some.max()))
        if some.size
        else AnycostMagnitudes(0.0, 0.0)
    )


def anycost_grid(ends: AnycostMagnitudes, levels: int) -> Floats:
    """Return the magnitudes that a message can say, `Q_0 ... Q_L` (AnycostFL, specification §1.12).

    The printed grid starts at `Q_1`, which leaves the smallest values without an interval.
    """
    return np.linspace(ends.low, ends.high, max(1, levels) + 1)


def anycost_grid_levels(values: Floats, ends: AnycostMagnitudes, levels: int, u: Floats) -> Ints:
    """Return each value's place on the grid, drawn so that the mean is exact (specification §1.12).

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


def anycost_grid_values(level: Ints, signs: Floats, ends: AnycostMagnitudes, levels: int) -> Floats:
    """Return what the receiver of `anycost_grid_levels` and signs has (specification §1.12)."""
    sizes = anycost_grid(ends, levels)[np.maximum(level, 0)]
    values: Floats = np.where(level >= 0, np.sign(signs) * sizes, 0.0)
    return values


class AnycostCompression(NamedTuple):
    """A way to meet a compression factor: the kept share of the kernels, and the grid's levels."""

    keep: float
    levels: float


def anycost_analytic_compression(beta: float) -> AnycostCompression:
    """Return kept share and levels of the theory (AnycostFL, specification §1.12).

    They are `sqrt(beta)` and `2^(32 sqrt(beta))`. Signs and mask are not counted: real messages of
    this pair are 1.3 to 2.4 times too long.
    """
    half = math.sqrt(beta)
    return AnycostCompression(half, 2 ** (32 * half))


def anycost_bits(kept: Flags, level: Ints) -> float:
    """Return the bits of a message: header, mask, levels and signs (specification §1.12).

    The paper forgot the signs. `kept` says of every kernel whether it survived, `level` is the grid
    place of every element in the survivors, -1 for zeros. Mask and levels at their entropy. Nothing
    to say: the header.
    """
    nonzero = int((np.asarray(level) >= 0).sum())
    if not nonzero:
        return float(HEADER_BITS)
    mask = entropy_bits(np.asarray(kept, dtype=np.int64))
    return HEADER_BITS + mask + entropy_bits(np.asarray(level)) + nonzero


# --- all codecs -----------------------------------------------------------------------------------


def entropy_bits(symbols: Ints) -> float:
    """Return the least bits for symbols of which the frequencies are known (specification §F.7)."""
    if not symbols.size:
        return 0.0
    counts = np.unique(symbols, return_counts=True)[1]
    return float((counts * np.log2(counts.sum() / counts)).sum())


def relative_error(values: Floats, received: Floats) -> float:
    """Return `‖Q(v) - v‖² / ‖v‖²`, 0 for an update of zeros (specification §F.7)."""
    every = np.asarray(values, dtype=np.float64)
    total = float((every**2).sum())
    return float(((received - every) ** 2).sum()) / total if total > 0 else 0.0


def fedhq_quantisation_levels(bits: Floats, budget: float, levels: Ints) -> int:
    """Return the most levels whose measured message fits the budget (FedHQ, specification §1.16).

    `bits` is the length of the message with each of the `levels`, which ascend. The fewest levels
    if none fits.
    """
    fitting = np.flatnonzero(np.asarray(bits) <= budget)
    return int(levels[fitting[-1] if len(fitting) else 0])
