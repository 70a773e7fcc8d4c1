"""Levels as bytes: entropy-coded with whole-number probabilities, column by column.

A column is a small record of numbers and byte strings (`layout.Column`, msgpack). Its words are one
stream of a range coder with, for every lane, the gaps between kept units and then the levels of
those units. Tables go with the first column: nothing can be read without it, and with it any number
of further columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import constriction
import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anyfleet.arrays import Flags
from anyfleet.core.layout import MessageLayout, Symbols, TensorLayout
from anyfleet.parts.codec.coded_columns import Column, Layout, bucketed, entries, units
from anyfleet.parts.codec.entropy_tables import Model, gap_share, gaps, model, to_gaps
from anyfleet.parts.codec.packed_size import (
    SLACK,
    SLACK_BITS,
    SLACK_SHARE,
    Counts,
    count,
    packed_bits,
    tables,
)
from anyfleet.parts.codec.unstream import unpack

__all__ = ["SLACK", "SLACK_BITS", "SLACK_SHARE", "Layout", "pack", "packed_bits", "unpack"]

_Encoder = constriction.stream.queue.RangeEncoder
_Uniform = constriction.stream.model.Uniform


def pack(symbols: Symbols, envelope: MessageLayout, layout: Layout) -> tuple[bytes, ...]:
    """One row as bytes, column by column."""
    counts = count(symbols, envelope, layout)
    chosen, low = tables(counts, 0), int(counts.low[0])
    models = [model(table) for table in chosen.tables]
    used = [models[number] if number >= 0 else None for number in chosen.use]
    there = envelope.columns if symbols.columns is None else symbols.columns
    scales = _scales(symbols, envelope, layout, counts)
    columns = []
    for number in range(there):
        writer = _Writer(layout, low, int(counts.limit[0]))
        for at, (name, lane) in enumerate(envelope.tensors.items()):
            writer.lane(_piece(symbols, name, lane, number, layout), used[at])
        columns.append(writer.column(scales[number]))
    if columns:
        told = [symbols.scales[n].shape[1] if n in symbols.scales else 0 for n in envelope.tensors]
        columns[0] = msgspec.structs.replace(
            columns[0],
            low=low,
            limit=int(counts.limit[0]),
            tables=[table.tobytes() for table in chosen.tables],
            use=list(chosen.use),
            counts=told if layout.bucket is None else [],
        )
    return tuple(msgspec.msgpack.encode(column) for column in columns)


@dataclass(frozen=True, eq=False)
class _Piece:
    """What one column has of one lane."""

    kept: Flags | None  # of units; None: all
    values: NDArray[Any]  # levels or numbers of all entries, a row for each unit

    @property
    def inside(self) -> NDArray[Any]:
        """Of kept units only, one after the other."""
        if self.kept is None:
            return self.values.ravel()
        return self.values.take(np.flatnonzero(self.kept), axis=0).ravel()


def _piece(symbols: Symbols, name: str, lane: TensorLayout, column: int, layout: Layout) -> _Piece:
    begin, end, wide = lane.begins(column), lane.ends[column], layout.unit(lane)
    tree = symbols.numbers if layout.numbers else symbols.quantisation_levels
    values = _host(tree[name][0, begin:end]).reshape(-1, wide)
    if name not in symbols.kept:
        return _Piece(None, values)
    return _Piece(_host(symbols.kept[name][0, begin // wide : end // wide]), values)


class _Writer:
    """Makes one column, lane by lane."""

    def __init__(self, layout: Layout, low: int, limit: int) -> None:
        self._layout, self._low, self._limit = layout, low, limit
        self._encoder = _Encoder()
        self._flags: list[tuple[int, int] | None] = []
        self._signs: list[Flags] = []
        self._numbers: list[bytes] = []
        self._large: list[bytes] = []

    def lane(self, piece: _Piece, table: Model | None) -> None:
        self._flags.append(None if piece.kept is None else self._told(piece.kept))
        inside = piece.inside
        if self._layout.numbers:
            self._numbers.append(inside.tobytes())
        elif table is not None:
            self._levels(inside, table)

    def _told(self, kept: Flags) -> tuple[int, int]:
        """Writes which units are kept; how many they are, and how many symbols that took."""
        where = np.flatnonzero(kept)
        if len(where) in (0, len(kept)):
            return len(where), 0
        known = gaps(int(gap_share(np.array(len(where)), np.array(len(kept)))))
        symbols = to_gaps(where, known.longest)
        self._encoder.encode(symbols, known.model)
        return len(where), len(symbols)

    def _levels(self, levels: NDArray[np.int32], table: Model) -> None:
        codes = self._layout.codes(torch.from_numpy(levels)).numpy()
        symbols = codes >> self._low
        if self._limit:
            beyond = np.flatnonzero(symbols >= self._limit)
            self._large.append(codes[beyond].astype("<u4").tobytes())
            symbols[beyond] = self._limit
        self._encoder.encode(symbols, table)
        if self._low:
            self._encoder.encode(codes & ((1 << self._low) - 1), _Uniform(1 << self._low))
        if self._layout.signs == "apart":
            self._signs.append(levels.take(np.flatnonzero(levels != 0)) < 0)

    def column(self, scales: bytes) -> Column:
        signs = np.concatenate([np.zeros(0, dtype=bool), *self._signs])
        return Column(
            flags=self._flags,
            scales=scales,
            words=self._encoder.get_compressed().astype("<u4").tobytes(),
            signs=np.packbits(signs).tobytes(),
            numbers=b"".join(self._numbers),
            large=b"".join(self._large),
        )


def _scales(
    symbols: Symbols, envelope: MessageLayout, layout: Layout, counts: Counts
) -> Sequence[bytes]:
    """The scales that every column carries."""
    told = {name: _host(rows[0]).astype("<f4") for name, rows in symbols.scales.items()}
    if layout.bucket is None:
        first = b"".join(told[name].tobytes() for name in envelope.tensors if name in told)
        return [first, *[b""] * (envelope.columns - 1)]
    wide = entries(envelope) // np.maximum(1, units(envelope, layout))
    ends = bucketed(counts.kept[0] * wide, layout.bucket).cumsum(axis=0)
    begins = np.vstack([np.zeros_like(ends[:1]), ends[:-1]])
    return [
        b"".join(
            told[name][begins[column, at] : ends[column, at]].tobytes()
            for at, name in enumerate(envelope.tensors)
        )
        for column in range(envelope.columns)
    ]


def _host(tensor: Tensor) -> NDArray[Any]:
    return tensor.detach().cpu().contiguous().numpy()
