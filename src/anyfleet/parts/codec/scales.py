"""Scales: the numbers beside levels, 32 bits each whatever a model is made of."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from anyfleet.core.layout import Symbols
from anyfleet.errors import BadMessage
from anyfleet.parts.codec.coded_columns import MOST_LEVEL

_MOST = torch.finfo(torch.float32).max


def as_scale(value: Tensor) -> Tensor:
    """The nearest scale; what is too large becomes the largest, what is infinite stays so."""
    return torch.where(value.isinf(), value, value.clamp(max=_MOST)).to(torch.float32)


def scales_of(symbols: Symbols, name: str, count: int, dtype: torch.dtype) -> Tensor:
    """So many scales of every row; 0 for those that a cut message never brought."""
    scales = symbols.scales.get(name, torch.zeros(1, 0)).to(dtype)
    return pad(scales, (0, max(0, count - scales.shape[1])))[:, :count]


def check_scales(symbols: Symbols, expected: Mapping[str, int]) -> None:
    """Refuses a message with another number of scales than its codec sends."""
    found = {name: scales.shape[1] for name, scales in symbols.scales.items()}
    wrong = {name: count for name, count in found.items() if count != expected.get(name, 0)}
    if wrong:
        raise BadMessage(f"another number of scales than this codec sends: {wrong}")


def whole(levels: Tensor) -> Tensor:
    """Rounded levels as whole numbers; 0 for what is no number."""
    bounded = levels.nan_to_num(nan=0.0).clamp(-MOST_LEVEL - 1, MOST_LEVEL + 1)
    return bounded.to(torch.int32).clamp(-MOST_LEVEL, MOST_LEVEL)
