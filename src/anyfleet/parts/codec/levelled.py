"""The base of codecs that send whole numbers: what they share between numbers and bytes."""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from anyfleet.core.layout import MessageLayout, Symbols
from anyfleet.core.messages import Params
from anyfleet.core.slots import Codec, Compressed, Slack
from anyfleet.parts.codec.coded_columns import Layout
from anyfleet.parts.codec.raw import delivered, distortion
from anyfleet.parts.codec.stream import SLACK, pack, packed_bits, unpack


class Levelled(Codec):
    """Sends levels, what was kept, and scales; a codec says how they come about and what they mean.

    `bits` are never less than 8 times the packed bytes, and more by `stream.SLACK` at most.
    """

    @property
    def layout(self) -> Layout:
        return Layout()

    @property
    def slack(self) -> Slack:
        return SLACK

    @abstractmethod
    def quantise(self, laid: Params, rate: Tensor, envelope: MessageLayout) -> Symbols:
        """Levels of stacked rows of entries, at a target rate for every row."""

    @abstractmethod
    def values(self, symbols: Symbols, envelope: MessageLayout) -> Params:
        """What the levels mean, as rows of entries; 0 where nothing was kept."""

    def compress(
        self, tree: Params, state: Params, sent_fraction: Tensor, layout: MessageLayout
    ) -> Compressed:
        symbols = self.quantise(layout.flattened(tree), sent_fraction, layout)
        received, kept = self.restore(symbols, layout)
        bits = self.bits(symbols, layout)
        return Compressed(received, kept, symbols, bits, {}, distortion(tree, received))

    def bits(self, symbols: Symbols, layout: MessageLayout) -> Tensor:
        return packed_bits(symbols, layout, self.layout)

    def pack(self, symbols: Symbols, layout: MessageLayout) -> tuple[bytes, ...]:
        return pack(symbols, layout, self.layout)

    def unpack(self, columns: Sequence[bytes], layout: MessageLayout) -> Symbols:
        return unpack(columns, layout, self.layout)

    def restore(self, symbols: Symbols, layout: MessageLayout) -> tuple[Params, Params]:
        if symbols.columns == 0:
            nothing = {n: torch.zeros(1, lane.entries) for n, lane in layout.tensors.items()}
            empty = layout.unflattened({n: v.to(layout.dtype) for n, v in nothing.items()})
            return empty, empty
        # On both ends through the same lines: what a device thinks it sent is what arrives.
        values, kept = self.values(symbols, layout), flags(symbols, layout, self.layout)
        values = {
            name: rows * kept[name] if name in kept else rows for name, rows in values.items()
        }
        lanes = {name: lane for name, lane in layout.tensors.items() if name in kept}
        part = MessageLayout(lanes, layout.dtype, layout.key)
        return layout.unflattened(values), part.unflattened(kept)


def flags(symbols: Symbols, envelope: MessageLayout, layout: Layout) -> dict[str, Tensor]:
    """For every lane that did not come whole, 1 for entries that came and 0 for the others."""
    came = delivered(symbols, envelope)
    found = {
        name: _spread(kept, layout.unit(envelope.tensors[name])).to(envelope.dtype)
        for name, kept in symbols.kept.items()
    }
    both = {name: rows * came[name].to(rows) if came else rows for name, rows in found.items()}
    return {**came, **both}


def _spread(kept: Tensor, unit: int) -> Tensor:
    """A flag for every entry of a unit."""
    return kept if unit == 1 else kept.repeat_interleave(unit, dim=1)
