"""How long a message will be, without making it: for stacks of devices, from counts alone."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from anyfleet.arrays import Floats, Ints
from anyfleet.core.layout import MessageLayout, Symbols, TensorLayout
from anyfleet.core.messages import Params
from anyfleet.core.slots import Slack
from anyfleet.parts.codec.coded_columns import Column, Layout, bucketed, entries, units
from anyfleet.parts.codec.entropy_tables import (
    MOST_SYMBOLS,
    ROUNDING_BITS,
    Choice,
    choose,
    gap_bits,
    gap_pieces,
)
from anyfleet.parts.codec.ranking import counted, last_set, where_set

# What `packed_bits` may say too much for every column: words, bytes and their lengths are whole.
SLACK_BITS = 128
# And for every bit, since the rounding of the coder is bounded and not known.
SLACK_SHARE = 1e-3
# An entry is a symbol, and a gap at most. Those that cost next to nothing add up in no other way.
SLACK = Slack(SLACK_BITS, SLACK_SHARE, entry=2 * ROUNDING_BITS)
_WORD, _ENDING = 32, 2  # bits of a word, and words in which a coder ends at most
_LARGE = 32  # bits of a level beyond the tables
_ESCAPE = 8  # bits that it takes to say so, about
_LIMITS = (1 << np.arange(8, MOST_SYMBOLS.bit_length())) - 1  # of tables, when levels are larger
_LOW = np.arange(1, 32 - _LIMITS[-1].item().bit_length())  # how many low bits there may be


class Counts(NamedTuple):
    """What decides how long each row is; of every row, column and lane."""

    levels: Ints  # how often each symbol, in a further dimension
    kept: Ints  # units
    until: Ints  # units up to the last that is kept
    low: Ints  # [rows]: bits of a level that are not in a table
    limit: Ints  # [rows]: the symbol of levels beyond the tables; 0: there are none
    signed: Ints  # levels that are not 0

    def large(self, row: int) -> Ints:
        """Levels of every column that are beyond the tables."""
        limit = int(self.limit[row])
        beyond: Ints = self.levels[row, :, :, limit].sum(axis=1) * (limit > 0)
        return beyond


def packed_bits(symbols: Symbols, envelope: MessageLayout, layout: Layout) -> Tensor:
    """How many bits `pack` takes at most, of every row and column."""
    counts, there = count(symbols, envelope, layout), units(envelope, layout)
    bits = [_row(counts, row, symbols, envelope, layout, there) for row in range(len(counts.low))]
    return torch.from_numpy(np.stack(bits))


def tables(counts: Counts, row: int) -> Choice:
    """The tables of one row: both ends of `packed_bits` and `pack` choose alike."""
    return choose(counts.levels[row].sum(axis=0))


def _row(
    counts: Counts, row: int, symbols: Symbols, envelope: MessageLayout, layout: Layout, there: Ints
) -> Floats:
    kept, chosen, low = counts.kept[row], tables(counts, row), int(counts.low[row])
    coded = counts.levels[row]
    inside = kept * (entries(envelope) // np.maximum(1, there))
    words = (coded * chosen.bits).sum(axis=(1, 2)) + gap_bits(kept, counts.until[row], there).sum(1)
    words += low * inside.sum(axis=1)
    words = _WORD * (np.ceil(words / _WORD) + _ENDING)
    signed = counts.signed[row].sum(axis=1)
    signs = 8 * np.ceil(signed / 8) * (layout.signs == "apart")
    numbers = 8 * envelope.dtype.itemsize * inside.sum(axis=1) * layout.numbers
    scales, told = _scales(symbols, envelope, layout, inside)
    records = [
        Column(flags=_flags(symbols, envelope, kept[c], counts.until[row, c], there[c]))
        for c in range(envelope.columns)
    ]
    packed = [table.tobytes() for table in chosen.tables]
    first = msgspec.structs.replace(
        records[0],
        low=low,
        limit=int(counts.limit[row]),
        tables=packed,
        use=list(chosen.use),
        counts=told,
    )
    heads = np.array([8 * len(msgspec.msgpack.encode(each)) for each in [first, *records[1:]]])
    strings = words, signs, numbers, 32 * scales, _LARGE * counts.large(row)
    total: Floats = heads + sum(bits + _length_bits(bits) for bits in strings)
    return total


def _length_bits(bits: Floats | Ints) -> Ints:
    """Bits by which the length of a byte string takes more than that of an empty one."""
    long: Ints = 8 * ((bits >= 8 << 8).astype(np.int64) + 2 * (bits >= 8 << 16))
    return long


def _scales(
    symbols: Symbols, envelope: MessageLayout, layout: Layout, inside: Ints
) -> tuple[Ints, list[int]]:
    """How many scales every column has, and how many of each lane are told."""
    if layout.bucket is not None:
        return bucketed(inside, layout.bucket).sum(axis=1), []
    told = [symbols.scales[n].shape[1] if n in symbols.scales else 0 for n in envelope.tensors]
    every = np.zeros(envelope.columns, dtype=np.int64)
    every[0] = sum(told)
    return every, told


def _flags(
    symbols: Symbols, envelope: MessageLayout, kept: Ints, until: Ints, there: Ints
) -> list[tuple[int, int] | None]:
    pieces = gap_pieces(kept, until, there)
    return [
        (int(k), int(p)) if name in symbols.kept else None
        for name, k, p in zip(envelope.tensors, kept, pieces, strict=True)
    ]


def count(symbols: Symbols, envelope: MessageLayout, layout: Layout) -> Counts:
    """Every level, flag and length of a stack, counted."""
    trees = symbols.numbers if layout.numbers else symbols.quantisation_levels
    rows = max((len(tree) for tree in trees.values()), default=len(envelope.key))
    kept, until = _kept(symbols, envelope, layout, rows)
    levels = {} if layout.numbers else symbols.quantisation_levels
    low, limit, size = _symbols(levels, layout, rows)
    found = np.zeros((rows, envelope.columns, len(envelope.tensors), size), dtype=np.int64)
    signed = np.zeros(found.shape[:-1], dtype=np.int64)
    for at, (name, lane) in enumerate(envelope.tensors.items()):
        for column in range(len(lane.ends)) if name in levels else ():
            inside, row = _inside(symbols, name, lane, column, layout.unit(lane))
            coded = _numbered(layout.codes(inside), row, _Ends(low, limit, size))
            bins = torch.bincount(coded.flatten(), minlength=rows * size).cpu().numpy()
            found[:, column, at] = bins.reshape(rows, size)
            if low.any():
                # The first symbol then also stands for levels that have low bits only.
                some = torch.bincount(row.repeat_interleave(inside.shape[1])[inside.flatten() != 0])
                signed[: len(some), column, at] = some.cpu().numpy()
    if not low.any():
        signed = found.sum(axis=-1) - found[..., 0]
    return Counts(found, kept, until, low, limit, signed)


class _Ends(NamedTuple):
    """Where tables end: low bits and limit of every row, and the symbols of the longest table."""

    low: Ints
    limit: Ints
    size: int


def _symbols(levels: Params, layout: Layout, rows: int) -> _Ends:
    """How levels are divided between tables, low bits and what is sent as it is."""
    largest = np.zeros(rows, dtype=np.int64)
    for each in levels.values():
        if each.shape[1]:
            for end in torch.aminmax(each, dim=1):
                largest = np.maximum(largest, layout.codes(end).cpu().numpy())
    low, limit = np.zeros_like(largest), np.zeros_like(largest)
    for row in np.flatnonzero(largest > _LIMITS[0]):
        codes = [layout.codes(each[row]) for each in levels.values()]
        low[row], limit[row] = _divided(codes)
    # A limit that nothing reaches is none.
    limit = np.where(largest >> low < limit, 0, limit)
    symbols = np.where(limit > 0, limit, largest >> low)
    return _Ends(low, limit, int(symbols.max(initial=0)) + 1)


def _divided(codes: Sequence[Tensor]) -> tuple[int, int]:
    """Low bits and limit that make a message with these levels about the shortest."""
    # Few levels are as large as that, mostly: only these are looked at.
    large = torch.cat([each[each >= int(_LIMITS[0])] for each in codes]).cpu().numpy()
    total = sum(map(len, codes))
    low = np.concatenate([np.zeros_like(_LIMITS), _LOW])
    limit = np.concatenate([_LIMITS, np.full_like(_LOW, _LIMITS[-1])])
    beyond = len(large) - np.searchsorted(np.sort(large), limit << low)
    best = int((low * total + 8 * limit + (_LARGE + _ESCAPE) * beyond).argmin())
    return int(low[best]), int(limit[best])


def _inside(
    symbols: Symbols, name: str, lane: TensorLayout, column: int, wide: int
) -> tuple[Tensor, Tensor]:
    """Levels of the units that one column keeps of one lane, and the row of each."""
    begin, end = lane.begins(column), lane.ends[column]
    levels = symbols.quantisation_levels[name][:, begin:end]
    if name not in symbols.kept:
        return levels, torch.arange(len(levels), device=levels.device)
    flags = symbols.kept[name][:, begin // wide : end // wide]
    where = where_set(flags)
    inside = levels.reshape(-1, wide).index_select(0, where)
    return inside, where // max(1, flags.shape[1])


def _numbered(codes: Tensor, row: Tensor, ends: _Ends) -> Tensor:
    """Symbols in the tables, those of each row in a range of their own."""
    if ends.low.any():
        codes = codes >> torch.from_numpy(ends.low).to(codes)[row, None]
    if ends.limit.any():
        most = np.where(ends.limit > 0, ends.limit, ends.size)
        codes = codes.minimum(torch.from_numpy(most).to(codes)[row, None])
    return codes if len(ends.low) == 1 else codes + (ends.size * row).to(codes)[:, None]


def _kept(
    symbols: Symbols, envelope: MessageLayout, layout: Layout, rows: int
) -> tuple[Ints, Ints]:
    """Units kept, and units up to the last of these."""
    every = units(envelope, layout)
    kept = np.broadcast_to(every, (rows, *every.shape)).copy()
    until = kept.copy()
    for at, (name, lane) in enumerate(envelope.tensors.items()):
        if name not in symbols.kept:
            continue
        wide = layout.unit(lane)
        for column, end in enumerate(lane.ends):
            flags = symbols.kept[name][:, lane.begins(column) // wide : end // wide]
            kept[:, column, at] = counted(flags).cpu().numpy()
            if flags.shape[1]:
                until[:, column, at] = last_set(flags).cpu().numpy()
    return kept, until
