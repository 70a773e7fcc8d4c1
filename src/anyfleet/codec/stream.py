"""Levels as bytes: entropy-coded, with whole-number probabilities, column by column."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from anyfleet.envelope import Envelope
from anyfleet.method import Symbols

SLACK_BITS = 256


@dataclass(frozen=True)
class Layout:
    """What both ends know of a codec's symbols.

    Signs travel "apart", one bit for every level that is not 0, or "within" the levels, whose
    distribution then has two sides. `bucket`: one scale for so many kept entries of a lane, sent
    with the column in which they begin; None: all scales of a lane go ahead, with its first column.
    """

    signs: Literal["apart", "within"] = "apart"
    bucket: int | None = None


def packed_bits(symbols: Symbols, envelope: Envelope, layout: Layout) -> Tensor:
    """How many bits `pack` takes at most, of every row and column, without packing."""
    raise NotImplementedError


def pack(symbols: Symbols, envelope: Envelope, layout: Layout) -> tuple[bytes, ...]:
    """One row as bytes, column by column."""
    raise NotImplementedError


def unpack(columns: Sequence[bytes], envelope: Envelope, layout: Layout) -> Symbols:
    """The inverse of `pack`, on leading columns; `BadMessage` for what it cannot have made."""
    raise NotImplementedError
