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
from anyfleet.parts.codec.quantiser import Quantiser, as_scale, check_scales
from anyfleet.parts.codec.ranking import counted
from anyfleet.parts.codec.topk import check_keep, top


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
        chosen = top(rows, self.keep, self.scope)
        entries = {name: torch.where(chosen[name], each, 0) for name, each in rows.items()}
        # Over all entries: the rounding of a sum must not depend on what other devices keep.
        sums = {
            n: v.abs().sum(dim=1, keepdim=True, dtype=torch.float64) for n, v in entries.items()
        }
        counts = {name: counted(flags)[:, None] for name, flags in chosen.items()}
        if self.scope == "model":
            sums, counts = _summed(sums), _summed(counts)
        return Symbols(
            quantisation_levels={name: _signs(each) for name, each in entries.items()},
            # The sign of 0 is 0: there is nothing to send.
            kept={name: each != 0 for name, each in entries.items()},
            scales={name: as_scale(sums[name] / counts[name].clamp(min=1)) for name in sums},
        )

    def dequantise(self, symbols: Symbols, layout: MessageLayout) -> Params:
        owners = self._scale_owners(layout)
        return {
            name: levels * symbols.scale(owners[name]).to(layout.dtype)
            for name, levels in symbols.quantisation_levels.items()
        }

    def unpack(self, columns: Sequence[bytes], layout: MessageLayout) -> Symbols:
        symbols = super().unpack(columns, layout)
        check_scales(symbols, dict.fromkeys(self._scale_owners(layout).values(), 1))
        return symbols

    def _scale_owners(self, layout: MessageLayout) -> dict[str, str]:
        """Return with which tensor the magnitude of each tensor travels."""
        names = list(layout.tensors)
        return {name: names[0] if self.scope == "model" else name for name in names}


def _summed(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the sum over all tensors, under the name of the first; empty without tensors."""
    first = next(iter(parts), None)
    return {} if first is None else {first: torch.stack(list(parts.values())).sum(dim=0)}


def _signs(rows: Tensor) -> Tensor:
    # NaN has level 0 here, and makes the magnitude NaN: it is not hidden.
    return (rows > 0).to(torch.int32) - (rows < 0).to(torch.int32)
