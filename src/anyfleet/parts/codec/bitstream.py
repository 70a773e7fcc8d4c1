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
from typing import Annotated, Any, Literal, NamedTuple

import constriction
import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anyfleet.arrays import Flags, Floats, Ints
from anyfleet.core.layout import MessageLayout, Symbols, TensorLayout
from anyfleet.core.messages import Params
from anyfleet.core.slots import Slack
from anyfleet.errors import BadMessage
from anyfleet.parts.codec.entropy_tables import (
    MOST_SYMBOLS,
    ROUNDING_BITS,
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
from anyfleet.parts.codec.ranking import counted, last_set, where_set

QuantisationLevels = NDArray[np.int32]
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
_LIMITS = (1 << np.arange(8, MOST_SYMBOLS.bit_length())) - 1  # of tables, when levels are larger
_LOW = np.arange(1, 32 - _LIMITS[-1].item().bit_length())  # how many low bits there may be
_MOST_LOW = 31 - (MOST_SYMBOLS.bit_length() - 1)  # low bits of a level that has 31 bits in all
_MOST_CODE = 2 * MOST_LEVEL + 1

# --- the format -------------------------------------------------------------------------------


@dataclass(frozen=True)
class SymbolFormat:
    """How the symbols of a codec travel; quantisation levels lie within ±`MOST_LEVEL`.

    Signs travel "apart", one bit for every level that is not 0, or "within" the levels, whose
    distribution then has two sides. Flags say what was kept of every entry, or with `kernels` of
    every kernel. `bucket`: one scale for so many kept entries of a tensor, sent with the column in
    which they begin; None: all scales of a tensor go ahead, with the first column. With `numbers`,
    kept entries travel as they are, and there are no levels.
    """

    signs: Literal["apart", "within"] = "apart"
    kernels: bool = False
    bucket: int | None = None
    numbers: bool = False

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


def _entries(layout: MessageLayout) -> Ints:
    """Return how many entries each column has of each tensor, [columns, tensors]."""
    ends = [tensor.ends for tensor in layout.tensors.values()]
    grid = np.array(ends, dtype=np.int64).reshape(len(ends), layout.columns)
    return np.diff(grid, axis=1, prepend=0).T


def _units(layout: MessageLayout, form: SymbolFormat) -> Ints:
    """Return how many flags each column has of each tensor, [columns, tensors]."""
    sizes = [form.unit(tensor) for tensor in layout.tensors.values()]
    return _entries(layout) // np.array(sizes, dtype=np.int64)


def _bucketed(kept: Ints, bucket: int) -> Ints:
    """Return how many buckets of kept entries begin in each column, [columns, tensors]."""
    until = -(-kept.cumsum(axis=0) // bucket)
    return np.diff(until, axis=0, prepend=0)


def _scale_counts(symbols: Symbols, layout: MessageLayout) -> list[int]:
    return [symbols.scales[n].shape[1] if n in symbols.scales else 0 for n in layout.tensors]


# --- counting ---------------------------------------------------------------------------------


class Counts(NamedTuple):
    """What decides how long each message is; arrays are [devices, columns, tensors]."""

    symbols: Ints  # how often each symbol of a table, in a further dimension
    kept: Ints  # units
    until: Ints  # units up to the last that is kept
    low: Ints  # [devices]: bits of a code that are not in a table
    limit: Ints  # [devices]: the symbol of codes beyond the tables; 0: there are none
    signed: Ints  # levels that are not 0

    def large(self, row: int) -> Ints:
        """Return how many codes of every column are beyond the tables."""
        limit = int(self.limit[row])
        beyond: Ints = self.symbols[row, :, :, limit].sum(axis=1) * (limit > 0)
        return beyond


def packed_bits(symbols: Symbols, layout: MessageLayout, form: SymbolFormat) -> Tensor:
    """Return how many bits `pack` takes at most, [devices, columns]."""
    counts, units = count(symbols, layout, form), _units(layout, form)
    bits = [
        _bits_of_row(counts, row, symbols, layout, form, units) for row in range(len(counts.low))
    ]
    return torch.from_numpy(np.stack(bits))


def _tables(counts: Counts, row: int) -> Choice:
    """Return the tables of one message: `packed_bits` and `pack` choose alike."""
    return choose(counts.symbols[row].sum(axis=0))


def _bits_of_row(
    counts: Counts,
    row: int,
    symbols: Symbols,
    layout: MessageLayout,
    form: SymbolFormat,
    units: Ints,
) -> Floats:
    kept, chosen, low = counts.kept[row], _tables(counts, row), int(counts.low[row])
    inside = kept * (_entries(layout) // np.maximum(1, units))
    words = (counts.symbols[row] * chosen.bits).sum(axis=(1, 2))
    words += gap_bits(kept, counts.until[row], units).sum(1)
    words += low * inside.sum(axis=1)
    words = _WORD * (np.ceil(words / _WORD) + _ENDING)
    signed = counts.signed[row].sum(axis=1)
    signs = 8 * np.ceil(signed / 8) * (form.signs == "apart")
    numbers = 8 * layout.dtype.itemsize * inside.sum(axis=1) * form.numbers
    scales, scale_counts = _scales_by_column(symbols, layout, form, inside)
    records = [
        Column(flags=_flags(symbols, layout, kept[c], counts.until[row, c], units[c]))
        for c in range(layout.columns)
    ]
    first = msgspec.structs.replace(
        records[0],
        low=low,
        limit=int(counts.limit[row]),
        tables=[table.tobytes() for table in chosen.tables],
        use=list(chosen.use),
        counts=scale_counts,
    )
    heads = np.array([8 * len(msgspec.msgpack.encode(each)) for each in [first, *records[1:]]])
    strings = words, signs, numbers, 32 * scales, _LARGE * counts.large(row)
    total: Floats = heads + sum(bits + _length_bits(bits) for bits in strings)
    return total


def _length_bits(bits: Floats | Ints) -> Ints:
    """Return by how many bits the length of a byte string exceeds that of an empty one."""
    long: Ints = 8 * ((bits >= 8 << 8).astype(np.int64) + 2 * (bits >= 8 << 16))
    return long


def _scales_by_column(
    symbols: Symbols, layout: MessageLayout, form: SymbolFormat, inside: Ints
) -> tuple[Ints, list[int]]:
    """Return how many scales every column has, and the counts that the first column states."""
    if form.bucket is not None:
        return _bucketed(inside, form.bucket).sum(axis=1), []
    counts = _scale_counts(symbols, layout)
    every = np.zeros(layout.columns, dtype=np.int64)
    every[0] = sum(counts)
    return every, counts


def _flags(
    symbols: Symbols, layout: MessageLayout, kept: Ints, until: Ints, units: Ints
) -> list[tuple[int, int] | None]:
    pieces = gap_pieces(kept, until, units)
    return [
        (int(k), int(p)) if name in symbols.kept else None
        for name, k, p in zip(layout.tensors, kept, pieces, strict=True)
    ]


def count(symbols: Symbols, layout: MessageLayout, form: SymbolFormat) -> Counts:
    """Return every symbol, flag and length of a stack, counted."""
    trees = symbols.numbers if form.numbers else symbols.quantisation_levels
    rows = max((len(tree) for tree in trees.values()), default=len(layout.key))
    kept, until = _count_kept(symbols, layout, form, rows)
    levels = {} if form.numbers else symbols.quantisation_levels
    low, limit, size = _divide(levels, form, rows)
    found = np.zeros((rows, layout.columns, len(layout.tensors), size), dtype=np.int64)
    signed = np.zeros(found.shape[:-1], dtype=np.int64)
    for at, (name, tensor) in enumerate(layout.tensors.items()):
        for column in range(len(tensor.ends)) if name in levels else ():
            inside, row = _kept_levels(symbols, name, tensor, column, form.unit(tensor))
            coded = _numbered(form.codes(inside), row, _Ends(low, limit, size))
            bins = torch.bincount(coded.flatten(), minlength=rows * size).cpu().numpy()
            found[:, column, at] = bins.reshape(rows, size)
            if low.any():
                # The first symbol then also stands for codes that have low bits only.
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


def _divide(levels: Params, form: SymbolFormat, rows: int) -> _Ends:
    """Return how codes are divided between tables, low bits and what is sent as it is."""
    largest = np.zeros(rows, dtype=np.int64)
    for each in levels.values():
        if each.shape[1]:
            for end in torch.aminmax(each, dim=1):
                largest = np.maximum(largest, form.codes(end).cpu().numpy())
    low, limit = np.zeros_like(largest), np.zeros_like(largest)
    for row in np.flatnonzero(largest > _LIMITS[0]):
        codes = [form.codes(each[row]) for each in levels.values()]
        low[row], limit[row] = _shortest_division(codes)
    # A limit that nothing reaches is none.
    limit = np.where(largest >> low < limit, 0, limit)
    symbols = np.where(limit > 0, limit, largest >> low)
    return _Ends(low, limit, int(symbols.max(initial=0)) + 1)


def _shortest_division(codes: Sequence[Tensor]) -> tuple[int, int]:
    """Return the low bits and the limit that make a message with these codes about the shortest."""
    # Mostly few codes are that large: only these are looked at.
    large = torch.cat([each[each >= int(_LIMITS[0])] for each in codes]).cpu().numpy()
    total = sum(map(len, codes))
    low = np.concatenate([np.zeros_like(_LIMITS), _LOW])
    limit = np.concatenate([_LIMITS, np.full_like(_LOW, _LIMITS[-1])])
    beyond = len(large) - np.searchsorted(np.sort(large), limit << low)
    best = int((low * total + 8 * limit + (_LARGE + _ESCAPE) * beyond).argmin())
    return int(low[best]), int(limit[best])


def _kept_levels(
    symbols: Symbols, name: str, tensor: TensorLayout, column: int, unit: int
) -> tuple[Tensor, Tensor]:
    """Return the levels of the units that a column keeps of a tensor, and the row of each unit."""
    begin, end = tensor.begins(column), tensor.ends[column]
    levels = symbols.quantisation_levels[name][:, begin:end]
    if name not in symbols.kept:
        return levels, torch.arange(len(levels), device=levels.device)
    flags = symbols.kept[name][:, begin // unit : end // unit]
    where = where_set(flags)
    inside = levels.reshape(-1, unit).index_select(0, where)
    return inside, where // max(1, flags.shape[1])


def _numbered(codes: Tensor, row: Tensor, ends: _Ends) -> Tensor:
    """Return the table symbols of codes, those of each row in a range of their own."""
    if ends.low.any():
        codes = codes >> torch.from_numpy(ends.low).to(codes)[row, None]
    if ends.limit.any():
        most = np.where(ends.limit > 0, ends.limit, ends.size)
        codes = codes.minimum(torch.from_numpy(most).to(codes)[row, None])
    return codes if len(ends.low) == 1 else codes + (ends.size * row).to(codes)[:, None]


def _count_kept(
    symbols: Symbols, layout: MessageLayout, form: SymbolFormat, rows: int
) -> tuple[Ints, Ints]:
    """Return the kept units, and the units up to the last of these."""
    every = _units(layout, form)
    kept = np.broadcast_to(every, (rows, *every.shape)).copy()
    until = kept.copy()
    for at, (name, tensor) in enumerate(layout.tensors.items()):
        if name not in symbols.kept:
            continue
        unit = form.unit(tensor)
        for column, end in enumerate(tensor.ends):
            flags = symbols.kept[name][:, tensor.begins(column) // unit : end // unit]
            kept[:, column, at] = counted(flags).cpu().numpy()
            if flags.shape[1]:
                until[:, column, at] = last_set(flags).cpu().numpy()
    return kept, until


# --- writing ----------------------------------------------------------------------------------


def pack(symbols: Symbols, layout: MessageLayout, form: SymbolFormat) -> tuple[bytes, ...]:
    """Return the symbols of one device as bytes, column by column."""
    counts = count(symbols, layout, form)
    chosen, low = _tables(counts, 0), int(counts.low[0])
    models = [model(table) for table in chosen.tables]
    used = [models[number] if number >= 0 else None for number in chosen.use]
    there = layout.columns if symbols.columns is None else symbols.columns
    scales = _packed_scales(symbols, layout, form, counts)
    columns = []
    for number in range(there):
        writer = _Writer(form, low, int(counts.limit[0]))
        for at, (name, tensor) in enumerate(layout.tensors.items()):
            writer.write(_piece(symbols, name, tensor, number, form), used[at])
        columns.append(writer.column(scales[number]))
    if columns:
        columns[0] = msgspec.structs.replace(
            columns[0],
            low=low,
            limit=int(counts.limit[0]),
            tables=[table.tobytes() for table in chosen.tables],
            use=list(chosen.use),
            counts=_scale_counts(symbols, layout) if form.bucket is None else [],
        )
    return tuple(msgspec.msgpack.encode(column) for column in columns)


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
        known = gaps(int(gap_share(np.array(len(where)), np.array(len(kept)))))
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
    sizes = _entries(layout) // np.maximum(1, _units(layout, form))
    ends = _bucketed(counts.kept[0] * sizes, form.bucket).cumsum(axis=0)
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
    sizes = _entries(layout).sum(axis=1).tolist()
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
        inside = np.diff(np.array(self._inside[: column + 2]))
        return int(_bucketed(inside[:, np.newaxis], bucket)[column, 0])


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
        most = np.array(kept), np.array(there), np.array(there)
        if not kept <= pieces <= int(gap_pieces(*most)):
            raise BadMessage(f"{pieces} gap symbols for {kept} kept units of {there}")
        known = gaps(int(gap_share(np.array(kept), np.array(there))))
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
