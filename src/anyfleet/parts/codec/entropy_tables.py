"""Probability tables in whole numbers: the same on every machine, and short enough for a header.

A table has one byte for each symbol, relative to the most frequent one: a whole number with three
binary digits after the first, so that rare symbols may be a million times rarer. Its quotients are
the same in binary floating point on all machines, so both ends of a message build one model.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anyfleet.arrays import Ints
from anyfleet.parts.codec.range_coder import Model, categorical
from anyfleet.parts.codec.ranking import (
    Array,
    array_of,
    histogram,
    library_of,
    log2,
    on_host,
    tally,
)

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

    bits: Array  # [devices, columns]: of all symbols
    lengths: Array  # [devices, 1 + tensors]: symbols of the common table, then of own ones; or 0
    there: Array  # [devices, tensors]: flags of tensors that have symbols
    apart: Array  # [devices, tensors]: flags of tensors that have their own table
    place: Array | None  # symbols of tensors, counted through [devices, tensors, symbols]; or all
    table: Array  # their bytes

    @property
    def use(self) -> Array:
        """The number of the table of each tensor, [devices, tensors]; -1: it has no symbols."""
        some = (self.there & ~self.apart).any(axis=1)[:, None]
        number = self.apart.cumsum(axis=1) - 1 + some
        return number * self.apart + (1 * self.there - 1) * ~self.apart


@dataclass(frozen=True, eq=False)
class Bins:
    """How often symbols occur: bins of a histogram [devices, columns, tensors, symbols].

    On the host these are the bins that `place` names, and the others hold nothing. Elsewhere they
    are all bins, as nobody waits for which hold something.
    """

    often: Array  # 64-bit floats
    shape: tuple[int, int, int, int]
    place: Array | None = None

    @classmethod
    def of(
        cls, keys: Tensor, shape: tuple[int, int, int, int], flags: Tensor | None = None
    ) -> "Bins":
        """Return how often bins are named by keys; off the host `flags` say which of them count."""
        if on_host(keys):
            place, often = tally(keys.numpy(), prod(shape))
            return cls(often.astype(np.float64), shape, place)
        if flags is not None:
            # One more bin takes what does not count.
            keys = torch.where(flags, keys, prod(shape))
        return cls(histogram(keys, prod(shape) + 1)[:-1].double().view(shape), shape)

    @cached_property
    def symbol(self) -> Array:
        """The symbol of every bin."""
        if self.place is None:
            return torch.arange(self.shape[3], device=self.often.device)
        return self.place % self.shape[3]

    @cached_property
    def line(self) -> Array:
        """The column of its device that has the bin, counted through all devices; on the host."""
        return None if self.place is None else self.place // (self.shape[2] * self.shape[3])

    def of_device(self, values: Array) -> Array:
        """Return for every bin the value of its device."""
        if self.place is None:
            return values[:, None, None, None]
        return values[self.line // self.shape[1]]

    def by_column(self, values: Array) -> Array:
        """Return the sums of values of bins, [devices, columns]."""
        if self.place is None:
            return values.sum(dim=(2, 3))
        devices, columns, *_ = self.shape
        return np.bincount(self.line, values, devices * columns).reshape(devices, columns)


def choose(bins: Bins) -> Choice:
    """Return the tables that make messages short.

    There is one for all tensors, and one more for each tensor that saves more than its table costs.
    """
    devices, _, tensors, symbols = bins.shape
    counted, at = _by_tensor(bins)
    common = _Common.of(counted, (devices, tensors, symbols))
    own, shared = _fitting(counted.beside(common.merged(counted.often))).split(counted)
    table, bits, lengths = common.spread(shared)
    price = _TABLE_BITS + 8 * own.lengths
    costs = [counted.summed(counted.often * each) for each in (bits, own.bits)]
    apart = (own.lengths > 0) & (costs[0] > costs[1] + price)
    # Off the host nobody waits for whether there are some.
    if tensors > 1 and (bins.place is None or apart.any()):
        where, alone = library_of(apart).where, counted.of_group(apart)
        rest = common.spread(_fitting(common.merged(counted.often * ~alone)))
        mixed = where(alone, own.bits, rest.bits)
        together, divided = (common.summed(counted.often * each) for each in (bits, mixed))
        divided = divided + 8 * rest.lengths + (price * apart).reshape(devices, tensors).sum(axis=1)
        shorter = divided < together + 8 * lengths
        every = shorter[:, None] & (own.lengths >= 0).reshape(devices, tensors)
        divide = counted.of_group(every.reshape(-1))
        apart = apart & every.reshape(-1)
        bits = where(divide, mixed, bits)
        table = where(divide, where(alone, own.table, rest.table), table)
        lengths = where(shorter, rest.lengths, lengths)
    there, apart, alone = (
        each.reshape(devices, tensors) for each in (own.lengths > 0, apart, own.lengths * apart)
    )
    some = (there & ~apart).any(axis=1)
    if at is not None:
        bits = bits[at]
    elif bins.place is None:
        bits = bits.view(devices, 1, tensors, symbols)
    return Choice(
        bits=bins.by_column(bins.often * bits),
        lengths=library_of(alone).concatenate([(lengths * some)[:, None], alone], axis=1),
        there=there,
        apart=apart,
        place=counted.place,
        table=table,
    )


class _Groups(NamedTuple):
    """Bins of a histogram [groups, symbols], one group after the other; off the host all bins."""

    often: Array  # 64-bit floats
    symbol: Array
    groups: int
    place: Array | None = None
    group: Array | None = None

    def beside(self, other: "_Groups") -> "_Groups":
        """Return these groups, and after them those of another."""
        groups = self.groups + other.groups
        if self.group is None or other.group is None:
            return _Groups(torch.cat([self.often, other.often]), self.symbol, groups)
        group = np.concatenate([self.group, other.group + self.groups])
        often, symbol = (np.concatenate(pair) for pair in zip(self[:2], other[:2], strict=True))
        return _Groups(often, symbol, groups, group=group)

    def of_group(self, values: Array) -> Array:
        """Return for every bin the value of its group."""
        return values[:, None] if self.group is None else values[self.group]

    def summed(self, values: Array) -> Array:
        """Return the sum of values over every group; it does not depend on other groups."""
        if self.group is None:
            return values.sum(dim=1)
        return np.bincount(self.group, values, self.groups)

    def largest(self, values: Array) -> Array:
        """Return the largest value of every group; values are 0 or more, and 0 stands for none."""
        if self.group is None:
            return values.amax(dim=1)
        found = np.zeros(self.groups, values.dtype)
        np.maximum.at(found, self.group, values)
        return found


def _by_tensor(bins: Bins) -> tuple[_Groups, Array | None]:
    """Return the bins of tensors, all columns together, and which is that of each bin.

    None: each bin is one.
    """
    devices, columns, tensors, symbols = bins.shape
    groups = devices * tensors
    if bins.place is None:
        return _Groups(bins.often.sum(dim=1).view(groups, symbols), bins.symbol, groups), None
    if columns == 1:
        return _Groups(bins.often, bins.symbol, groups, bins.place, bins.place // symbols), None
    # Without the columns before it, a bin lies where it does in a message of one column.
    row, size = bins.line // columns, tensors * symbols
    place, at = _named(bins.place - (bins.line - row) * size, groups * symbols)
    often = np.bincount(at, bins.often, len(place))
    return _Groups(often, place % symbols, groups, place, place // symbols), at


def _named(key: Ints, size: int) -> tuple[Ints, Ints]:
    """Return the numbers below `size` that keys name, ascending, and which is that of each key."""
    flags = np.zeros(size, dtype=bool)
    flags[key] = True
    place, at = np.flatnonzero(flags), np.empty(size, dtype=np.int64)
    at[place] = np.arange(len(place))
    return place, at[key]


class _Common(NamedTuple):
    """The bins of all tensors of a device, put together."""

    shape: tuple[int, int, int]  # devices, tensors, symbols
    bins: _Groups  # of devices; how often they occur is still open
    row: Array | None = None  # on the host, the device of every bin of a tensor
    at: Array | None = None  # and its bin

    @classmethod
    def of(cls, counted: _Groups, shape: tuple[int, int, int]) -> "_Common":
        """Return the bins of devices, from those of tensors."""
        devices, tensors, symbols = shape
        if counted.group is None:
            return cls(shape, counted._replace(groups=devices))
        row = counted.group // max(1, tensors)
        place, at = _named(row * symbols + counted.symbol, devices * symbols)
        bins = _Groups(counted.often, place % symbols, devices, place, place // symbols)
        return cls(shape, bins, row, at)

    def merged(self, often: Array) -> _Groups:
        """Return the bins of devices when those of tensors occur so often."""
        if self.at is None:
            return self.bins._replace(often=often.view(self.shape).sum(dim=1))
        return self.bins._replace(often=np.bincount(self.at, often, len(self.bins.symbol)))

    def spread(self, tables: "_Tables") -> "_Tables":
        """Return the tables of devices at the bins of tensors."""
        if self.at is None:
            table, bits = (e.repeat_interleave(self.shape[1], dim=0) for e in tables[:2])
        else:
            table, bits = (each[self.at] for each in tables[:2])
        return _Tables(table, bits, tables.lengths)

    def summed(self, values: Array) -> Array:
        """Return the sums of values of bins of tensors over devices."""
        if self.row is None:
            return values.view(self.shape[0], -1).sum(dim=1)
        return np.bincount(self.row, values, self.shape[0])


class _Tables(NamedTuple):
    """Tables at bins: the bytes of symbols, the bits that these take, and how long tables are."""

    table: Array
    bits: Array
    lengths: Array  # of all groups

    def split(self, first: _Groups) -> "tuple[_Tables, _Tables]":
        """Return the tables of the first groups, and those of the rest."""
        table, bits, lengths = self
        bins, groups = len(first.often), first.groups
        mine = _Tables(table[:bins], bits[:bins], lengths[:groups])
        return mine, _Tables(table[bins:], bits[bins:], lengths[groups:])


def _fitting(bins: _Groups) -> _Tables:
    """Return the table of every group that fits how often its symbols occur."""
    device = torch.device("cpu") if bins.group is not None else bins.often.device
    weights, logarithms, between = map(array_of, _constants(device))
    some = bins.often > 0
    size = bins.often * bins.of_group(weights[_FULL] / bins.largest(bins.often).clip(min=1))
    # Weights have four digits, so those of a number say between which two weights it lies.
    digits = size.view(library_of(size).int64) >> _DIGITS_BELOW
    below = (digits - _SMALLEST).clip(0, _FULL - 2)
    # What occurs must have a probability, however small.
    table = (below + (size > between[below]) + 1) * some
    total = log2(bins.summed(weights[table]).clip(min=1))
    bits = bins.of_group(total) - logarithms[table] + ROUNDING_BITS
    return _Tables(table, bits, bins.largest((bins.symbol + 1) * some))


@lru_cache(maxsize=16)
def _constants(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return weights, their logarithms, and the sizes from which on the next weight is nearer."""
    steps = _WEIGHTS[1 : _FULL + 1]
    between = np.sqrt(steps[1:] * steps[:-1])
    arrays = _WEIGHTS, np.log2(np.maximum(_WEIGHTS, 1)), between
    weights, logarithms, nearer = (torch.from_numpy(each).to(device) for each in arrays)
    return weights, logarithms, nearer


