"""QSGD: quantisation levels drawn to be right in the mean, relative to the norms of buckets."""

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from anyfleet import rng
from anyfleet.core.layout import MessageLayout, Symbols
from anyfleet.core.messages import Params
from anyfleet.errors import refuse
from anyfleet.papers import QSGD, Paper
from anyfleet.parts.codec.bitstream import SymbolFormat
from anyfleet.parts.codec.quantiser import Quantiser, as_scale, joined_scales
from anyfleet.parts.codec.ranking import joined, on_host, parts, pieces, split, spread, widths


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
        if not rows:
            return Symbols()
        every, within = joined(rows), widths(rows)
        steps = torch.full_like(sent_fraction, self.quantisation_levels, dtype=torch.float64)
        norms = bucket_norms(every, within, self.bucket)
        u = uniforms(every, within, tuple(rows), layout)
        levels, scales = quantised(every, steps, u, bucket_sizes(within, self.bucket), norms)
        return Symbols(
            quantisation_levels=split(levels, rows),
            scales=split_scales(scales, tuple(rows), within, self.bucket),
        )

    def dequantise(self, symbols: Symbols, layout: MessageLayout) -> Params:
        levels = symbols.quantisation_levels
        if not levels:
            return {}
        within, every = widths(levels), joined(levels).to(layout.dtype)
        counts = dict(zip(levels, bucket_counts(within, self.bucket), strict=True))
        scales = joined_scales(symbols, counts).to(layout.dtype)
        return split(every * spread(scales, bucket_sizes(within, self.bucket)), levels)


def uniforms(
    rows: Tensor, within: tuple[int, ...], names: tuple[str, ...], layout: MessageLayout
) -> Tensor:
    """Return what decides between two levels: a number in [0, 1) for every entry.

    Rows of tensors with these names and sizes lie side by side; each tensor has its own numbers.
    """
    if on_host(rows):
        own = (rng.fold(layout.key, name) for name in names)
        draws = [rng.uniforms(*each, rows.dtype) for each in zip(own, within, strict=True)]
        return torch.cat(draws, dim=1)
    # Folded together: on an accelerator one name takes as many calls as all.
    known = parts(within, rows.device)
    keys = rng.fold(layout.key[:, None], _numbers(names, rows.device))
    index = torch.arange(rows.shape[1], device=rows.device) - known.begins[known.number]
    every = keys.index_select(1, known.number).flatten(), index.repeat(len(keys))
    return rng.uniforms_at(*every, rows.dtype).view(rows.shape)


@lru_cache(maxsize=64)
def _numbers(names: tuple[str, ...], device: torch.device) -> Tensor:
    """Return the numbers of names; they are copied to an accelerator once."""
    return torch.tensor([rng.number_of(name) for name in names]).to(device)


def bucket_norms(rows: Tensor, within: tuple[int, ...], bucket: int | None) -> Tensor:
    """Return the norms of buckets of every tensor, side by side, [devices, buckets]."""
    each = pieces(rows, within)
    if bucket is None:
        full = [part[:, None] for part in each if part.shape[1]]
    else:
        padded = [pad(part, (0, -part.shape[1] % bucket)) for part in each]
        full = [torch.cat(padded, dim=1).view(len(rows), -1, bucket)]
    norms = [torch.linalg.vector_norm(part, dim=2, dtype=torch.float64) for part in full]
    return torch.cat(norms, dim=1) if norms else rows.new_zeros(len(rows), 0, dtype=torch.float64)


def quantised(
    rows: Tensor, steps: Tensor, u: Tensor, buckets: tuple[int, ...], norms: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the levels of rows, and the scales of buckets with so many entries.

    There are `steps` levels up to the norm of a bucket, [devices], or [tries, devices] for several
    tries at once. Scales are lengths of a step, norm over steps, so that the steps need not travel.
    """
    scales = as_scale(norms / steps[..., None])
    # Divided by infinity, what has no scale gets level 0.
    safe = torch.where(scales > 0, scales, torch.inf).to(rows.dtype)
    step = spread(safe.flatten(0, -2), buckets).view(*steps.shape, rows.shape[1])
    # The level above where u is less than the part over the level below. It works in place, which
    # halves the time.
    place = torch.div(rows.abs(), step, out=step).sub_(u).ceil_()
    # An entry that is its bucket's norm has the last level, not one more by rounding.
    torch.minimum(place, steps.to(rows)[..., None], out=place)
    return place.nan_to_num_(nan=0.0).copysign_(rows).to(torch.int32), scales


@lru_cache(maxsize=256)
def bucket_counts(within: tuple[int, ...], bucket: int | None) -> tuple[int, ...]:
    """Return how many buckets tensors of these sizes have."""
    return tuple(-(-size // (bucket or max(1, size))) for size in within)


@lru_cache(maxsize=256)
def bucket_sizes(within: tuple[int, ...], bucket: int | None) -> tuple[int, ...]:
    """Return the entries of every bucket of tensors of these sizes."""
    return tuple(
        min(bucket or size, size - begin)
        for size in within
        for begin in range(0, size, bucket or max(1, size))
    )


def split_scales(
    scales: Tensor, names: tuple[str, ...], within: tuple[int, ...], bucket: int | None
) -> dict[str, Tensor]:
    """Return the scales of every tensor."""
    every = pieces(scales, bucket_counts(within, bucket))
    return dict(zip(names, every, strict=True))
