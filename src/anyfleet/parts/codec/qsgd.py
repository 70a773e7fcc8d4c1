"""QSGD: levels drawn so that they are right in the mean, relative to the norms of buckets."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from anyfleet import rng
from anyfleet.core.layout import MessageLayout, Symbols
from anyfleet.core.messages import Params
from anyfleet.errors import refuse
from anyfleet.papers import QSGD, Paper
from anyfleet.parts.codec.levelled import Levelled
from anyfleet.parts.codec.scales import as_scale, scales_of
from anyfleet.parts.codec.stream import Layout


@dataclass(frozen=True)
class Qsgd(Levelled):
    """Every entry at random as one of the two levels around it: unbiased (specification §1.14).

    `bucket` entries in a row share a norm; None: all of a tensor, which is much worse on long ones.
    A stage before it keeps the largest entries alone: `TopK(0.15, Qsgd())`.
    """

    quantisation_levels: int = 16
    bucket: int | None = 512
    papers: ClassVar[tuple[Paper, ...]] = (QSGD,)

    def __post_init__(self) -> None:
        refuse(self._faults())

    def _faults(self) -> list[str]:
        faults = []
        if not 1 <= self.quantisation_levels <= 2**24:
            faults.append(f"Qsgd.levels must be from 1 to {2**24}, got {self.quantisation_levels}.")
        if self.bucket is not None and self.bucket < 1:
            faults.append(f"Qsgd.bucket must be at least 1 entry, or None, got {self.bucket}.")
        return faults

    @property
    def layout(self) -> Layout:
        return Layout(bucket=self.bucket)

    def quantise(self, laid: Params, rate: Tensor, envelope: MessageLayout) -> Symbols:
        steps = torch.full((len(rate),), self.quantisation_levels, dtype=torch.float64)
        return drawn(laid, steps, draws(laid, envelope), self.bucket)

    def values(self, symbols: Symbols, envelope: MessageLayout) -> Params:
        found = {}
        for name, levels in symbols.quantisation_levels.items():
            size = levels.shape[1]
            scales = scales_of(symbols, name, _count(size, self.bucket), envelope.dtype)
            found[name] = levels.to(envelope.dtype) * _spread(scales, size, self.bucket)
        return found


def draws(laid: Params, envelope: MessageLayout) -> dict[str, Tensor]:
    """What decides between two levels: uniforms in [0, 1), one for every entry."""
    keys = {name: rng.fold(envelope.key, name) for name in laid}
    return {
        name: rng.uniforms(keys[name], rows.shape[1], rows.dtype).to(rows.device)
        for name, rows in laid.items()
    }


def drawn(laid: Params, steps: Tensor, u: Params, bucket: int | None) -> Symbols:
    """Levels of stacked rows, with as many steps up to a bucket's norm as each row has.

    Scales are the lengths of a step, norm over steps, so that the steps need not travel.
    """
    levels, scales = {}, {}
    for name, rows in laid.items():
        norms = torch.linalg.vector_norm(_buckets(rows, bucket), dim=2, dtype=torch.float64)
        scales[name] = as_scale(norms / steps.to(norms)[:, None])
        # Divided by infinity, what has no scale is level 0.
        safe = torch.where(scales[name] > 0, scales[name], torch.inf).to(rows.dtype)
        step = _spread(safe, rows.shape[1], bucket)
        levels[name] = _levels(rows, step, steps, u[name])
    return Symbols(quantisation_levels=levels, scales=scales)


def _levels(rows: Tensor, step: Tensor, steps: Tensor, u: Tensor) -> Tensor:
    # The level above where u is less than the part over the level below. In place: with a new
    # tensor for every operation it would take twice as long.
    place = rows.abs().div_(step).sub_(u).ceil_()
    # An entry that is its bucket's norm has the last level, not one more by rounding.
    torch.minimum(place, steps.to(rows)[:, None], out=place)
    return place.nan_to_num_(nan=0.0).copysign_(rows).to(torch.int32)


def _width(size: int, bucket: int | None) -> int:
    return bucket or max(1, size)


def _count(size: int, bucket: int | None) -> int:
    return -(-size // _width(size, bucket))


def _buckets(rows: Tensor, bucket: int | None) -> Tensor:
    """[rows, buckets, entries], the last bucket filled with zeros."""
    size, many = rows.shape[1], _count(rows.shape[1], bucket)
    wide = _width(size, bucket)
    full = torch.nn.functional.pad(rows, (0, many * wide - size))
    return full.reshape(len(rows), many, wide)


def _spread(scales: Tensor, size: int, bucket: int | None) -> Tensor:
    """The scale of its bucket for every entry."""
    return scales.repeat_interleave(_width(size, bucket), dim=1)[:, :size]
