"""Probability tables in whole numbers: the same on every machine, and short enough for a header.

A table has one byte for each symbol, relative to the most frequent one: a whole number with three
binary digits after the first, so that rare symbols may be a million times rarer. Its quotients are
the same in binary floating point on all machines, so both ends of a message build one model.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import constriction
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anyfleet.arrays import Ints
from anyfleet.parts.codec.ranking import group_sums, on_host, worth_a_look

Model = Any  # of symbols, for a range coder
_Categorical = constriction.stream.model.Categorical
Bytes = NDArray[np.uint8]

MOST_SYMBOLS = 1 << 11  # of a table; larger codes send their low bits as they are, or all bits
_FULL = 160  # the byte of the most frequent symbol
_DIGITS_BELOW = 49  # binary digits of a 64-bit float after the first four
_SMALLEST = 1026 << 3  # the others of 8, the smallest weight, as a whole number with the exponent
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
    """The tables of a stack of messages: a common one each, and some tensors with their own."""

    bits: Tensor  # [devices, columns]: of all symbols
    lengths: Tensor  # [devices, 1 + tensors]: symbols of the common table, then of own ones; or 0
    use: Tensor  # [devices, tensors]: the number of the table; -1: the tensor has no symbols
    place: Tensor  # symbols of tensors, counted through [devices, tensors, symbols]
    table: Tensor  # their bytes


@dataclass(frozen=True, eq=False)
class Bins:
    """How often symbols occur: bins of a histogram [devices, columns, tensors, symbols].

    Bins that are not named hold nothing.
    """

    place: Tensor  # in the histogram
    often: Tensor
    shape: tuple[int, int, int, int]

    @cached_property
    def symbol(self) -> Tensor:
        """The symbol of every bin."""
        return self.place % self.shape[3]

    @cached_property
    def line(self) -> Tensor:
        """The column of its device that has the bin, counted through all devices."""
        return self.place // (self.shape[2] * self.shape[3])

    def by_column(self, values: Tensor) -> Tensor:
        """Return the sums of values of bins, [devices, columns]."""
        devices, columns, *_ = self.shape
        return group_sums(values.double(), self.line, devices * columns).view(devices, columns)


def choose(bins: Bins) -> Choice:
    """Return the tables that make messages short.

    There is one for all tensors, and one more for each tensor that saves more than its table costs.
    """
    devices, _, tensors, symbols = bins.shape
    counted, at = _by_tensor(bins)
    own, row = _fitting(counted), counted.group // max(1, tensors)

    def common(often: Tensor) -> _Tables:
        """Return one table for all tensors of each device, at the bins of every tensor."""
        every, at = _merged(often, row * symbols + counted.symbol, (devices, symbols))
        table, bits, lengths = _fitting(every)
        return _Tables(table.index_select(0, at), bits.index_select(0, at), lengths)

    shared = common(counted.often)
    there = own.lengths.view(devices, tensors) > 0
    price = (_TABLE_BITS + 8 * own.lengths).view(devices, tensors)
    costs = [counted.summed(counted.often * each.bits) for each in (shared, own)]
    apart = there & (costs[0] > costs[1] + price.flatten()).view(devices, tensors)
    table, bits, lengths = shared
    if not on_host(apart) or bool(apart.any()):
        alone = apart.flatten()[counted.group]
        rest = common(counted.often * ~alone)
        mixed = torch.where(alone, own.bits, rest.bits)
        together, divided = (
            group_sums(counted.often * each, row, devices) for each in (bits, mixed)
        )
        divided = divided + 8 * rest.lengths + (price * apart).sum(dim=1)
        shorter = divided < together + 8 * lengths
        apart &= shorter[:, None]
        divide = shorter[row]
        bits = torch.where(divide, mixed, bits)
        table = torch.where(divide, torch.where(alone, own.table, rest.table), table)
        lengths = torch.where(shorter, rest.lengths, lengths)
    some = (there & ~apart).any(dim=1, keepdim=True)
    return Choice(
        bits=bins.by_column(bins.often * (bits if at is None else bits.index_select(0, at))),
        lengths=torch.cat([lengths[:, None] * some, own.lengths.view_as(apart) * apart], dim=1),
        use=torch.where(apart, apart.cumsum(dim=1) - 1 + some, there.long() - 1),
        place=counted.place,
        table=table,
    )


class _Groups(NamedTuple):
    """Bins of a histogram [groups, symbols], one group after the other."""

    place: Tensor
    often: Tensor  # 64-bit floats
    group: Tensor
    symbol: Tensor
    groups: int

    def summed(self, values: Tensor) -> Tensor:
        """Return the sum of values over every group."""
        return group_sums(values, self.group, self.groups)

    def largest(self, values: Tensor) -> Tensor:
        """Return the largest value of every group; values are 0 or more, and 0 stands for none."""
        if not on_host(values):
            return values.view(self.groups, len(values) // max(1, self.groups)).amax(dim=1)
        return values.new_zeros(self.groups).scatter_reduce_(0, self.group, values, "amax")


def _by_tensor(bins: Bins) -> tuple[_Groups, Tensor | None]:
    """Return the bins of tensors, all columns together, and which is that of each bin.

    None: each bin is one.
    """
    devices, columns, tensors, symbols = bins.shape
    if columns == 1:
        group = bins.place // symbols
        often = bins.often.double()
        return _Groups(bins.place, often, group, bins.symbol, devices * tensors), None
    # Without the columns before it, a bin lies where it does in a message of one column.
    row, size = bins.line // columns, tensors * symbols
    return _merged(bins.often, bins.place - (bins.line - row) * size, (devices * tensors, symbols))


def _merged(often: Tensor, key: Tensor, shape: tuple[int, int]) -> tuple[_Groups, Tensor]:
    """Return the bins of a histogram that keys name, and which of them is that of each key."""
    groups, symbols = shape
    size = groups * symbols
    sums = torch.zeros(size, dtype=torch.float64, device=key.device)
    sums.index_add_(0, key, often.double())
    named = torch.zeros(size, dtype=torch.bool, device=key.device).index_fill_(0, key, 1)
    place = worth_a_look(named)
    at = place.new_zeros(size).index_copy_(0, place, torch.arange(len(place), device=key.device))
    group = place // symbols
    found = _Groups(place, sums.index_select(0, place), group, place - group * symbols, groups)
    return found, at.index_select(0, key)


class _Tables(NamedTuple):
    """Tables at bins: the bytes of symbols, the bits that these take, and how long tables are."""

    table: Tensor
    bits: Tensor
    lengths: Tensor  # of all groups


def _fitting(bins: _Groups) -> _Tables:
    """Return the table of every group that fits how often its symbols occur."""
    known = _constants(bins.often.device)
    size = bins.often * (known.weights[_FULL] / bins.largest(bins.often).clamp(min=1))[bins.group]
    # Weights have four digits, so those of a number say between which two weights it lies.
    below = ((size.view(torch.int64) >> _DIGITS_BELOW) - _SMALLEST).clamp(0, _FULL - 2)
    above = size > known.between.index_select(0, below)
    # What occurs must have a probability, however small.
    table = (below + above + 1) * (bins.often > 0)
    total = bins.summed(known.weights.index_select(0, table)).clamp(min=1).log2()
    bits = total[bins.group] - known.logarithms.index_select(0, table) + ROUNDING_BITS
    return _Tables(table, bits, bins.largest((bins.symbol + 1) * (table > 0)))


class _Constants(NamedTuple):
    """What bytes stand for, where they lie."""

    weights: Tensor
    logarithms: Tensor
    between: Tensor  # the weights from which on the next byte is nearer


@lru_cache(maxsize=16)
def _constants(device: torch.device) -> _Constants:
    steps = _WEIGHTS[1 : _FULL + 1]
    arrays = _WEIGHTS, np.log2(np.maximum(_WEIGHTS, 1)), np.sqrt(steps[1:] * steps[:-1])
    return _Constants(*(torch.from_numpy(each).to(device) for each in arrays))


def model(table: Bytes) -> Model:
    """Return the coder model of a table; the only symbol of a table takes almost no bits."""
    padded = table if len(table) > 1 else np.append(table, np.uint8(0))
    weights = _WEIGHTS[padded]
    return _Categorical(weights / weights.sum(), perfect=False)


class Gaps(NamedTuple):
    """How gaps between kept units are coded: after `longest` units without one, a new piece."""

    model: Model
    longest: int


def gap_share(kept: Tensor, units: Tensor) -> Tensor:
    """Return the share of kept units in 1/65536, to 8 binary digits, so that models are few."""
    shares = (kept * _ONE // units.clamp(min=1)).clamp(min=1)
    spare = (shares.double().frexp().exponent - _DIGITS).clamp(min=0)
    return (shares >> spare << spare).clamp(1, _ONE - 1)


def gap_bits(kept: Tensor, until: Tensor, units: Tensor) -> Tensor:
    """Return the bits of the gaps between kept units, the last of which is number `until`.

    0 where all are kept, or none is.
    """
    share = gap_share(kept, units).double() / _ONE
    pieces = gap_pieces(kept, until, units)
    bits = pieces * ROUNDING_BITS - kept * share.log2() - (until - kept) * (1 - share).log2()
    return bits * _some_kept(kept, units)


def gap_pieces(kept: Tensor, until: Tensor, units: Tensor) -> Tensor:
    """Return how many symbols gaps take at most."""
    longest = _longest(gap_share(kept, units))
    return (kept + (until - kept) // longest) * _some_kept(kept, units)


def _some_kept(kept: Tensor, units: Tensor) -> Tensor:
    """Return whether anything must be said about which units are kept."""
    return (kept > 0) & (kept < units)


def _longest(share: Tensor) -> Tensor:
    """Return the longest gap that is one symbol."""
    return (_LONG * _ONE // share).clamp(1, _MOST_GAPS - 1)


@lru_cache(maxsize=1024)
def gaps(share: int) -> Gaps:
    """Return the model of gaps when a share of units (in 1/65536) is kept, all equally likely."""
    longest = int(_longest(torch.tensor(share)))
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
