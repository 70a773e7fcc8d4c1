"""Bytes as levels: the inverse of `stream.pack`, for bytes from anywhere.

Nothing is allocated but what the receiver's own envelope asks for: a claim of a message is checked
against that and against the bytes that are there.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import constriction
import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from anyfleet.arrays import Flags, Ints
from anyfleet.core.layout import MessageLayout, Symbols, TensorLayout
from anyfleet.errors import BadMessage
from anyfleet.parts.codec.coded_columns import MOST_LEVEL, Column, Layout, Levels, bucketed, entries
from anyfleet.parts.codec.entropy_tables import (
    MOST_SYMBOLS,
    Model,
    from_gaps,
    gap_pieces,
    gap_share,
    gaps,
    model,
)

_MOST_LOW = 31 - (MOST_SYMBOLS.bit_length() - 1)  # low bits of a level that has 31 bits in all
_MOST_CODE = 2 * MOST_LEVEL + 1
_Decoder = constriction.stream.queue.RangeDecoder
_Uniform = constriction.stream.model.Uniform


def unpack(columns: Sequence[bytes], envelope: MessageLayout, layout: Layout) -> Symbols:
    """The row that leading columns hold; `BadMessage` for what `pack` cannot have made."""
    sizes = entries(envelope).sum(axis=1).tolist()
    records = [_record(data, size, envelope) for data, size in zip(columns, sizes, strict=False)]
    lanes = [_Lane(lane, layout, envelope) for lane in envelope.tensors.values()]
    if not records:
        return _symbols(envelope, lanes, [None] * len(lanes), layout).leading(0)
    head = _head(records[0], len(lanes), layout)
    scales: list[list[NDArray[np.float32]]] = [[] for _ in lanes]
    for number, record in enumerate(records):
        reader = _Reader(record, layout, head)
        for at, lane in enumerate(lanes):
            reader.lane(lane, number, at, flagged=records[0].flags[at] is not None)
        reader.close()
        counts = head.counts if number == 0 else [0] * len(lanes)
        if layout.bucket is not None:
            counts = [lane.buckets(number, layout.bucket) for lane in lanes]
        for at, part in enumerate(_split(record.scales, counts)):
            scales[at].append(part)
    for lane, flags in zip(lanes, records[0].flags, strict=True):
        lane.flagged = flags is not None
    joined = [np.concatenate(parts) for parts in scales]
    found = _symbols(envelope, lanes, joined, layout)
    return found if len(records) == envelope.columns else found.leading(len(records))


class _Head(NamedTuple):
    """What the first column says for all."""

    low: int
    limit: int
    tables: list[Model | None]  # of every lane
    sizes: list[int]
    counts: list[int]


def _record(data: bytes, size: int, envelope: MessageLayout) -> Column:
    """One column, with so many entries."""
    try:
        record: Column = msgspec.msgpack.decode(data, type=Column)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadMessage(f"a column that cannot be read: {error}") from error
    if len(record.flags) != len(envelope.tensors):
        raise BadMessage(f"flags of {len(record.flags)} tensors instead of {len(envelope.tensors)}")
    if len(record.signs) > -(-size // 8):
        raise BadMessage(f"{len(record.signs)} bytes of signs for {size} entries")
    for name, part in (("words", record.words), ("large levels", record.large)):
        if len(part) % 4:
            raise BadMessage(f"{len(part)} bytes of {name}, which have 4 each")
    return record


def _head(first: Column, lanes: int, layout: Layout) -> _Head:
    if not 0 <= first.low <= _MOST_LOW:
        raise BadMessage(f"levels with {first.low} low bits, which must lie in 0 … {_MOST_LOW}")
    if not 0 <= first.limit < MOST_SYMBOLS:
        raise BadMessage(f"tables up to {first.limit}, which must lie below {MOST_SYMBOLS}")
    if len(first.use) != lanes or not all(-1 <= n < len(first.tables) for n in first.use):
        raise BadMessage("lanes that name tables which are not there")
    if len(first.tables) > lanes or any(len(t) > MOST_SYMBOLS or not any(t) for t in first.tables):
        raise BadMessage(f"tables that are empty, longer than {MOST_SYMBOLS}, or too many")
    counts = first.counts
    if layout.bucket is None and (len(counts) != lanes or min(counts, default=0) < 0):
        raise BadMessage(f"scales of {len(counts)} tensors instead of {lanes}")
    models = [model(np.frombuffer(table, dtype=np.uint8)) for table in first.tables]
    used = [models[number] if number >= 0 else None for number in first.use]
    sizes = [len(first.tables[number]) if number >= 0 else 0 for number in first.use]
    return _Head(first.low, first.limit, used, sizes, counts)


class _Lane:
    """One tensor as it comes in."""

    def __init__(self, lane: TensorLayout, layout: Layout, envelope: MessageLayout) -> None:
        self.lane, self.wide, self.flagged = lane, layout.unit(lane), False
        kind = envelope.dtype if layout.numbers else torch.int32
        self.values: NDArray[Any] = torch.zeros(lane.entries, dtype=kind).numpy()
        self.kept: Flags = np.zeros(lane.entries // self.wide, dtype=bool)
        self._inside = [0]  # kept entries until the end of each column

    def units(self, column: int) -> tuple[int, int]:
        return self.lane.begins(column) // self.wide, self.lane.ends[column] // self.wide

    def fill(self, column: int, where: Ints | None, values: NDArray[Any]) -> None:
        """Takes in the values of kept units; None: of all."""
        begin, end = self.units(column)
        rows = self.values.reshape(-1, self.wide)[begin:end]
        if where is None:
            self.kept[begin:end] = True
            rows[:] = values.reshape(-1, self.wide)
        else:
            self.kept[begin:end][where] = True
            rows[where] = values.reshape(-1, self.wide)
        self._inside.append(self._inside[-1] + values.size)

    def buckets(self, column: int, bucket: int) -> int:
        """Scales that come with a column."""
        inside = np.diff(np.array(self._inside[: column + 2]))
        return int(bucketed(inside[:, np.newaxis], bucket)[column, 0])


class _Reader:
    """Reads one column, lane by lane."""

    def __init__(self, record: Column, layout: Layout, head: _Head) -> None:
        self._record, self._layout, self._head = record, layout, head
        self._decoder = _Decoder(np.frombuffer(record.words, dtype="<u4").astype(np.uint32))
        signs = np.frombuffer(record.signs, dtype=np.uint8)
        self._signs, self._signed = np.unpackbits(signs), 0
        self._large, self._beyond = np.frombuffer(record.large, dtype="<u4"), 0
        self._at = 0  # in the numbers

    def lane(self, lane: _Lane, column: int, at: int, *, flagged: bool) -> None:
        begin, end = lane.units(column)
        where = self._where(self._record.flags[at], end - begin, flagged=flagged)
        count = (end - begin if where is None else len(where)) * lane.wide
        if self._layout.numbers:
            lane.fill(column, where, self._plain(count, lane.values.dtype))
        else:
            lane.fill(column, where, self._levels(count, at))

    def _where(self, flags: tuple[int, int] | None, there: int, *, flagged: bool) -> Ints | None:
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

    def _levels(self, count: int, at: int) -> Levels:
        table, low = self._head.tables[at], self._head.low
        if count and table is None:
            raise BadMessage("levels without a table")
        if not count or table is None:
            return np.zeros(0, dtype=np.int32)
        high = self._decode(table, count)
        if high.max(initial=0) >= self._head.sizes[at]:
            raise BadMessage("a symbol that its table does not have")
        # 31 bits at most: 4 bytes hold every level on the way.
        codes = high << low | self._decode(_Uniform(1 << low), count) if low else high
        if self._head.limit:
            self._enlarge(codes, np.flatnonzero(high == self._head.limit))
        levels = self._layout.levels(codes)
        return self._signed_levels(levels) if self._layout.signs == "apart" else levels

    def _enlarge(self, codes: Levels, where: Ints) -> None:
        """Puts in levels that no table has."""
        large = self._large[self._beyond : self._beyond + len(where)]
        if len(large) < len(where) or large.max(initial=0) > _MOST_CODE:
            raise BadMessage("levels beyond the tables that are missing, or too large")
        self._beyond += len(where)
        codes[where] = large

    def _signed_levels(self, levels: Levels) -> Levels:
        where = np.flatnonzero(levels != 0)  # flags are found faster than numbers
        signs = self._signs[self._signed : self._signed + len(where)]
        if len(signs) < len(where):
            raise BadMessage(f"{len(self._signs)} signs, which are too few")
        self._signed += len(where)
        levels[where] *= 1 - 2 * signs.astype(np.int32)
        return levels

    def _plain(self, count: int, kind: np.dtype[Any]) -> NDArray[Any]:
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
        """Whether all of a column was read."""
        if self._at != len(self._record.numbers) or len(self._signs) - self._signed >= 8:
            raise BadMessage("a column that is longer than what it says")
        if self._beyond != len(self._large):
            raise BadMessage("more levels beyond the tables than it says")
        if not self._decoder.maybe_exhausted():
            raise BadMessage("words that are more than what they say")


def _split(data: bytes, counts: Sequence[int]) -> list[NDArray[np.float32]]:
    if len(data) != 4 * sum(counts):
        raise BadMessage(f"{len(data)} bytes for {sum(counts)} scales of 4 bytes each")
    every = np.frombuffer(data, dtype="<f4").astype(np.float32)
    return np.split(every, np.cumsum(counts)[:-1]) if counts else []


def _symbols(
    envelope: MessageLayout, lanes: Sequence[_Lane], scales: Sequence[Any], layout: Layout
) -> Symbols:
    rows = zip(envelope.tensors, lanes, strict=True)
    values = {name: torch.from_numpy(lane.values)[None] for name, lane in rows}
    flags = zip(envelope.tensors, lanes, strict=True)
    kept = {name: torch.from_numpy(lane.kept)[None] for name, lane in flags if lane.flagged}
    told = zip(envelope.tensors, scales, strict=True)
    found = {
        name: torch.from_numpy(each)[None] for name, each in told if each is not None and len(each)
    }
    if layout.numbers:
        return Symbols(numbers=values, kept=kept, scales=found)
    return Symbols(quantisation_levels=values, kept=kept, scales=found)
