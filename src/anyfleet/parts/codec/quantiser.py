"""The base of codecs that send whole numbers: packing, sizes and entropy coding come with it.

A subclass says how rows of entries become quantisation levels and scales (`quantise`), and what
these stand for (`dequantise`).
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from anyfleet.core.codec_calls import distortion
from anyfleet.core.layout import MessageLayout, Symbols
from anyfleet.core.messages import Params
from anyfleet.core.slots import Codec, Compressed, Slack
from anyfleet.errors import BadMessage
from anyfleet.parts.codec.bitstream import (
    MOST_LEVEL,
    SLACK,
    SymbolFormat,
    pack,
    packed_bits,
    unpack,
)
from anyfleet.parts.codec.range_coder import missing
from anyfleet.parts.codec.ranking import as_numbers

_ALL = 1 - 1e-6  # all that a codec can send: a message is never quite as long as its update
_MOST_SCALE = torch.finfo(torch.float32).max


class Quantiser(Codec):
    """A codec that sends quantisation levels, flags of what is kept, and scales.

    `bits` are never less than 8 times the packed bytes, and more by `bitstream.SLACK` at most.
    """

    @property
    def symbol_format(self) -> SymbolFormat:
        """The way in which symbols travel: signs, flags, and where scales belong."""
        return SymbolFormat()

    @property
    def slack(self) -> Slack:
        return SLACK

    @property
    def unavailable(self) -> str:
        return missing()

    @abstractmethod
    def quantise(self, rows: Params, sent_fraction: Tensor, layout: MessageLayout) -> Symbols:
        """Return the symbols of rows [devices, entries]: quantisation levels, kept flags, scales.

        Levels are whole numbers (of any type) within ±2**30, scales become 32-bit floats.
        `sent_fraction` [devices] is what the orders ask for, NaN where nothing is asked.
        """

    @abstractmethod
    def dequantise(self, symbols: Symbols, layout: MessageLayout) -> Params:
        """Return the rows [devices, entries] that symbols stand for.

        What is not kept becomes 0 afterwards. Scales may come from a forged message: read them by
        `symbols.scale(name, count)`.
        """

    def compress(
        self, rows: Params, sent_fraction: Tensor, layout: MessageLayout, state: Params
    ) -> Compressed:
        symbols, bits = self.measured(rows, sent_fraction, layout)
        received, kept = self.restore(symbols, layout)
        return Compressed(received, kept, symbols, bits, {}, distortion(rows, received, layout))

    def measured(
        self, rows: Params, sent_fraction: Tensor, layout: MessageLayout
    ) -> tuple[Symbols, Tensor]:
        """Return the symbols of rows, and their bits [devices, columns].

        A codec that fits messages to a sent fraction has counted them already.
        """
        symbols = _plain(self.quantise(rows, sent_fraction, layout))
        return symbols, self.bits(symbols, layout)

    def bits(self, symbols: Symbols, layout: MessageLayout) -> Tensor:
        return packed_bits(symbols, layout, self.symbol_format)

    def pack(self, symbols: Symbols, layout: MessageLayout) -> tuple[bytes, ...]:
        return pack(symbols, layout, self.symbol_format)

    def unpack(self, columns: Sequence[bytes], layout: MessageLayout) -> Symbols:
        return unpack(columns, layout, self.symbol_format)

    def restore(self, symbols: Symbols, layout: MessageLayout) -> tuple[Params, Params]:
        if symbols.columns == 0:
            nothing = {
                name: torch.zeros(1, tensor.entries, dtype=layout.dtype, device=layout.key.device)
                for name, tensor in layout.tensors.items()
            }
            return nothing, nothing
        # Both ends run the same lines: what a device thinks it sent is what arrives.
        values, form = self.dequantise(symbols, layout), self.symbol_format
        some = _flags(symbols, layout, form)
        values = {name: rows.to(layout.dtype) for name, rows in values.items()}
        return {n: rows * some[n] if n in some else rows for n, rows in values.items()}, some


def _plain(symbols: Symbols) -> Symbols:
    """Return symbols whose levels and scales have the types in which they travel."""
    levels = {
        name: rows if rows.dtype == torch.int32 else whole(rows)
        for name, rows in symbols.quantisation_levels.items()
    }
    scales = {
        name: rows if rows.dtype == torch.float32 else as_scale(rows)
        for name, rows in symbols.scales.items()
    }
    return replace(symbols, quantisation_levels=levels, scales=scales)


def _flags(symbols: Symbols, layout: MessageLayout, form: SymbolFormat) -> dict[str, Tensor]:
    """Return 1 for entries that came and 0 for the others, for tensors that did not come whole."""
    came = layout.delivered(symbols.columns)
    found = {
        name: as_numbers(_spread(kept, form.unit(layout.tensors[name])), layout.dtype)
        for name, kept in symbols.kept.items()
    }
    both = {name: rows * came[name].to(rows) if came else rows for name, rows in found.items()}
    return {**came, **both}


def _spread(kept: Tensor, unit: int) -> Tensor:
    """Return the flag of its unit for every entry."""
    return kept if unit == 1 else kept.repeat_interleave(unit, dim=1)


def joined_scales(symbols: Symbols, counts: Mapping[str, int]) -> Tensor:
    """Return the first scales of tensors side by side: of each so many, 0 where it has fewer."""
    found = [
        symbols.scales[name]
        if name in symbols.scales and symbols.scales[name].shape[1] == count
        else symbols.scale(name, count)
        for name, count in counts.items()
    ]
    return torch.cat(found, dim=1)


def target_fraction(asked: Tensor, own: float) -> Tensor:
    """Return the sent fraction that each device aims at: `own` where none was asked for (NaN)."""
    return torch.where(asked.isnan(), own, asked.clamp(max=_ALL))


def as_scale(value: Tensor) -> Tensor:
    """Return the nearest 32-bit scale: the largest for what is too large; infinity stays so."""
    return torch.where(value.isinf(), value, value.clamp(max=_MOST_SCALE)).to(torch.float32)


def whole(levels: Tensor) -> Tensor:
    """Return rounded quantisation levels as 32-bit whole numbers within their range; 0 for NaN."""
    bounded = levels.nan_to_num(nan=0.0).clamp(-MOST_LEVEL - 1, MOST_LEVEL + 1)
    return bounded.to(torch.int32).clamp(-MOST_LEVEL, MOST_LEVEL)


def check_scales(symbols: Symbols, expected: Mapping[str, int]) -> None:
    """Raise BadMessage unless each tensor has as many scales as its codec sends, or none."""
    found = {name: scales.shape[1] for name, scales in symbols.scales.items()}
    wrong = {name: count for name, count in found.items() if count != expected.get(name, 0)}
    if wrong:
        raise BadMessage(f"another number of scales than this codec sends: {wrong}")
