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
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Annotated, Any, Literal, NamedTuple

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
    choose,
    from_gaps,
    gap_share,
    gap_sizes,
    gaps,
    model,
    to_gaps,
)
from anyfleet.parts.codec.range_coder import Model, decoder, encoder, uniform
from anyfleet.parts.codec.ranking import (
    Array,
    Chosen,
    array_of,
    counted_parts,
    histogram,
    joined,
    library_of,
    on_host,
    where_set,
)

QuantisationLevels = NDArray[np.int32]
MOST_LEVEL = (1 << 30) - 1  # either side of 0: a quantisation level with its sign has 31 bits

# By how much `packed_bits` may exceed the bits of a column: words, bytes and lengths are whole.
SLACK_BITS = 128
# And by how much for every bit, since the rounding of the coder is bounded but not known.
SLACK_SHARE = 1e-3
# An entry is one symbol and at most one gap. Those that cost next to nothing still add up.
SLACK = Slack(SLACK_BITS, SLACK_SHARE, entry=2 * ROUNDING_BITS)

_WORD, _ENDING = 32, 2  # bits of a word, and words in which a coder ends at most
_LARGE = 32  # bits of a quantisation level beyond the tables
_ESCAPE = 8  # bits that it takes to say so, about
# Of tables, when levels are larger.
_LIMITS = tuple((1 << digits) - 1 for digits in range(8, MOST_SYMBOLS.bit_length()))
_LOW = range(1, 32 - _LIMITS[-1].bit_length())  # how many low bits there may be
# Of histograms that are counted at once: on the host as many as a cache holds.
_BINS, _BINS_ELSEWHERE = 1 << 20, 1 << 24
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


class _Grid(NamedTuple):
    """Where what travels lies: columns of tensors, side by side tensor by tensor."""

    units: Tensor  # [columns, tensors]
    unit: Tensor | None  # [tensors]: entries of a unit; None: one each
    sizes: tuple[int, ...]  # units of all columns of the first tensor, then of the next
    piece: Tensor  # [columns of tensors]: their numbers where columns come first
    number: Tensor  # [entries]: the piece of every entry
    owner: Tensor  # [entries]: the unit of every entry

    def inside(self, kept: Tensor) -> Tensor:
        """Return how many entries so many kept units have, [devices, columns, tensors]."""
        return kept if self.unit is None else kept * self.unit


@lru_cache(maxsize=64)
def _grid(tensors: tuple[TensorLayout, ...], form: SymbolFormat, device: torch.device) -> _Grid:
    """Return where the entries of tensors lie.

    It is found once: a copy to an accelerator would hold up what runs there.
    """
    ends = torch.tensor([(0, *tensor.ends) for tensor in tensors], dtype=torch.int64)
    entries = ends.diff(dim=1) if tensors else torch.zeros(0, 1, dtype=torch.int64)
    unit = torch.tensor([form.unit(tensor) for tensor in tensors], dtype=torch.int64)
    units, (many, columns) = entries // unit[:, None], entries.shape
    piece = (torch.arange(columns) * many + torch.arange(many)[:, None]).flatten().int()
    owner = torch.arange(int(units.sum()))
    return _Grid(
        units.T.contiguous().to(device),
        unit.to(device) if bool((unit > 1).any()) else None,
        tuple(units.flatten().tolist()),
        piece.to(device),
        piece.repeat_interleave(entries.flatten()).to(device),
        owner.repeat_interleave(unit.repeat_interleave(units.sum(dim=1))).to(device),
    )


def _bucketed(inside: Tensor, bucket: int) -> Tensor:
    """Return how many buckets of kept entries begin in each column, [devices, columns, tensors]."""
    until = (inside.cumsum(dim=1) + (bucket - 1)) // bucket
    return until.diff(dim=1, prepend=torch.zeros_like(until[:, :1]))


