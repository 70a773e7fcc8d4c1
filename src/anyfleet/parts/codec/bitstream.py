"""Symbols as bytes and back, and how many bytes they make: entropy-coded, column by column.

A column is a small record of numbers and byte strings (`Column`, msgpack). Its words are one stream
of a range coder: for every tensor the gaps between kept units, then the quantisation levels of
those units. Probability tables go with the first column, so nothing can be read without it, and
with it any number of further columns. docs/wire.md has the bytes.

`packed_bits` counts a whole stack of messages without making them. `unpack` is for bytes from
anywhere: it allocates nothing but what the receiver's own layout asks for, and checks every claim
of a message against that layout and against the bytes that are there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import constriction
import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anyfleet.arrays import Flags, Ints
from anyfleet.core.layout import MessageLayout, Symbols, TensorLayout
from anyfleet.core.slots import Slack
from anyfleet.errors import BadMessage
from anyfleet.parts.codec.entropy_tables import (
    MOST_SYMBOLS,
    ROUNDING_BITS,
    Bins,
    Bytes,
    Choice,
    Model,
    choose,
    from_gaps,
    gap_bits,
    gap_pieces,
    gap_share,
    gaps,
    model,
    to_gaps,
)
from anyfleet.parts.codec.ranking import counted, last_set, on_host, tally, where_set, worth_a_look

QuantisationLevels = NDArray[np.int32]
N = TypeVar("N", int, Tensor)
MOST_LEVEL = (1 << 30) - 1  # either side of 0: a quantisation level with its sign has 31 bits

# By how much `packed_bits` may exceed the bits of a column: words, bytes and lengths are whole.
SLACK_BITS = 128
# And by how much for every bit, since the rounding of the coder is bounded but not known.
SLACK_SHARE = 1e-3
# An entry is one symbol and at most one gap. Those that cost next to nothing still add up.
SLACK = Slack(SLACK_BITS, SLACK_SHARE, entry=2 * ROUNDING_BITS)

_Encoder = constriction.stream.queue.RangeEncoder
_Decoder = constriction.stream.queue.RangeDecoder
_Uniform = constriction.stream.model.Uniform

_WORD, _ENDING = 32, 2  # bits of a word, and words in which a coder ends at most
_LARGE = 32  # bits of a quantisation level beyond the tables
_ESCAPE = 8  # bits that it takes to say so, about
# Of tables, when levels are larger.
_LIMITS = tuple((1 << digits) - 1 for digits in range(8, MOST_SYMBOLS.bit_length()))
_LOW = range(1, 32 - _LIMITS[-1].bit_length())  # how many low bits there may be
_BINS = 1 << 23  # of histograms that are counted at once
_MOST_LOW = 31 - (MOST_SYMBOLS.bit_length() - 1)  # low bits of a level that has 31 bits in all
_MOST_CODE = 2 * MOST_LEVEL + 1

# --- the format -------------------------------------------------------------------------------


@dataclass(frozen=True)
class SymbolFormat:
    """How the symbols of a codec travel; quantisation levels lie within ±`most_level`.

    Signs travel "apart", one bit for every level that is not 0, or "within" the levels, whose
    distribution then has two sides. Flags say what was kept of every entry, or with `kernels` of
    every kernel. `bucket`: one scale for so many kept entries of a tensor, sent with the column in
    which they begin; None: all scales of a tensor go ahead, with the first column. With `numbers`,
    kept entries travel as they are, and there are no levels. A codec that knows the largest
    magnitude of its levels (`most_level`) spares an accelerator long tables.
    """

    signs: Literal["apart", "within"] = "apart"
    kernels: bool = False
    bucket: int | None = None
    numbers: bool = False
    most_level: int = MOST_LEVEL

    @property
    def signs_apart(self) -> bool:
        """A flag: there are levels, and their signs travel apart."""
        return self.signs == "apart" and not self.numbers

    @property
    def most_code(self) -> int:
        """The largest code that a level can have."""
        return self.most_level if self.signs == "apart" else 2 * self.most_level

    def unit(self, tensor: TensorLayout) -> int:
        """Return the number of entries under one flag."""
        return tensor.unit if self.kernels else 1

    def codes(self, levels: Tensor) -> Tensor:
        """Return levels as codes from 0 on: without their sign, or with every sign in between."""
        if self.signs == "apart":
            return levels.abs()
        return (levels << 1).bitwise_xor_(levels >> 31)

    def levels(self, codes: QuantisationLevels) -> QuantisationLevels:
        """Return the levels of codes: the inverse of `codes`, up to signs that travel apart."""
        # An odd code 2n - 1 is the level -n: the complement of its half.
        return codes if self.signs == "apart" else (codes >> 1) ^ -(codes & 1)


# Lists of a column have an entry for each tensor: longer ones are refused before they are made.
_PerTensor = msgspec.Meta(max_length=1 << 16)


class Column(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One column of a message."""

    # Of every tensor, the kept units and the gap symbols that say which; None: all are kept.
    flags: Annotated[list[tuple[int, int] | None], _PerTensor]
    scales: bytes = b""  # 4 bytes each
    words: bytes = b""  # of the range coder
    signs: bytes = b""  # a bit each
    numbers: bytes = b""
    large: bytes = b""  # codes beyond the tables, 4 bytes each
    low: int = 0  # bits of every code that are not in a table; this and the rest: first column
    limit: int = 0  # the symbol of a code beyond the tables; 0: there are none
    tables: Annotated[list[bytes], _PerTensor] = []
    use: Annotated[list[int], _PerTensor] = []  # which table each tensor has, or -1
    counts: Annotated[list[int], _PerTensor] = []  # scales of each tensor, unless by buckets


