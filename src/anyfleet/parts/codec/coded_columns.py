"""What both ends of a message know of a codec's symbols, and the record of one column."""

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from anyfleet.arrays import Ints
from anyfleet.core.layout import MessageLayout, TensorLayout

Levels = NDArray[np.int32]
MOST_LEVEL = (1 << 30) - 1  # either side of 0, so that a level with its sign has 31 bits


@dataclass(frozen=True)
class Layout:
    """How a codec's symbols travel. Levels lie within ±`MOST_LEVEL`.

    Signs travel "apart", one bit for every level that is not 0, or "within" the levels, whose
    distribution then has two sides. Flags say what was kept of every entry, or with `kernels` of
    every unit. `bucket`: one scale for so many kept entries of a lane, sent with the column in
    which they begin; None: all scales of a lane go ahead, with the first column. With `numbers`,
    kept entries travel as they are, and there are no levels.
    """

    signs: Literal["apart", "within"] = "apart"
    kernels: bool = False
    bucket: int | None = None
    numbers: bool = False

    def unit(self, lane: TensorLayout) -> int:
        """Entries under one flag."""
        return lane.unit if self.kernels else 1

    def codes(self, levels: Tensor) -> Tensor:
        """Levels as numbers from 0 on: without their sign, or with every sign in between."""
        if self.signs == "apart":
            return levels.abs()
        return (levels << 1).bitwise_xor_(levels >> 31)

    def levels(self, codes: Levels) -> Levels:
        """The inverse of `codes`, up to signs that travel apart."""
        # An odd code 2n - 1 is the level -n: the complement of its half.
        return codes if self.signs == "apart" else (codes >> 1) ^ -(codes & 1)


# Lists of a column have an entry for each tensor: longer ones are refused before they are made.
_PerTensor = msgspec.Meta(max_length=1 << 16)


class Column(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One column of a message. What its byte strings hold is in `stream`."""

    # Of every lane, units kept and gap symbols; None: all are kept.
    flags: Annotated[list[tuple[int, int] | None], _PerTensor]
    scales: bytes = b""  # 4 bytes each
    words: bytes = b""  # of the range coder
    signs: bytes = b""  # a bit each
    numbers: bytes = b""
    large: bytes = b""  # levels beyond the tables, 4 bytes each
    low: int = 0  # bits of every level that are not in a table; this and the rest: first column
    limit: int = 0  # the symbol of a level beyond the tables; 0: there are none
    tables: Annotated[list[bytes], _PerTensor] = []
    use: Annotated[list[int], _PerTensor] = []  # which table each lane has, or -1
    counts: Annotated[list[int], _PerTensor] = []  # scales of each lane, unless by buckets


def entries(envelope: MessageLayout) -> Ints:
    """How many entries each column has of each lane."""
    ends = [lane.ends for lane in envelope.tensors.values()]
    grid = np.array(ends, dtype=np.int64).reshape(len(ends), envelope.columns)
    return np.diff(grid, axis=1, prepend=0).T


def units(envelope: MessageLayout, layout: Layout) -> Ints:
    """How many flags each column has of each lane."""
    wide = [layout.unit(lane) for lane in envelope.tensors.values()]
    return entries(envelope) // np.array(wide, dtype=np.int64)


def bucketed(kept: Ints, bucket: int) -> Ints:
    """Scales of every column and lane with so many kept entries: those of buckets that begin."""
    until = -(-kept.cumsum(axis=0) // bucket)
    return np.diff(until, axis=0, prepend=0)
