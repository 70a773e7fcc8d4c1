"""The largest entries alone, and what any other codec makes of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from anyfleet.codec.levels import Levelled
from anyfleet.codec.stream import Layout, packed_bits
from anyfleet.envelope import Envelope, Lane
from anyfleet.formulas.sub_models import kept_channels
from anyfleet.method import Symbols
from anyfleet.types import Params

NUMBER_BITS = 32  # of an entry that is sent as it is: what a target rate is a share of
_RATES = 1e-9, 1 - 1e-6  # of what was kept: never so much that it would ask for nothing


@dataclass(frozen=True)
class Plain(Levelled):
    """Every entry as it is: what a stage before it left."""

    @property
    def layout(self) -> Layout:
        return Layout(numbers=True)

    def quantise(self, laid: Params, rate: Tensor, envelope: Envelope) -> Symbols:
        return Symbols(numbers=laid)

    def values(self, symbols: Symbols, envelope: Envelope) -> Params:
        return symbols.numbers


@dataclass(frozen=True)
class TopK(Levelled):
    """Keeps a share of every tensor, the entries of largest magnitude; `then` says how they travel.

    Exactly `max(1, ceil(keep × entries))` of each, ties to the lower index (METHODS §1.13–§1.15).
    What a target rate leaves besides the positions is for the codec that follows.
    """

    keep: float = 0.15
    then: Levelled = field(default_factory=Plain)

    def __post_init__(self) -> None:
        check_share("TopK", self.keep)
        if self.then.slot:
            raise ValueError(
                f"TopK.then={self.then!r} would remember less than was left out; "
                "use ErrorFeedback(TopK(...))."
            )

    @property
    def layout(self) -> Layout:
        return self.then.layout

    @property
    def drops(self) -> bool:
        return self.keep < 1 or self.then.drops

    def quantise(self, laid: Params, rate: Tensor, envelope: Envelope) -> Symbols:
        kept = top(laid, self.keep)
        packed = {name: gathered(rows, kept[name]) for name, rows in laid.items()}
        left = _rest(rate, kept, envelope)
        return spread_symbols(self.then.quantise(packed, left, _inside(packed, envelope)), kept)

    def values(self, symbols: Symbols, envelope: Envelope) -> Params:
        packed = gathered_symbols(symbols)
        inside = _inside({**packed.numbers, **packed.levels}, envelope)
        found = self.then.values(packed, inside)
        kept = symbols.kept
        return {n: spread(rows, kept[n]) if n in kept else rows for n, rows in found.items()}


def check_share(part: str, keep: float) -> None:
    """Refuses a share of entries that there is not."""
    if not 0 < keep <= 1:
        raise ValueError(
            f"{part}.keep is the share of entries that is sent, in (0, 1]; got {keep}."
        )


def top(
    laid: Params, keep: float, scope: Literal["tensor", "model"] = "tensor"
) -> dict[str, Tensor]:
    """Flags of the largest magnitudes of each tensor, or of all tensors together."""
    if scope == "tensor":
        return {name: largest(rows.abs(), _count(keep, rows)) for name, rows in laid.items()}
    if not laid:
        return {}
    every = torch.cat(list(laid.values()), dim=1).abs()
    kept = largest(every, _count(keep, every))
    parts = torch.split(kept, [rows.shape[1] for rows in laid.values()], dim=1)
    return dict(zip(laid, parts, strict=True))


def largest(sizes: Tensor, count: int) -> Tensor:
    """Flags of exactly so many of the largest of every row, ties to the lower index."""
    if count >= sizes.shape[1]:
        return torch.ones_like(sizes, dtype=torch.bool)
    # What is no number counts as the largest, so that nobody takes it for an update of zeros.
    known = sizes.nan_to_num(nan=torch.inf, posinf=torch.inf)
    edge = known.topk(count, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    above, level = known > edge, known == edge
    free = count - above.sum(dim=1, keepdim=True)
    return above | (level & (level.cumsum(dim=1, dtype=torch.int32) <= free))


def gathered(rows: Tensor, kept: Tensor) -> Tensor:
    """The kept entries of every row, side by side; zeros after those of a row that has fewer."""
    there = _filled(kept, None)
    return rows.new_zeros(there.shape).masked_scatter(there, rows[kept])


def spread(packed: Tensor, kept: Tensor) -> Tensor:
    """The inverse of `gathered`, with zeros where nothing was kept."""
    return packed.new_zeros(kept.shape).masked_scatter(kept, packed[_filled(kept, packed)])


def spread_symbols(symbols: Symbols, kept: Params) -> Symbols:
    """Symbols of kept entries as symbols of all."""
    # A codec that leaves out some of what was kept has the last word.
    flags = {n: spread(symbols.kept[n], v) if n in symbols.kept else v for n, v in kept.items()}
    return Symbols(
        numbers={name: spread(rows, kept[name]) for name, rows in symbols.numbers.items()},
        levels={name: spread(rows, kept[name]) for name, rows in symbols.levels.items()},
        kept=flags,
        scales=symbols.scales,
    )


def gathered_symbols(symbols: Symbols) -> Symbols:
    """Symbols of all entries as symbols of kept ones, all of which are there."""
    return Symbols(
        numbers=_gathered(symbols.numbers, symbols.kept),
        levels=_gathered(symbols.levels, symbols.kept),
        scales=symbols.scales,
    )


def _gathered(tree: Params, kept: Params) -> dict[str, Tensor]:
    return {n: gathered(rows, kept[n]) if n in kept else rows for n, rows in tree.items()}


def _filled(kept: Tensor, packed: Tensor | None) -> Tensor:
    """Which places of packed rows hold something."""
    counts = kept.sum(dim=1, keepdim=True)
    width = int(counts.max()) if packed is None else packed.shape[1]
    return torch.arange(width, device=kept.device) < counts


def _count(keep: float, rows: Tensor) -> int:
    return min(rows.shape[1], kept_channels(keep, rows.shape[1]))


def _inside(packed: Params, envelope: Envelope) -> Envelope:
    """How the kept entries would travel on their own."""
    sizes = {name: rows.shape[1] for name, rows in packed.items()}
    lanes: Mapping[str, Lane] = {name: Lane((n,), (n,)) for name, n in sizes.items()}
    return Envelope(lanes, envelope.dtype, envelope.key)


def _rest(rate: Tensor, kept: Params, envelope: Envelope) -> Tensor:
    """The target rate of what was kept, less the positions; 1 stays 1, which asks for nothing."""
    if not bool((rate < 1).any()) or not kept:
        return rate
    alone = Symbols(levels={n: v.to(torch.int32) for n, v in kept.items()}, kept=kept)
    positions = packed_bits(alone, envelope, Layout(signs="within")).sum(dim=1).to(rate)
    every = NUMBER_BITS * sum(lane.entries for lane in envelope.lanes.values())
    sent = NUMBER_BITS * torch.stack([v.sum(dim=1) for v in kept.values()]).sum(dim=0).clamp(min=1)
    left = (rate * every - positions) / sent.to(rate)
    return torch.where(rate < 1, left.clamp(*_RATES), rate)
