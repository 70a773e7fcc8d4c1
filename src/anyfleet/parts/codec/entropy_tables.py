"""Probability tables in whole numbers: the same on every machine, and short enough for a header.

A table has one byte for each symbol, relative to the most frequent one: a whole number with three
binary digits after the first, so that rare symbols may be a million times rarer. Its quotients are
the same in binary floating point on all machines, so both ends of a message build one model.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import constriction
import numpy as np
from numpy.typing import NDArray

from anyfleet.arrays import Floats, Ints

Model = Any  # of symbols, for a range coder
_Categorical = constriction.stream.model.Categorical
Bytes = NDArray[np.uint8]

MOST_SYMBOLS = 1 << 11  # of a table; larger codes send their low bits as they are, or all bits
_FULL = 160  # the byte of the most frequent symbol
# What bytes stand for; 0 is a symbol that does not occur. A hundred rare symbols must not take what
# belongs to a frequent one, so they may be very small; a coder tells none below 2 ** -24.
_WEIGHTS = np.array([0, *(8 + byte % 8 << byte // 8 for byte in range(255))], dtype=np.float64)
_TABLE_BITS = 8 * 3  # that a table costs besides its entries
_ONE = 1 << 16  # certainty, in a probability of gaps
_DIGITS = 8  # of a probability of gaps
_MOST_GAPS = 1 << 10
_LONG = 4  # times the mean gap: longer ones are sent in several pieces
# A coder with 24-bit probabilities is off by this much per symbol at most, as measured.
ROUNDING_BITS = 2e-4


class Choice(NamedTuple):
    """The tables of a message, which of them each tensor uses, and the bits of symbols."""

    tables: tuple[Bytes, ...]
    use: tuple[int, ...]  # -1: the tensor has no symbols
    bits: Floats  # [tensors, symbols]


def choose(counts: Ints) -> Choice:
    """Return the tables that make a message short; `counts` is [tensors, symbols].

    There is one for all tensors, and one more for each tensor that saves more than its table costs.
    """
    if not len(counts):
        return Choice((), (), np.zeros(counts.shape))
    shared = _table(counts.sum(axis=0))
    own = np.stack([_table(row) for row in counts])
    there = counts.sum(axis=1) > 0
    price = np.array([_TABLE_BITS + 8 * _length(table) for table in own])
    costs = [_costs(counts, tables) for tables in (np.broadcast_to(shared, own.shape), own)]
    apart = there & (costs[0] > costs[1] + price)
    rest = _table(counts[~apart].sum(axis=0))
    mixed = np.where(apart[:, np.newaxis], own, rest)
    together = costs[0].sum() + _TABLE_BITS + 8 * _length(shared)
    divided = _costs(counts, mixed).sum() + price[apart].sum() + _TABLE_BITS + 8 * _length(rest)
    if together <= divided:
        apart, mixed, rest = np.zeros_like(apart), np.broadcast_to(shared, own.shape), shared
    common = bool((there & ~apart).any())
    tables = [rest] * common + list(own[apart])
    numbers = np.cumsum(apart) - 1 + common
    use = np.where(apart, numbers, np.where(there, 0, -1))
    trimmed = tuple(table[: _length(table)].astype(np.uint8) for table in tables)
    return Choice(trimmed, tuple(use.tolist()), symbol_bits(mixed))


def symbol_bits(tables: NDArray[np.integer]) -> Floats:
    """Return the bits of every symbol in each table."""
    weights = _WEIGHTS[tables]
    total = weights.sum(axis=-1, keepdims=True)
    bits: Floats = np.log2(np.maximum(total, 1)) - np.log2(np.maximum(weights, 1))
    return bits + ROUNDING_BITS


def model(table: Bytes) -> Model:
    """Return the coder model of a table; the only symbol of a table takes almost no bits."""
    padded = table if len(table) > 1 else np.append(table, np.uint8(0))
    weights = _WEIGHTS[padded]
    return _Categorical(weights / weights.sum(), perfect=False)


def _table(counts: Ints) -> NDArray[np.int64]:
    most = max(1, int(counts.max(initial=0)))
    steps = _WEIGHTS[1 : _FULL + 1]
    between = np.sqrt(steps[1:] * steps[:-1])
    table: NDArray[np.int64] = 1 + np.searchsorted(between, counts * (steps[-1] / most))
    # What occurs must have a probability, however small.
    return np.where(counts > 0, table, 0)


def _length(table: Ints) -> int:
    return int(np.flatnonzero(table)[-1]) + 1 if table.any() else 0


def _costs(counts: Ints, tables: Ints) -> Floats:
    costs: Floats = (counts * symbol_bits(tables)).sum(axis=-1)
    return costs


class Gaps(NamedTuple):
    """How gaps between kept units are coded: after `longest` units without one, a new piece."""

    model: Model
    longest: int


def gap_share(kept: Ints, units: Ints) -> Ints:
    """Return the share of kept units in 1/65536, to 8 binary digits, so that models are few."""
    shares = np.maximum(1, (kept * _ONE) // np.maximum(1, units))
    spare = np.maximum(0, np.floor(np.log2(shares)).astype(np.int64) + 1 - _DIGITS)
    rounded: Ints = np.clip((shares >> spare) << spare, 1, _ONE - 1)
    return rounded


def gap_bits(kept: Ints, until: Ints, units: Ints) -> Floats:
    """Return the bits of the gaps between kept units, the last of which is number `until`.

    0 where all are kept, or none is.
    """
    share = gap_share(kept, units) / _ONE
    pieces = gap_pieces(kept, until, units)
    bits = pieces * ROUNDING_BITS - kept * np.log2(share) - (until - kept) * np.log2(1 - share)
    return bits * some_kept(kept, units)


def gap_pieces(kept: Ints, until: Ints, units: Ints) -> Ints:
    """Return how many symbols gaps take at most."""
    longest = _longest(gap_share(kept, units))
    pieces: Ints = (kept + (until - kept) // longest) * some_kept(kept, units)
    return pieces


def some_kept(kept: Ints, units: Ints) -> NDArray[np.bool_]:
    """Return whether anything must be said about which units are kept."""
    some: NDArray[np.bool_] = (kept > 0) & (kept < units)
    return some


def _longest(share: Ints) -> Ints:
    """Return the longest gap that is one symbol."""
    longest: Ints = np.clip(_LONG * _ONE // share, 1, _MOST_GAPS - 1)
    return longest


@lru_cache(maxsize=1024)
def gaps(share: int) -> Gaps:
    """Return the model of gaps when a share of units (in 1/65536) is kept, all equally likely."""
    longest = int(_longest(np.array(share)))
    left, masses = 1 << 40, []
    for _ in range(longest):
        after = left * (_ONE - share) >> 16
        masses.append(left - after)
        left = after
    return Gaps(_Categorical(np.array([*masses, left]) / float(1 << 40), perfect=False), longest)


def to_gaps(kept: Ints, longest: int) -> NDArray[np.int32]:
    """Return the ascending positions of kept units as gap symbols."""
    skipped = np.diff(kept, prepend=-1) - 1
    pieces, rest = skipped // longest, skipped % longest
    symbols = np.full(len(kept) + int(pieces.sum()), longest, dtype=np.int32)
    symbols[np.cumsum(pieces + 1) - 1] = rest
    return symbols


def from_gaps(symbols: NDArray[np.int32], longest: int) -> Ints:
    """Return positions from gap symbols: the inverse of `to_gaps`."""
    full = symbols == longest
    ends = np.cumsum(np.where(full, longest, symbols + 1), dtype=np.int64)
    positions: Ints = ends[~full] - 1
    return positions
