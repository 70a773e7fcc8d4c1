"""Sparse ternary compression: the largest entries, all with one magnitude."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from anyfleet.core.layout import MessageLayout, Symbols
from anyfleet.core.messages import Params
from anyfleet.papers import STC, Paper
from anyfleet.parts.codec.levelled import Levelled
from anyfleet.parts.codec.scales import as_scale, check_scales, scales_of
from anyfleet.parts.codec.stream import Layout
from anyfleet.parts.codec.topk import Places, check_share, top


@dataclass(frozen=True)
class Stc(Levelled):
    """The share `keep` of largest entries, each as its sign; their mean magnitude (specification §1.13).

    Of every tensor, or of all tensors of an update together ("model"). The published codec also
    adds what it left out to the next update: that is `ErrorFeedback(Stc())`.
    """

    keep: float = 1 / 40
    scope: Literal["tensor", "model"] = "tensor"
    papers: ClassVar[tuple[Paper, ...]] = (STC,)

    def __post_init__(self) -> None:
        check_share("Stc", self.keep)
        if self.scope not in ("tensor", "model"):
            raise ValueError(f'Stc.scope may be "tensor" or "model"; got {self.scope!r}.')

    @property
    def layout(self) -> Layout:
        return Layout()

    @property
    def drops(self) -> bool:
        return True

    def quantise(self, laid: Params, rate: Tensor, envelope: MessageLayout) -> Symbols:
        chosen = top(laid, self.keep, self.scope)
        places = {name: Places.of(flags) for name, flags in chosen.items()}
        entries = {name: places[name].gathered(rows) for name, rows in laid.items()}
        sums = {
            n: v.abs().sum(dim=1, keepdim=True, dtype=torch.float64) for n, v in entries.items()
        }
        counts = {name: each.filled.sum(dim=1, keepdim=True) for name, each in places.items()}
        if self.scope == "model":
            sums, counts = _together(sums), _together(counts)
        return Symbols(
            quantisation_levels={
                name: places[name].spread(_signs(rows)) for name, rows in entries.items()
            },
            # The sign of 0 is 0: there is nothing to send.
            kept={name: flags & (laid[name] != 0) for name, flags in chosen.items()},
            scales={name: as_scale(sums[name] / counts[name].clamp(min=1)) for name in sums},
        )

    def values(self, symbols: Symbols, envelope: MessageLayout) -> Params:
        told = self._told(envelope)
        found = {}
        for name, levels in symbols.quantisation_levels.items():
            scale = scales_of(symbols, told[name], 1, envelope.dtype)
            found[name] = levels * scale
        return found

    def unpack(self, columns: Sequence[bytes], layout: MessageLayout) -> Symbols:
        symbols = super().unpack(columns, layout)
        check_scales(symbols, dict.fromkeys(self._told(layout).values(), 1))
        return symbols

    def _told(self, envelope: MessageLayout) -> dict[str, str]:
        """With which tensor the magnitude of each travels."""
        names = list(envelope.tensors)
        return {name: names[0] if self.scope == "model" else name for name in names}


def _together(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """The sum over all tensors, said once: with the first."""
    first = next(iter(parts), None)
    return {} if first is None else {first: torch.stack(list(parts.values())).sum(dim=0)}


def _signs(rows: Tensor) -> Tensor:
    # What is no number has level 0 here, and makes the magnitude none: it is not hidden.
    return (rows > 0).to(torch.int32) - (rows < 0).to(torch.int32)