@lru_cache(maxsize=64)
def _grid(tensors: tuple[TensorLayout, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the entries of each column and tensor, [columns, tensors], and the units of tensors.

    It is found once: a copy to an accelerator would hold up what runs there.
    """
    ends = torch.tensor([(0, *tensor.ends) for tensor in tensors], dtype=torch.int64)
    entries = ends.diff(dim=1).T if tensors else torch.zeros(1, 0, dtype=torch.int64)
    units = torch.tensor([tensor.unit for tensor in tensors], dtype=torch.int64)
    return entries.to(device), units.to(device)


class _Pieces(NamedTuple):
    """The entries and the units of every column and tensor, [columns, tensors]."""

    entries: Tensor
    units: Tensor

    @classmethod
    def of(cls, layout: MessageLayout, form: SymbolFormat, device: torch.device) -> "_Pieces":
        """Return what the columns of a whole message hold."""
        entries, units = _grid(tuple(layout.tensors.values()), device)
        return cls(entries, entries // units if form.kernels else entries)

    def inside(self, kept: Tensor) -> Tensor:
        """Return how many entries so many kept units have."""
        return kept * (self.entries // self.units.clamp(min=1))


def _bucketed(inside: Tensor, bucket: int) -> Tensor:
    """Return how many buckets of kept entries begin in each column, [devices, columns, tensors]."""
    until = (inside.cumsum(dim=1) + (bucket - 1)) // bucket
    return until.diff(dim=1, prepend=torch.zeros_like(until[:, :1]))


def _scale_counts(symbols: Symbols, layout: MessageLayout) -> list[int]:
    return [symbols.scales[n].shape[1] if n in symbols.scales else 0 for n in layout.tensors]


# --- counting ---------------------------------------------------------------------------------


class Counts(NamedTuple):
    """What decides how long each message is."""

    symbols: Bins  # of tables
    kept: Tensor  # [devices, columns, tensors]: units
    until: Tensor  # [devices, columns, tensors]: units up to the last that is kept
    low: Tensor  # [devices]: bits of a code that are not in a table
    limit: Tensor  # [devices]: the symbol of codes beyond the tables; 0: there are none
    zeros: Tensor  # [devices, columns]: kept levels that are 0


def packed_bits(symbols: Symbols, layout: MessageLayout, form: SymbolFormat) -> Tensor:
    """Return how many bits `pack` takes at most, [devices, columns]."""
    flat = _Flat.of(symbols, layout, form)
    ends = _divide(flat, form)
    at_once = max(1, _BINS // max(1, ends.size * layout.columns * len(layout.tensors)))
    parts = [
        _counted_bits(_count(flat.rows(part), ends.rows(part)), symbols, layout, form)
        for part in (slice(n, n + at_once) for n in range(0, len(flat.codes), at_once))
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _counted_bits(
    counts: Counts, symbols: Symbols, layout: MessageLayout, form: SymbolFormat
) -> Tensor:
    pieces, chosen = _Pieces.of(layout, form, counts.kept.device), choose(counts.symbols)
    inside = pieces.inside(counts.kept)
    entries = inside.sum(dim=2)
    words = chosen.bits + gap_bits(counts.kept, counts.until, pieces.units).sum(dim=2)
    words = _WORD * ((words + counts.low[:, None] * entries).div(_WORD).ceil() + _ENDING)
    signs = 8 * ((entries - counts.zeros) / 8).ceil() * form.signs_apart
    numbers = 8 * layout.dtype.itemsize * entries * form.numbers
    scales = torch.zeros_like(entries)
    if form.bucket is not None:
        scales = _bucketed(inside, form.bucket).sum(dim=2)
    else:
        scales[:, 0].fill_(sum(_scale_counts(symbols, layout)))
    limit = counts.limit[counts.symbols.line // layout.columns]
    beyond = counts.symbols.often * ((counts.symbols.symbol == limit) & (limit > 0))
    large = counts.symbols.by_column(beyond)
    strings = words, signs, numbers, 32 * scales, _LARGE * large
    heads = _head_bits(counts, chosen, symbols, layout, form)
    return heads + sum(bits + _length_bits(bits) for bits in strings)


def _head_bits(
    counts: Counts, chosen: Choice, symbols: Symbols, layout: MessageLayout, form: SymbolFormat
) -> Tensor:
    """Return the bits of columns without what their byte strings hold, [devices, columns]."""
    units = _Pieces.of(layout, form, counts.kept.device).units
    pairs = torch.stack([counts.kept, gap_pieces(counts.kept, counts.until, units)])
    whole = [at for at, name in enumerate(layout.tensors) if name not in symbols.kept]
    flags = 1 + _number_bytes(pairs).sum(dim=0)
    for at in whole:
        flags[:, :, at].fill_(1)
    many = _list_bytes(len(layout.tensors))
    # One byte for the record, two for each of its strings, one for each number and list in it.
    found = flags.sum(dim=2) + (1 + many + 2 * 5 + 5)
    lengths, stated = chosen.lengths, _scale_counts(symbols, layout) if form.bucket is None else []
    tables = (lengths + 2 + (lengths > 255)) * (lengths > 0)
    first = _number_bytes(torch.stack([counts.low, counts.limit])).sum(dim=0)
    first += _list_bytes((lengths > 0).sum(dim=1)) + tables.sum(dim=1)
    first += many + _number_bytes(chosen.use).sum(dim=1)
    first += _list_bytes(len(stated)) + sum(_number_bytes(count) for count in stated)
    found[:, 0] += first - 5
    return 8 * found


def _number_bytes(number: N) -> N:
    """Return the bytes of whole numbers from -1 to 2 ** 32 - 1 in msgpack."""
    return 1 + (number > 127) + (number > 255) + 2 * (number > 65535)


def _list_bytes(length: N) -> N:
    """Return the bytes that say how long a list is."""
    return 1 + 2 * (length > 15) + 2 * (length > 65535)


def _length_bits(bits: Tensor) -> Tensor:
    """Return by how many bits the length of a byte string exceeds that of an empty one."""
    return 8 * ((bits >= 8 << 8).long() + 2 * (bits >= 8 << 16))


@dataclass(frozen=True, eq=False)
class _Flat:
    """The codes and flags of a stack, all tensors side by side."""

    codes: Tensor  # [devices, entries]
    inside: Tensor | None  # flags of kept entries; None: all are kept
    kept: Tensor  # [devices, columns, tensors]: units
    until: Tensor  # [devices, columns, tensors]: units up to the last that is kept
    ends: tuple[tuple[int, int], ...]  # where columns of tensors end, and their numbers

    @classmethod
    def of(cls, symbols: Symbols, layout: MessageLayout, form: SymbolFormat) -> "_Flat":
        """Return what is counted of symbols."""
        trees = symbols.numbers if form.numbers else symbols.quantisation_levels
        names = [name for name in layout.tensors if name in trees and not form.numbers]
        devices = max((len(tree) for tree in trees.values()), default=len(layout.key))
        like = next(iter(trees.values()), layout.key)
        codes = [torch.zeros(devices, 0, dtype=torch.int32, device=like.device)]
        codes += [form.codes(trees[name]) for name in names]
        inside = None
        if any(name in symbols.kept for name in names):
            flags = [_entry_flags(symbols, name, layout.tensors[name], form) for name in names]
            inside = torch.cat([each.expand(devices, -1) for each in flags], dim=1)
        units = _Pieces.of(layout, form, like.device).units.expand(devices, -1, -1)
        kept, until = units.clone(), units.clone()
        ends, before = [], 0
        for at, (name, tensor) in enumerate(layout.tensors.items()):
            for column, end in enumerate(tensor.ends):
                if name in symbols.kept:
                    unit = form.unit(tensor)
                    part = symbols.kept[name][:, tensor.begins(column) // unit : end // unit]
                    kept[:, column, at], until[:, column, at] = counted(part), last_set(part)
                if name in names:
                    ends.append((before + end, column * len(layout.tensors) + at))
            before += tensor.entries * (name in names)
        return cls(torch.cat(codes, dim=1), inside, kept, until, tuple(ends))

    def rows(self, part: slice) -> "_Flat":
        """Return some of the devices."""
        inside = None if self.inside is None else self.inside[part]
        return _Flat(self.codes[part], inside, self.kept[part], self.until[part], self.ends)

    def bins(self, codes: Tensor, size: int) -> Bins:
        """Return how often each of `size` codes is kept."""
        shape = (*self.kept.shape, size)
        first = prod(shape[1:]) * torch.arange(len(codes), device=codes.device)
        keys, begin = codes + first.to(codes.dtype)[:, None], 0
        for end, number in self.ends:
            keys[:, begin:end] += size * number
            begin = end
        if self.inside is None:
            return Bins(*tally(keys.flatten(), prod(shape)), shape)
        if on_host(keys):
            kept = keys.flatten().index_select(0, where_set(self.inside))
            return Bins(*tally(kept, prod(shape)), shape)
        # One more bin takes what is not kept.
        keys = torch.where(self.inside, keys, prod(shape))
        place, often = tally(keys.flatten(), prod(shape) + 1)
        return Bins(place[:-1], often[:-1], shape)


def _entry_flags(symbols: Symbols, name: str, tensor: TensorLayout, form: SymbolFormat) -> Tensor:
    """Return the flag of its unit for every entry."""
    if name not in symbols.kept:
        like = symbols.quantisation_levels[name]
        return torch.ones(1, tensor.entries, dtype=torch.bool, device=like.device)
    kept, unit = symbols.kept[name], form.unit(tensor)
    return kept if unit == 1 else kept.repeat_interleave(unit, dim=1)


def count(symbols: Symbols, layout: MessageLayout, form: SymbolFormat) -> Counts:
    """Return every symbol, flag and length of a stack, counted."""
    flat = _Flat.of(symbols, layout, form)
    return _count(flat, _divide(flat, form))


def _count(flat: _Flat, ends: "_Ends") -> Counts:
    codes = flat.codes
    if ends.plain:
        found = levels = flat.bins(codes, ends.size)
    else:
        most = torch.where(ends.limit > 0, ends.limit, ends.size).to(codes.dtype)
        high = (codes >> ends.low.to(codes.dtype)[:, None]).minimum(most[:, None])
        found = flat.bins(high, ends.size)
        # The first symbol then also stands for codes that have low bits only.
        levels = flat.bins(codes.clamp(max=1), 2)
    zeros = levels.by_column(levels.often * (levels.symbol == 0))
    return Counts(found, flat.kept, flat.until, ends.low, ends.limit, zeros)


class _Ends(NamedTuple):
    """Where tables end: low bits and limit of every row, and the symbols of the longest table."""

    low: Tensor
    limit: Tensor
    size: int
    plain: bool  # no row has low bits or a limit

    def rows(self, part: slice) -> "_Ends":
        """Return those of some devices."""
        return _Ends(self.low[part], self.limit[part], self.size, self.plain)


def _divide(flat: _Flat, form: SymbolFormat) -> _Ends:
    """Return how codes are divided between tables, low bits and what is sent as it is."""
    codes, none = flat.codes, flat.kept.new_zeros(len(flat.codes))
    if not codes.numel():
        return _Ends(none, none, 1, plain=True)
    largest = codes.amax(dim=1).long()
    most = int(largest.max()) if on_host(codes) else form.most_code
    if most <= _LIMITS[0]:
        return _Ends(none, none, most + 1, plain=True)
    rows = worth_a_look(largest > _LIMITS[0])
    low, limit = (
        none.index_copy(0, rows, each) * (largest > _LIMITS[0])
        for each in _shortest_division(codes.index_select(0, rows))
    )
    # A limit that nothing reaches is none.
    limit = limit * (largest >> low >= limit)
    if on_host(codes):
        most = int(torch.where(limit > 0, limit, largest >> low).max())
    return _Ends(low, limit, min(most + 1, MOST_SYMBOLS), plain=False)


def _shortest_division(codes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the low bits and the limit that make messages with these codes about the shortest."""
    low, limit = _divisions(codes.device)
    ends = limit << low
    # Mostly few codes are that large: only these are looked at.
    where = worth_a_look(codes >= _LIMITS[0])
    reached = torch.bucketize(codes.flatten().index_select(0, where), ends, right=True)
    row, size = where // codes.shape[1], len(ends) + 1
    place, counts = tally(reached + size * row, size * len(codes))
    often = torch.zeros(size * len(codes), dtype=torch.int64, device=codes.device)
    often = often.index_copy_(0, place, counts).view(len(codes), size)
    beyond = often[:, 1:].flip(1).cumsum(dim=1).flip(1)
    costs = low * codes.shape[1] + 8 * limit + (_LARGE + _ESCAPE) * beyond
    best = costs.argmin(dim=1)
    return low[best], limit[best]


@lru_cache(maxsize=16)
def _divisions(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return all pairs of low bits and a limit that are tried."""
    low = [0] * len(_LIMITS) + list(_LOW)
    limit = [*_LIMITS, *[_LIMITS[-1]] * len(_LOW)]
    return torch.tensor(low, device=device), torch.tensor(limit, device=device)


# --- writing ----------------------------------------------------------------------------------


def pack(symbols: Symbols, layout: MessageLayout, form: SymbolFormat) -> tuple[bytes, ...]:
    """Return the symbols of one device as bytes, column by column."""
    counts = count(symbols, layout, form)
    low, limit = int(counts.low[0]), int(counts.limit[0])
    tables, use = _chosen_tables(counts)
    models = [model(table) for table in tables]
    used = [models[number] if number >= 0 else None for number in use]
    there = layout.columns if symbols.columns is None else symbols.columns
    scales = _packed_scales(symbols, layout, form, counts)
    columns = []
    for number in range(there):
        writer = _Writer(form, low, limit)
        for at, (name, tensor) in enumerate(layout.tensors.items()):
            writer.write(_piece(symbols, name, tensor, number, form), used[at])
        columns.append(writer.column(scales[number]))
    if columns:
        columns[0] = msgspec.structs.replace(
            columns[0],
            low=low,
            limit=limit,
            tables=[table.tobytes() for table in tables],
            use=use,
            counts=_scale_counts(symbols, layout) if form.bucket is None else [],
        )
    return tuple(msgspec.msgpack.encode(column) for column in columns)


def _chosen_tables(counts: Counts) -> tuple[list[Bytes], list[int]]:
    """Return the tables of one message, and which of them each tensor uses."""
    chosen, (_, _, *shape) = choose(counts.symbols), counts.symbols.shape
    every, use = np.zeros(shape, dtype=np.uint8), _on_host(chosen.use[0])
    every.put(_on_host(chosen.place), _on_host(chosen.table))
    # Each tensor has the bytes of its own symbols: together they are the table.
    joined = [every[use == number].max(axis=0) for number in range(use.max(initial=-1) + 1)]
    return [np.trim_zeros(table, "b") for table in joined], use.tolist()


@dataclass(frozen=True, eq=False)
class _Piece:
    """What one column has of one tensor."""

    kept: Flags | None  # of units; None: all
    values: NDArray[Any]  # levels or numbers of all entries, a row for each unit

    @property
    def inside(self) -> NDArray[Any]:
        """The values of kept units only, one after the other."""
        if self.kept is None:
            return self.values.ravel()
        return self.values.take(np.flatnonzero(self.kept), axis=0).ravel()


def _piece(
    symbols: Symbols, name: str, tensor: TensorLayout, column: int, form: SymbolFormat
) -> _Piece:
    begin, end, unit = tensor.begins(column), tensor.ends[column], form.unit(tensor)
    tree = symbols.numbers if form.numbers else symbols.quantisation_levels
    values = _on_host(tree[name][0, begin:end]).reshape(-1, unit)
    if name not in symbols.kept:
        return _Piece(None, values)
    return _Piece(_on_host(symbols.kept[name][0, begin // unit : end // unit]), values)


class _Writer:
    """A column in the making, tensor by tensor."""

    def __init__(self, form: SymbolFormat, low: int, limit: int) -> None:
        self._format, self._low, self._limit = form, low, limit
        self._encoder = _Encoder()
        self._flags: list[tuple[int, int] | None] = []
        self._signs: list[Flags] = []
        self._numbers: list[bytes] = []
        self._large: list[bytes] = []

    def write(self, piece: _Piece, table: Model | None) -> None:
        """Add what the column has of the next tensor."""
        self._flags.append(None if piece.kept is None else self._write_flags(piece.kept))
        inside = piece.inside
        if self._format.numbers:
            self._numbers.append(inside.tobytes())
        elif table is not None:
            self._write_levels(inside, table)

    def _write_flags(self, kept: Flags) -> tuple[int, int]:
        """Write which units are kept; return how many they are, and how many symbols that took."""
        where = np.flatnonzero(kept)
        if len(where) in (0, len(kept)):
            return len(where), 0
        known = gaps(int(gap_share(*map(torch.tensor, (len(where), len(kept))))))
        symbols = to_gaps(where, known.longest)
        self._encoder.encode(symbols, known.model)
        return len(where), len(symbols)

    def _write_levels(self, levels: QuantisationLevels, table: Model) -> None:
        codes = self._format.codes(torch.from_numpy(levels)).numpy()
        symbols = codes >> self._low
        if self._limit:
            beyond = np.flatnonzero(symbols >= self._limit)
            self._large.append(codes[beyond].astype("<u4").tobytes())
            symbols[beyond] = self._limit
        self._encoder.encode(symbols, table)
        if self._low:
            self._encoder.encode(codes & ((1 << self._low) - 1), _Uniform(1 << self._low))
        if self._format.signs == "apart":
            self._signs.append(levels.take(np.flatnonzero(levels != 0)) < 0)

    def column(self, scales: bytes) -> Column:
        """Return the column, which carries these scales."""
        signs = np.concatenate([np.zeros(0, dtype=bool), *self._signs])
        return Column(
            flags=self._flags,
            scales=scales,
            words=self._encoder.get_compressed().astype("<u4").tobytes(),
            signs=np.packbits(signs).tobytes(),
            numbers=b"".join(self._numbers),
            large=b"".join(self._large),
        )


def _packed_scales(
    symbols: Symbols, layout: MessageLayout, form: SymbolFormat, counts: Counts
) -> Sequence[bytes]:
    """Return the scales that every column carries."""
    scales = {name: _on_host(rows[0]).astype("<f4") for name, rows in symbols.scales.items()}
    if form.bucket is None:
        first = b"".join(scales[name].tobytes() for name in layout.tensors if name in scales)
        return [first, *[b""] * (layout.columns - 1)]
    inside = _Pieces.of(layout, form, counts.kept.device).inside(counts.kept)
    ends = _on_host(_bucketed(inside, form.bucket)[0].cumsum(dim=0))
    begins = np.vstack([np.zeros_like(ends[:1]), ends[:-1]])
    return [
        b"".join(
            scales[name][begins[column, at] : ends[column, at]].tobytes()
            for at, name in enumerate(layout.tensors)
        )
        for column in range(layout.columns)
    ]


def _on_host(tensor: Tensor) -> NDArray[Any]:
    return tensor.detach().cpu().contiguous().numpy()


# --- reading ----------------------------------------------------------------------------------


def unpack(columns: Sequence[bytes], layout: MessageLayout, form: SymbolFormat) -> Symbols:
    """Return the symbols that leading columns hold.

    Raise BadMessage for bytes that `pack` cannot have made.
    """
    pieces = _Pieces.of(layout, form, torch.device("cpu"))
    sizes = pieces.entries.sum(dim=1).tolist()
    records = [_record(data, size, layout) for data, size in zip(columns, sizes, strict=False)]
    targets = [_Target(tensor, form, layout) for tensor in layout.tensors.values()]
    if not records:
        return _symbols(layout, targets, [None] * len(targets), form).leading(0)
    head = _head(records[0], len(targets), form)
    scales: list[list[NDArray[np.float32]]] = [[] for _ in targets]
    for number, record in enumerate(records):
        reader = _Reader(record, form, head)
        for at, target in enumerate(targets):
            reader.read(target, number, at, flagged=records[0].flags[at] is not None)
        reader.close()
        counts = head.counts if number == 0 else [0] * len(targets)
        if form.bucket is not None:
            counts = [target.buckets(number, form.bucket) for target in targets]
        for at, part in enumerate(_split_scales(record.scales, counts)):
            scales[at].append(part)
    for target, flags in zip(targets, records[0].flags, strict=True):
        target.flagged = flags is not None
    joined = [np.concatenate(parts) for parts in scales]
    found = _symbols(layout, targets, joined, form)
    return found if len(records) == layout.columns else found.leading(len(records))


class _Head(NamedTuple):
    """What the first column says for all."""

    low: int
    limit: int
    tables: list[Model | None]  # of every tensor
    sizes: list[int]
    counts: list[int]


def _record(data: bytes, size: int, layout: MessageLayout) -> Column:
    """Return one column, which has `size` entries."""
    try:
        record: Column = msgspec.msgpack.decode(data, type=Column)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadMessage(f"a column that cannot be read: {error}") from error
    if len(record.flags) != len(layout.tensors):
        raise BadMessage(f"flags of {len(record.flags)} tensors instead of {len(layout.tensors)}")
    if len(record.signs) > -(-size // 8):
        raise BadMessage(f"{len(record.signs)} bytes of signs for {size} entries")
    for name, part in (("words", record.words), ("large levels", record.large)):
        if len(part) % 4:
            raise BadMessage(f"{len(part)} bytes of {name}, which have 4 each")
    return record


def _head(first: Column, tensors: int, form: SymbolFormat) -> _Head:
    if not 0 <= first.low <= _MOST_LOW:
        raise BadMessage(f"{first.low} low bits of a code, which must lie in 0 … {_MOST_LOW}")
    if not 0 <= first.limit < MOST_SYMBOLS:
        raise BadMessage(f"tables up to {first.limit}, which must lie below {MOST_SYMBOLS}")
    if len(first.use) != tensors or not all(-1 <= n < len(first.tables) for n in first.use):
        raise BadMessage("tensors that name tables which are not there")
    if len(first.tables) > tensors or any(
        len(t) > MOST_SYMBOLS or not any(t) for t in first.tables
    ):
        raise BadMessage(f"tables that are empty, longer than {MOST_SYMBOLS}, or too many")
    counts = first.counts
    if form.bucket is None and (len(counts) != tensors or min(counts, default=0) < 0):
        raise BadMessage(f"scales of {len(counts)} tensors instead of {tensors}")
    models = [model(np.frombuffer(table, dtype=np.uint8)) for table in first.tables]
    used = [models[number] if number >= 0 else None for number in first.use]
    sizes = [len(first.tables[number]) if number >= 0 else 0 for number in first.use]
    return _Head(first.low, first.limit, used, sizes, counts)


class _Target:
    """One tensor as it comes in."""

    def __init__(self, tensor: TensorLayout, form: SymbolFormat, layout: MessageLayout) -> None:
        self.tensor, self.unit, self.flagged = tensor, form.unit(tensor), False
        kind = layout.dtype if form.numbers else torch.int32
        self.values: NDArray[Any] = torch.zeros(tensor.entries, dtype=kind).numpy()
        self.kept: Flags = np.zeros(tensor.entries // self.unit, dtype=bool)
        self._inside = [0]  # kept entries until the end of each column

    def units(self, column: int) -> tuple[int, int]:
        """Return where the units of a column begin and end."""
        return self.tensor.begins(column) // self.unit, self.tensor.ends[column] // self.unit

    def fill(self, column: int, where: Ints | None, values: NDArray[Any]) -> None:
        """Take in the values of kept units; None: of all."""
        begin, end = self.units(column)
        rows = self.values.reshape(-1, self.unit)[begin:end]
        if where is None:
            self.kept[begin:end] = True
            rows[:] = values.reshape(-1, self.unit)
        else:
            self.kept[begin:end][where] = True
            rows[where] = values.reshape(-1, self.unit)
        self._inside.append(self._inside[-1] + values.size)

    def buckets(self, column: int, bucket: int) -> int:
        """Return how many scales come with a column."""
        inside = torch.tensor(self._inside[: column + 2]).diff()
        return int(_bucketed(inside[None, :, None], bucket)[0, column, 0])


class _Reader:
    """A column that is read tensor by tensor."""

    def __init__(self, record: Column, form: SymbolFormat, head: _Head) -> None:
        self._record, self._format, self._head = record, form, head
        self._decoder = _Decoder(np.frombuffer(record.words, dtype="<u4").astype(np.uint32))
        signs = np.frombuffer(record.signs, dtype=np.uint8)
        self._signs, self._signed = np.unpackbits(signs), 0
        self._large, self._beyond = np.frombuffer(record.large, dtype="<u4"), 0
        self._at = 0  # in the numbers

    def read(self, target: _Target, column: int, at: int, *, flagged: bool) -> None:
        """Read what the column has of tensor number `at`."""
        begin, end = target.units(column)
        where = self._read_flags(self._record.flags[at], end - begin, flagged=flagged)
        count = (end - begin if where is None else len(where)) * target.unit
        if self._format.numbers:
            target.fill(column, where, self._read_numbers(count, target.values.dtype))
        else:
            target.fill(column, where, self._read_levels(count, at))

    def _read_flags(
        self, flags: tuple[int, int] | None, there: int, *, flagged: bool
    ) -> Ints | None:
        """Return which of `there` units are kept; None: all of a tensor without flags."""
        if (flags is not None) != flagged:
            raise BadMessage("columns that do not agree about which tensors have flags")
        if flags is None:
            return None
        kept, pieces = flags
        if not 0 <= kept <= there:
            raise BadMessage(f"{kept} kept units of {there}")
        if kept in (0, there):
            return np.arange(kept)
        most = torch.tensor([kept, there, there])
        if not kept <= pieces <= int(gap_pieces(*most)):
            raise BadMessage(f"{pieces} gap symbols for {kept} kept units of {there}")
        known = gaps(int(gap_share(*most[:2])))
        where = from_gaps(self._decode(known.model, pieces), known.longest)
        if len(where) != kept or where[-1] >= there:
            raise BadMessage("gaps that do not lead to the kept units")
        return where

    def _read_levels(self, count: int, at: int) -> QuantisationLevels:
        table, low = self._head.tables[at], self._head.low
        if count and table is None:
            raise BadMessage("quantisation levels without a table")
        if not count or table is None:
            return np.zeros(0, dtype=np.int32)
        high = self._decode(table, count)
        if high.max(initial=0) >= self._head.sizes[at]:
            raise BadMessage("a symbol that its table does not have")
        # 31 bits at most: 4 bytes hold every code on the way.
        codes = high << low | self._decode(_Uniform(1 << low), count) if low else high
        if self._head.limit:
            self._enlarge(codes, np.flatnonzero(high == self._head.limit))
        levels = self._format.levels(codes)
        return self._read_signs(levels) if self._format.signs == "apart" else levels

    def _enlarge(self, codes: QuantisationLevels, where: Ints) -> None:
        """Put in the codes that no table has, in place."""
        large = self._large[self._beyond : self._beyond + len(where)]
        if len(large) < len(where) or large.max(initial=0) > _MOST_CODE:
            raise BadMessage("codes beyond the tables that are missing, or too large")
        self._beyond += len(where)
        codes[where] = large

    def _read_signs(self, levels: QuantisationLevels) -> QuantisationLevels:
        where = np.flatnonzero(levels != 0)  # flags are found faster than numbers
        signs = self._signs[self._signed : self._signed + len(where)]
        if len(signs) < len(where):
            raise BadMessage(f"{len(self._signs)} signs, which are too few")
        self._signed += len(where)
        levels[where] *= 1 - 2 * signs.astype(np.int32)
        return levels

    def _read_numbers(self, count: int, kind: np.dtype[Any]) -> NDArray[Any]:
        end = self._at + count * kind.itemsize
        if end > len(self._record.numbers):
            raise BadMessage(f"{len(self._record.numbers)} bytes of numbers, which are too few")
        found = np.frombuffer(self._record.numbers[self._at : end], dtype=kind)
        self._at = end
        return found

    def _decode(self, known: Model, count: int) -> NDArray[np.int32]:
        try:
            found: NDArray[np.int32] = self._decoder.decode(known, count)
        except (AssertionError, ValueError) as error:
            raise BadMessage(f"words that no coder has written: {error}") from error
        return found

    def close(self) -> None:
        """Raise BadMessage unless all of the column was read."""
        if self._at != len(self._record.numbers) or len(self._signs) - self._signed >= 8:
            raise BadMessage("a column that is longer than what it says")
        if self._beyond != len(self._large):
            raise BadMessage("more codes beyond the tables than it says")
        if not self._decoder.maybe_exhausted():
            raise BadMessage("words that are more than what they say")


def _split_scales(data: bytes, counts: Sequence[int]) -> list[NDArray[np.float32]]:
    if len(data) != 4 * sum(counts):
        raise BadMessage(f"{len(data)} bytes for {sum(counts)} scales of 4 bytes each")
    every = np.frombuffer(data, dtype="<f4").astype(np.float32)
    return np.split(every, np.cumsum(counts)[:-1]) if counts else []


def _symbols(
    layout: MessageLayout, targets: Sequence[_Target], scales: Sequence[Any], form: SymbolFormat
) -> Symbols:
    named = dict(zip(layout.tensors, targets, strict=True))
    values = {name: torch.from_numpy(each.values)[None] for name, each in named.items()}
    kept = {name: torch.from_numpy(t.kept)[None] for name, t in named.items() if t.flagged}
    found = {
        name: torch.from_numpy(each)[None]
        for name, each in zip(layout.tensors, scales, strict=True)
        if each is not None and len(each)
    }
    if form.numbers:
        return Symbols(numbers=values, kept=kept, scales=found)
    return Symbols(quantisation_levels=values, kept=kept, scales=found)
