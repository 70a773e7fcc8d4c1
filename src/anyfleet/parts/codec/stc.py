"""Sparse ternary compression: the largest entries, all with one magnitude."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from anyfleet.core.layout import MessageLayout, Symbols
from anyfleet.core.messages import Params
from anyfleet.papers import STC, Paper
from anyfleet.parts.codec.bitstream import SymbolFormat
from anyfleet.parts.codec.quantiser import Quantiser, as_scale, check_scales, joined_scales
from anyfleet.parts.codec.ranking import (
    Chosen,
    joined,
    largest_nonzero_parts,
    parts,
    pieces,
    split,
    spread,
    widths,
)
from anyfleet.parts.codec.topk import check_keep, kept_entries


@dataclass(frozen=True)
class Stc(Quantiser):
    """The share `keep` of largest entries as signs, and their mean magnitude (specification §1.13).

    The largest entries are those of every tensor, or of all tensors together (`scope="model"`). The
    published codec also adds what it left out to the next update: that is `ErrorFeedback(Stc())`.
    """

    keep: float = 1 / 40
    scope: Literal["tensor", "model"] = "tensor"
    papers: ClassVar[tuple[Paper, ...]] = (STC,)

    def __post_init__(self) -> None:
        check_keep("Stc", self.keep)
        if self.scope not in ("tensor", "model"):
            raise ValueError(f'Stc.scope may be "tensor" or "model"; got {self.scope!r}.')

    @property
    def drops(self) -> bool:
        return True

    @property
    def symbol_format(self) -> SymbolFormat:
        return SymbolFormat(most_level=1)

    def quantise(self, rows: Params, sent_fraction: Tensor, layout: MessageLayout) -> Symbols:
        if not rows:
            return Symbols()
        every, within = joined(rows), widths(rows)
        groups = within if self.scope == "tensor" else (every.shape[1],)
        most = kept_entries(self.keep, groups)
        # The sign of 0 is 0: there is nothing to send.
        chosen = Chosen.of(largest_nonzero_parts(every.abs(), groups, most))
        values = chosen.values(every)
        # Over all entries: the rounding of a sum must not depend on what other devices keep.
        sums = [
            each.sum(dim=1, keepdim=True, dtype=torch.float64)
            for each in pieces(chosen.everywhere(values.abs()), within)
        ]
        if self.scope == "model":
            sums = [torch.stack(sums).sum(dim=0)]
        sent = parts(most, every.device).sizes.clamp(min=1)
        scales = torch.split(as_scale(torch.cat(sums, dim=1) / sent), 1, dim=1)
        signs = chosen.everywhere((values > 0).int() - (values < 0).int())
        return Symbols(
            # NaN has level 0 here, and makes the magnitude NaN: it is not hidden.
            quantisation_levels=split(signs, rows),
            kept=split(chosen.flags, rows),
            scales=dict(zip(rows, scales, strict=self.scope == "tensor")),
        )

    def dequantise(self, symbols: Symbols, layout: MessageLayout) -> Params:
        levels, owners = symbols.quantisation_levels, self._scale_owners(layout)
        if not levels:
            return {}
        scales = joined_scales(symbols, {owners[name]: 1 for name in levels}).to(layout.dtype)
        of = scales if self.scope == "model" else spread(scales, widths(levels))
        # In place: whole numbers times others are slow, and so is new memory.
        return split(joined(levels).to(layout.dtype).mul_(of), levels)

    def unpack(self, columns: Sequence[bytes], layout: MessageLayout) -> Symbols:
        symbols = super().unpack(columns, layout)
        check_scales(symbols, dict.fromkeys(self._scale_owners(layout).values(), 1))
        return symbols

    def _scale_owners(self, layout: MessageLayout) -> dict[str, str]:
        """Return with which tensor the magnitude of each tensor travels."""
        names = list(layout.tensors)
        return {name: names[0] if self.scope == "model" else name for name in names}
