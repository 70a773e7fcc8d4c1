"""A codec of one's own: one bit for each entry.

>>> from anyfleet.parts import try_codec
>>> tried = try_codec(OneBit(), {"w": torch.tensor([3.0, -1.0, 2.0, -2.0])})
>>> tried.restored["w"]
tensor([ 2., -2.,  2., -2.])
"""

from dataclasses import dataclass

import torch

from anyfleet.parts import Quantiser, Symbols


@dataclass(frozen=True)
class OneBit(Quantiser):
    """The sign of every entry times the mean magnitude of its tensor."""

    def quantise(self, rows, sent_fraction, layout):
        return Symbols(
            quantisation_levels={name: torch.where(x < 0, -1, 1) for name, x in rows.items()},
            scales={name: x.abs().double().mean(dim=1, keepdim=True) for name, x in rows.items()},
        )

    def dequantise(self, symbols, layout):
        signs = symbols.quantisation_levels
        return {name: x * symbols.scale(name) for name, x in signs.items()}
