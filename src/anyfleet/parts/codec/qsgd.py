"""QSGD: quantisation levels drawn to be right in the mean, relative to the norms of buckets."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from anyfleet import rng
from anyfleet.core.layout import MessageLayout, Symbols
from anyfleet.core.messages import Params
from anyfleet.errors import refuse
from anyfleet.papers import QSGD, Paper
from anyfleet.parts.codec.bitstream import SymbolFormat
from anyfleet.parts.codec.quantiser import Quantiser, as_scale


@dataclass(frozen=True)
class Qsgd(Quantiser):
    """Every entry as one of the two quantisation levels around it, at random and unbiased.

    `bucket` entries in a row share a norm; None: all of a tensor, which is much worse for long
    tensors (specification §1.14). `TopK(0.15, Qsgd())` sends the largest entries alone.
    """

    quantisation_levels: int = 16
    bucket: int | None = 512
    papers: ClassVar[tuple[Paper, ...]] = (QSGD,)

    def __post_init__(self) -> None:
        refuse(self._faults())

    def _faults(self) -> list[str]:
        faults = []
        if not 1 <= self.quantisation_levels <= 2**24:
            faults.append(
                f"Qsgd.quantisation_levels must be from 1 to {2**24}, "
                f"got {self.quantisation_levels}."
            )
        if self.bucket is not None and self.bucket < 1:
            faults.append(f"Qsgd.bucket must be at least 1 entry, or None, got {self.bucket}.")
        return faults

    @property
    def symbol_format(self) -> SymbolFormat:
        return SymbolFormat(bucket=self.bucket, most_level=self.quantisation_levels)

    def quantise(self, rows: Params, sent_fraction: Tensor, layout: MessageLayout) -> Symbols:
        steps = torch.full_like(sent_fraction, self.quantisation_levels, dtype=torch.float64)
        return quantised(rows, steps, uniforms(rows, layout), self.bucket)

    def dequantise(self, symbols: Symbols, layout: MessageLayout) -> Params:
        found = {}
        for name, levels in symbols.quantisation_levels.items():
            size = levels.shape[1]
            scales = symbols.scale(name, _bucket_count(size, self.bucket)).to(layout.dtype)
            found[name] = levels.to(layout.dtype) * _spread(scales, size, self.bucket)
        return found


def uniforms(rows: Params, layout: MessageLayout) -> dict[str, Tensor]:
    """Return what decides between two levels: a number in [0, 1) for every entry."""
    keys = {name: rng.fold(layout.key, name) for name in rows}
    return {
        name: rng.uniforms(keys[name], each.shape[1], each.dtype).to(each.device)
        for name, each in rows.items()
    }


def quantised(rows: Params, steps: Tensor, u: Params, bucket: int | None) -> Symbols:
    """Return the symbols of rows, with `steps` [devices] levels up to the norm of a bucket.

    Scales are lengths of a step, norm over steps, so that the steps need not travel.
    """
    levels, scales = {}, {}
    for name, each in rows.items():
        norms = torch.linalg.vector_norm(_buckets(each, bucket), dim=2, dtype=torch.float64)
        scales[name] = as_scale(norms / steps.to(norms)[:, None])
        # Divided by infinity, what has no scale gets level 0.
        safe = torch.where(scales[name] > 0, scales[name], torch.inf).to(each.dtype)
        step = _spread(safe, each.shape[1], bucket)
        levels[name] = _drawn_levels(each, step, steps, u[name])
    return Symbols(quantisation_levels=levels, scales=scales)


def _drawn_levels(rows: Tensor, step: Tensor, steps: Tensor, u: Tensor) -> Tensor:
    # The level above where u is less than the part over the level below. It works in place, which
    # halves the time.
    place = rows.abs().div_(step).sub_(u).ceil_()
    # An entry that is its bucket's norm has the last level, not one more by rounding.
    torch.minimum(place, steps.to(rows)[:, None], out=place)
    return place.nan_to_num_(nan=0.0).copysign_(rows).to(torch.int32)


def _bucket_size(size: int, bucket: int | None) -> int:
    return bucket or max(1, size)


def _bucket_count(size: int, bucket: int | None) -> int:
    return -(-size // _bucket_size(size, bucket))


def _buckets(rows: Tensor, bucket: int | None) -> Tensor:
    """Return rows as [devices, buckets, entries], the last bucket filled with zeros."""
    entries, count = rows.shape[1], _bucket_count(rows.shape[1], bucket)
    size = _bucket_size(entries, bucket)
    full = torch.nn.functional.pad(rows, (0, count * size - entries))
    return full.reshape(len(rows), count, size)


def _spread(scales: Tensor, entries: int, bucket: int | None) -> Tensor:
    """Return the scale of its bucket for every entry."""
    return scales.repeat_interleave(_bucket_size(entries, bucket), dim=1)[:, :entries]
