"""The base of codecs that send whole numbers: what they share between numbers and bytes."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from anyfleet.core.layout import Envelope, Symbols
from anyfleet.core.messages import Params
from anyfleet.core.slots import Codec, Slack, Squeezed
from anyfleet.parts.codec.coded_columns import Layout
from anyfleet.parts.codec.raw import delivered, distortion
from anyfleet.parts.codec.stream import SLACK, pack, packed_bits, unpack


class Levelled(Codec, Protocol):
    """Sends levels, what was kept, and scales; a codec says how they come about and what they mean.

    `bits` are never less than 8 times the packed bytes, and more by `stream.SLACK` at most.
    """

    @property
    def layout(self) -> Layout:
        return Layout()

    @property
    def slack(self) -> Slack:
        return SLACK

    def quantise(self, laid: Params, rate: Tensor, envelope: Envelope) -> Symbols:
        """Levels of stacked rows of entries, at a target rate for every row."""

    def values(self, symbols: Symbols, envelope: Envelope) -> Params:
        """What the levels mean, as rows of entries; 0 where nothing was kept."""

    def squeeze(self, tree: Params, memory: Params, rate: Tensor, envelope: Envelope) -> Squeezed:
        symbols = self.quantise(envelope.laid(tree), rate, envelope)
        received, kept = self.restore(symbols, envelope)
        bits = self.bits(symbols, envelope)
        return Squeezed(received, kept, symbols, bits, {}, distortion(tree, received))

    def bits(self, symbols: Symbols, envelope: Envelope) -> Tensor:
        return packed_bits(symbols, envelope, self.layout)

    def pack(self, symbols: Symbols, envelope: Envelope) -> tuple[bytes, ...]:
        return pack(symbols, envelope, self.layout)

    def unpack(self, columns: Sequence[bytes], envelope: Envelope) -> Symbols:
        return unpack(columns, envelope, self.layout)

    def restore(self, symbols: Symbols, envelope: Envelope) -> tuple[Params, Params]:
        if symbols.columns == 0:
            nothing = {n: torch.zeros(1, lane.entries) for n, lane in envelope.lanes.items()}
            empty = envelope.shaped({n: v.to(envelope.dtype) for n, v in nothing.items()})
            return empty, empty
        # On both ends through the same lines: what a device thinks it sent is what arrives.
        values, kept = self.values(symbols, envelope), flags(symbols, envelope, self.layout)
        values = {
            name: rows * kept[name] if name in kept else rows for name, rows in values.items()
        }
        lanes = {name: lane for name, lane in envelope.lanes.items() if name in kept}
        part = Envelope(lanes, envelope.dtype, envelope.key)
        return envelope.shaped(values), part.shaped(kept)


def flags(symbols: Symbols, envelope: Envelope, layout: Layout) -> dict[str, Tensor]:
    """For every lane that did not come whole, 1 for entries that came and 0 for the others."""
    came = delivered(symbols, envelope)
    found = {
        name: _spread(kept, layout.unit(envelope.lanes[name])).to(envelope.dtype)
        for name, kept in symbols.kept.items()
    }
    both = {name: rows * came[name].to(rows) if came else rows for name, rows in found.items()}
    return {**came, **both}


def _spread(kept: Tensor, unit: int) -> Tensor:
    """A flag for every entry of a unit."""
    return kept if unit == 1 else kept.repeat_interleave(unit, dim=1)