def model(table: Bytes) -> Model:
    """Return the coder model of a table; the only symbol of a table takes almost no bits."""
    padded = table if len(table) > 1 else np.append(table, np.uint8(0))
    weights = _WEIGHTS[padded]
    return categorical(weights / weights.sum())


class Gaps(NamedTuple):
    """How gaps between kept units are coded: after `longest` units without one, a new piece."""

    model: Model
    longest: int


class GapSizes(NamedTuple):
    """What the gaps between kept units take; 0 where all are kept, or none is."""

    bits: Array
    pieces: Array  # symbols, at most


def gap_share(kept: Tensor, units: Tensor) -> Tensor:
    """Return the share of kept units in 1/65536, to 8 binary digits, so that models are few."""
    shares = (kept * _ONE // units.clamp(min=1)).clamp(min=1)
    spare = (shares.double().frexp().exponent - _DIGITS).clamp(min=0)
    return (shares >> spare << spare).clamp(1, _ONE - 1)


def gap_sizes(kept: Tensor, until: Tensor, units: Tensor) -> GapSizes:
    """Return what the gaps between kept units take, the last of which is number `until`."""
    longest, taken, left = map(array_of, _gap_tables(kept.device))
    kept, until, units = map(array_of, (kept, until, units))
    skipped, some, share = until - kept, kept < units, kept * _ONE // units.clip(min=1)
    pieces = (kept + skipped // longest[share]) * some
    bits = pieces * ROUNDING_BITS - kept * taken[share] - skipped * left[share]
    return GapSizes(bits * some, pieces)


@lru_cache(maxsize=16)
def _gap_tables(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return what is known of gaps by the share of kept units in 1/65536, from 0 on.

    These are the longest one, and the logarithms of how probable a unit is kept or left out.
    """
    share = gap_share(torch.arange(_ONE + 1), torch.tensor(_ONE))
    part = share.double() / _ONE
    arrays = _longest(share), part.log2(), (1 - part).log2()
    longest, taken, left = (each.to(device) for each in arrays)
    return longest, taken, left


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
    return Gaps(categorical(np.array([*masses, left]) / float(1 << 40)), longest)


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