# --- counting ---------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Outline:
    """What decides how long the messages of a stack are, besides their levels."""

    form: SymbolFormat
    dtype: torch.dtype  # of plain numbers
    flagged: tuple[bool, ...]  # whether tensors have flags
    stated: tuple[int, ...]  # the scales of each tensor
    grid: _Grid
    kept: Tensor  # [devices, columns, tensors]: units
    until: Tensor  # [devices, columns, tensors]: units up to the last that is kept
    chosen: Chosen | None  # what is kept of [devices, entries]; None: all

    @classmethod
    def of(cls, symbols: Symbols, layout: MessageLayout, form: SymbolFormat) -> "Outline":
        """Return that of symbols, whose levels do not matter."""
        tensors, kept = layout.tensors, symbols.kept
        trees = {**symbols.numbers, **symbols.quantisation_levels, **kept}
        like = next(iter(trees.values()), layout.key)
        devices = max((len(tree) for tree in trees.values()), default=len(layout.key))
        grid = _grid(tuple(tensors.values()), form, like.device)
        flagged = tuple(name in kept for name in tensors)
        scales = (symbols.scales.get(name) for name in tensors)
        stated = tuple(0 if each is None else each.shape[1] for each in scales)
        if not kept:
            units = grid.units.expand(devices, -1, -1)
            return cls(form, layout.dtype, flagged, stated, grid, units, units, None)
        one = torch.ones(1, 1, dtype=torch.bool, device=like.device)
        every = {
            name: kept[name]
            if name in kept
            else one.expand(devices, each.entries // form.unit(each))
            for name, each in tensors.items()
        }
        chosen = Chosen.of(joined(every))
        shape = devices, len(tensors), layout.columns
        counts, until = (
            each.view(shape).transpose(1, 2).contiguous()
            for each in counted_parts(chosen, grid.sizes)
        )
        if grid.unit is not None:
            chosen = Chosen.of(chosen.flags.index_select(1, grid.owner))
        return cls(form, layout.dtype, flagged, stated, grid, counts, until, chosen)

    def repeated(self, times: int) -> "Outline":
        """Return that of a stack with all devices so many times."""
        kept, until = (each.repeat(times, 1, 1) for each in (self.kept, self.until))
        return replace(self, kept=kept, until=until, chosen=None)

    def rows(self, part: slice) -> "Outline":
        """Return that of some of the devices."""
        return replace(self, kept=self.kept[part], until=self.until[part], chosen=None)

    @cached_property
    def inside(self) -> Tensor:
        """The kept entries, [devices, columns, tensors]."""
        return self.grid.inside(self.kept)

    def of_all(self, levels: Tensor) -> "_Flat":
        """Return what is counted of levels [devices, entries]."""
        form, number = self.form, self.grid.number
        if self.chosen is None:
            return _Flat(self, form.codes(levels), number, None)
        flags = None if self.chosen.where is not None else self.chosen.flags
        return _Flat(self, form.codes(self.chosen.values(levels)), number, flags)

    def of_kept(self, levels: Tensor, where: Tensor, filled: Tensor | None) -> "_Flat":
        """Return what is counted of the levels of kept entries alone, [devices, kept].

        Off the host `where` [devices, kept] are their places. Not all need be `filled`.
        """
        codes, number = self.form.codes(levels), self.grid.number
        if on_host(levels):
            codes = codes.flatten() if filled is None else codes[filled]
            return _Flat(self, codes, number, None)
        return _Flat(self, codes, number[where], filled)


class _Counts(NamedTuple):
    """What decides how long each message is."""

    symbols: Bins  # of tables
    ends: "_Ends"
    signed: Array | None  # [devices, columns]: levels that are not 0, if signs travel apart


def packed_bits(symbols: Symbols, layout: MessageLayout, form: SymbolFormat) -> Tensor:
    """Return how many bits `pack` takes at most, [devices, columns]."""
    return _flat(symbols, layout, form).bits()


def _flat(symbols: Symbols, layout: MessageLayout, form: SymbolFormat) -> "_Flat":
    outline = Outline.of(symbols, layout, form)
    levels = {} if form.numbers else symbols.quantisation_levels
    if not levels:
        none = torch.zeros(len(outline.kept), 0, dtype=torch.int32, device=outline.kept.device)
        return _Flat(outline, none, outline.grid.number[:0], None)
    return outline.of_all(joined({name: levels[name] for name in layout.tensors}))


@dataclass(frozen=True, eq=False)
class _Flat:
    """The codes of a stack, all tensors side by side.

    They are [devices, entries]. On the host they are those of kept entries alone, one after the
    other, where some are left out.
    """

    outline: Outline
    codes: Tensor
    number: Tensor  # the piece of every entry, of one device or of all
    flags: Tensor | None  # [devices, entries]: what is kept; None: all that is here

    def rows(self, part: slice) -> "_Flat":
        """Return some of the devices."""
        outline, number, flags = self.outline.rows(part), self.number, self.flags
        if self.codes.ndim == 2:
            number = number[part] if number.ndim == 2 else number
            return _Flat(outline, self.codes[part], number, None if flags is None else flags[part])
        begin = int(self.outline.inside[: part.start].sum())
        return _Flat(outline, self.codes[begin : begin + int(outline.inside.sum())], number, None)

    def by_code(self, values: Tensor) -> Tensor:
        """Return values of devices, one for each of the codes."""
        if self.codes.ndim == 2:
            return values[:, None]
        return values.repeat_interleave(self.outline.inside.sum(dim=(1, 2)))

    def bins(self, codes: Tensor, size: int) -> Bins:
        """Return how often each of `size` codes is kept."""
        grid, (devices, columns, tensors) = self.outline.grid, self.outline.kept.shape
        shape = devices, columns, tensors, size
        if codes.ndim == 1:
            # The entries of a device lie tensor by tensor.
            piece = grid.piece.numpy()
            first = np.arange(0, devices * columns * tensors, columns * tensors, dtype=np.int32)
            counts = self.outline.inside.flatten(1).numpy()[:, piece]
            base = np.repeat(((first[:, None] + piece) * np.int32(size)).ravel(), counts.ravel())
            return Bins.of(torch.from_numpy(codes.numpy() + base), shape)
        device = torch.arange(devices, dtype=torch.int32, device=codes.device)[:, None]
        keys = (codes + self.number * size).add_(device * (columns * tensors * size))
        return Bins.of(keys, shape, self.flags)

    def large(self) -> tuple[Tensor, Tensor]:
        """Return codes that may be too large for a table, and their devices.

        On the host these are few. Elsewhere they are all codes, as nobody waits for a count.
        """
        device = torch.arange(len(self.outline.kept), device=self.codes.device)
        if not on_host(self.codes):
            return self.codes, device[:, None]
        where = where_set(self.codes >= _LIMITS[0])
        rows = self.by_code(device).expand(self.codes.shape).flatten()
        return self.codes.flatten().index_select(0, where), rows.index_select(0, where)

    def divided(self) -> "_Ends":
        """Return how codes are divided between tables, low bits and what is sent as it is."""
        codes, none = self.codes, self.outline.kept.new_zeros(len(self.outline.kept))
        most = self.outline.form.most_code
        if on_host(codes) or not codes.numel():
            most = int(codes.max()) if codes.numel() else 0
        if most <= _LIMITS[0]:
            return _Ends(none, none, most + 1, plain=True)
        large, device = self.large()
        if on_host(codes):
            largest = none.scatter_reduce(0, device, large.long(), "amax")
        else:
            largest = large.amax(dim=1).long()
        low, limit, ends = _divisions(most, codes.device)
        reached, size = torch.bucketize(large, ends, right=True), len(ends) + 1
        often = histogram(reached + size * device, size * len(none)).view(-1, size)
        beyond = often[:, 1:].flip(1).cumsum(dim=1).flip(1)
        costs = low * len(self.outline.grid.number) + 8 * limit + (_LARGE + _ESCAPE) * beyond
        best, some = costs.argmin(dim=1), largest > _LIMITS[0]
        low, limit = low[best] * some, limit[best] * some
        # A limit that nothing reaches is none.
        limit = limit * (largest >> low >= limit)
        if on_host(codes):
            most = int(torch.where(limit > 0, limit, largest >> low).max())
        return _Ends(low, limit, min(most + 1, MOST_SYMBOLS), plain=False)

    def counts(self, ends: "_Ends") -> _Counts:
        """Return every symbol, counted."""
        codes, apart = self.codes, self.outline.form.signs_apart
        if ends.plain:
            found = levels = self.bins(codes, ends.size)
        else:
            most = torch.where(ends.limit > 0, ends.limit, ends.size).to(codes.dtype)
            high = (codes >> self.by_code(ends.low.to(codes.dtype))).minimum(self.by_code(most))
            found = levels = self.bins(high, ends.size)
        if apart and not ends.plain:
            # The first symbol then also stands for codes that have low bits only.
            levels = self.bins(codes.clamp(max=1), 2)
        signed = levels.by_column(levels.often * (levels.symbol > 0)) if apart else None
        return _Counts(found, ends, signed)

    def bits(self) -> Tensor:
        """Return how many bits messages have at most, [devices, columns]."""
        ends, (devices, columns, tensors) = self.divided(), self.outline.kept.shape
        at_once = _BINS if on_host(self.codes) else _BINS_ELSEWHERE
        if devices > 1 and devices * columns * tensors * ends.size > at_once:
            # Half of the devices may have shorter tables.
            middle = devices // 2
            halves = slice(0, middle), slice(middle, devices)
            return torch.cat([self.rows(part).bits() for part in halves])
        return _counted_bits(self.outline, self.counts(ends))


def _counted_bits(outline: Outline, counts: _Counts) -> Tensor:
    chosen, ends, form = choose(counts.symbols), counts.ends, outline.form
    words, heads, inside = chosen.bits, _head_bits(outline, chosen, ends), array_of(outline.inside)
    if any(outline.flagged):
        gaps = gap_sizes(outline.kept, outline.until, outline.grid.units)
        words = words + gaps.bits.sum(axis=2)
        flags = _number_bytes(array_of(outline.kept)) + _number_bytes(gaps.pieces)
        for at, flagged in enumerate(outline.flagged):
            if not flagged:
                flags[..., at] = 0
        heads = heads + 8 * flags.sum(axis=2)
    if not ends.plain:
        words = words + array_of(ends.low)[:, None] * inside.sum(axis=2)
    strings = [_WORD * (library_of(words).ceil(words / _WORD) + _ENDING)]
    if counts.signed is not None:
        strings.append(8 * library_of(words).ceil(counts.signed / 8))
    if form.numbers:
        strings.append(8.0 * outline.dtype.itemsize * inside.sum(axis=2))
    if form.bucket is not None:
        strings.append(32.0 * array_of(_bucketed(outline.inside, form.bucket)).sum(axis=2))
    if not ends.plain:
        symbols, limit = counts.symbols, counts.symbols.of_device(array_of(ends.limit))
        beyond = symbols.often * ((symbols.symbol == limit) & (limit > 0))
        strings.append(_LARGE * symbols.by_column(beyond))
    bits = library_of(words).stack(strings)
    return torch.as_tensor(heads + (bits + _length_bits(bits)).sum(axis=0))


def _head_bits(outline: Outline, chosen: Choice, ends: "_Ends") -> Array:
    """Return the bits of columns without their flags and what their byte strings hold.

    Scales that go ahead with the first column are counted, too.
    """
    ahead = outline.stated if outline.form.bucket is None else ()
    same, known = _known_bits(len(outline.flagged), ahead)
    first = (chosen.lengths + _exceeded(chosen.lengths, _TABLES)).sum(axis=1)
    first = first + _list_bytes((chosen.lengths > 0).sum(axis=1))
    first = first + _number_bytes(chosen.use).sum(axis=1)
    first = first + _number_bytes(array_of(ends.low)) + _number_bytes(array_of(ends.limit))
    found = library_of(first).full_like(chosen.bits, same, dtype=library_of(first).float64)
    found[:, 0] += 8 * first + known
    return found


@lru_cache(maxsize=256)
def _known_bits(tensors: int, ahead: tuple[int, ...]) -> tuple[float, int]:
    """Return the bits of every column, and those of the first, that do not depend on symbols.

    So many scales of each tensor go ahead with the first column.
    """
    # One byte for the record and for each tensor, two for each of its strings, one for each number
    # and list in it.
    same = 1 + tensors + _list_bytes(tensors) + 2 * 5 + 5
    first = _list_bytes(tensors) + _list_bytes(len(ahead)) + sum(map(_number_bytes, ahead)) - 5
    scales = 32 * sum(ahead)
    return 8.0 * same, 8 * first + scales + _length_bits(scales)


# Beyond each of these bounds a number, list, string or table takes a byte more.
_NUMBERS, _LISTS = (127, 255, 65535, 65535), (15, 15, 65535, 65535)
_STRINGS, _TABLES = (2047, 524287, 524287), (0, 0, 255)


def _exceeded(number: Array, bounds: tuple[int, ...]) -> Array:
    """Return how many of the bounds numbers exceed."""
    if isinstance(number, int):
        return sum(number > bound for bound in bounds)
    if isinstance(number, Tensor):
        return torch.bucketize(number, _bounds(bounds, number.dtype, number.device))
    return _bounds(bounds, torch.float64, torch.device("cpu")).numpy().searchsorted(number)


@lru_cache(maxsize=64)
def _bounds(bounds: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(bounds, dtype=dtype).to(device)


def _number_bytes(number: Array) -> Array:
    """Return the bytes of whole numbers from -1 to 2 ** 32 - 1 in msgpack."""
    return 1 + _exceeded(number, _NUMBERS)


def _list_bytes(length: Array) -> Array:
    """Return the bytes that say how long a list is."""
    return 1 + _exceeded(length, _LISTS)


def _length_bits(bits: Array) -> Array:
    """Return by how many bits the length of a byte string exceeds that of an empty one."""
    return 8 * _exceeded(bits, _STRINGS)


class _Ends(NamedTuple):
    """Where tables end: low bits and limit of every row, and the symbols of the longest table."""

    low: Tensor
    limit: Tensor
    size: int
    plain: bool  # no row has low bits or a limit


@lru_cache(maxsize=64)
def _divisions(most: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return the pairs of low bits and a limit that are tried, and the codes where they end.

    After the first that ends beyond `most` all others make messages longer.
    """
    pairs = [(0, limit) for limit in _LIMITS] + [(low, _LIMITS[-1]) for low in _LOW]
    tried = [pair for pair in pairs if pair[1] << pair[0] <= most]
    tried += pairs[len(tried) : len(tried) + 1]
    low, limit = torch.tensor(tried).to(device).unbind(1)
    return low, limit, (limit << low).to(torch.int32)


# --- writing ----------------------------------------------------------------------------------


def pack(symbols: Symbols, layout: MessageLayout, form: SymbolFormat) -> tuple[bytes, ...]:
    """Return the symbols of one device as bytes, column by column."""
    flat = _flat(symbols, layout, form)
    counts = flat.counts(flat.divided())
    low, limit = int(counts.ends.low[0]), int(counts.ends.limit[0])
    tables, use = _chosen_tables(counts)
    models = [model(table) for table in tables]
    used = [models[number] if number >= 0 else None for number in use]
    there = layout.columns if symbols.columns is None else symbols.columns
    scales = _packed_scales(symbols, layout, flat.outline)
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
            counts=list(flat.outline.stated) if form.bucket is None else [],
        )
    return tuple(msgspec.msgpack.encode(column) for column in columns)


def _chosen_tables(counts: _Counts) -> tuple[list[Bytes], list[int]]:
    """Return the tables of one message, and which of them each tensor uses."""
    chosen, (_, _, *shape) = choose(counts.symbols), counts.symbols.shape
    every, use = np.zeros(shape, dtype=np.uint8), np.asarray(torch.as_tensor(chosen.use[0]).cpu())
    where = slice(None) if chosen.place is None else chosen.place
    every.reshape(-1)[where] = torch.as_tensor(chosen.table).cpu().flatten()
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
        self._encoder = encoder()
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
            self._encoder.encode(codes & ((1 << self._low) - 1), uniform(1 << self._low))
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


def _packed_scales(symbols: Symbols, layout: MessageLayout, outline: Outline) -> Sequence[bytes]:
    """Return the scales that every column carries."""
    scales = {name: _on_host(rows[0]).astype("<f4") for name, rows in symbols.scales.items()}
    if outline.form.bucket is None:
        first = b"".join(scales[name].tobytes() for name in layout.tensors if name in scales)
        return [first, *[b""] * (layout.columns - 1)]
    ends = _on_host(_bucketed(outline.inside, outline.form.bucket)[0].cumsum(dim=0))
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
    sizes = [
        sum(tensor.ends[column] - tensor.begins(column) for tensor in layout.tensors.values())
        for column in range(layout.columns)
    ]
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
        self._decoder = decoder(np.frombuffer(record.words, dtype="<u4").astype(np.uint32))
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
        if not kept <= pieces <= int(gap_sizes(*most).pieces):
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
        codes = high << low | self._decode(uniform(1 << low), count) if low else high
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
