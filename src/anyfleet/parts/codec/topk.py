"""The largest entries alone, and what any other codec makes of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from anyfleet.core.layout import MessageLayout, Symbols, TensorLayout
from anyfleet.core.messages import Params
from anyfleet.formulas.sub_models import kept_channels
from anyfleet.parts.codec.levelled import Levelled
from anyfleet.parts.codec.ranking import counted, largest, where_set
from anyfleet.parts.codec.stream import Layout, packed_bits

NUMBER_BITS = 32  # of an entry that is sent as it is: what a target rate is a share of
_SMALLEST = 1e-9  # a sent fraction of what was kept that asks for as little as possible
_ALL = 1 - 1e-6  # all that a codec can send: a message is never quite as long as its update


@dataclass(frozen=True)
class Plain(Levelled):
    """Every entry as it is: what a stage before it left."""

    @property
    def layout(self) -> Layout:
        return Layout(numbers=True)

    def quantise(self, laid: Params, rate: Tensor, envelope: MessageLayout) -> Symbols:
        return Symbols(numbers=laid)

    def values(self, symbols: Symbols, envelope: MessageLayout) -> Params:
        return symbols.numbers


@dataclass(frozen=True)
class TopK(Levelled):
    """Keeps a share of every tensor, the entries of largest magnitude; `then` says how they travel.

    Exactly `max(1, ceil(keep × entries))` of each, ties to the lower index (specification §1.13–§1.15).
    What a target rate leaves besides the positions is for the codec that follows.
    """

    keep: float = 0.15
    then: Levelled = field(default_factory=Plain)

    def __post_init__(self) -> None:
        check_share("TopK", self.keep)
        if self.then.state_name:
            raise ValueError(
                f"TopK.then={self.then!r} would remember less than was left out; "
                "use ErrorFeedback(TopK(...))."
            )
        if self.then.layout.kernels:
            raise ValueError(
                f"TopK.then={self.then!r} keeps whole kernels, of which a share of entries leaves "
                "nothing whole; use it without TopK."
            )

    @property
    def layout(self) -> Layout:
        return self.then.layout

    @property
    def drops(self) -> bool:
        return self.keep < 1 or self.then.drops

    @property
    def follows_sent_fraction(self) -> bool:
        return self.then.follows_sent_fraction

    def quantise(self, laid: Params, rate: Tensor, envelope: MessageLayout) -> Symbols:
        kept = top(laid, self.keep)
        places = {name: Places.of(flags) for name, flags in kept.items()}
        packed = {name: places[name].gathered(rows) for name, rows in laid.items()}
        left = _rest(rate, kept, envelope)
        inner = self.then.quantise(packed, left, _inside(packed, envelope))
        return spread_symbols(inner, kept, places)

    def values(self, symbols: Symbols, envelope: MessageLayout) -> Params:
        places = {name: Places.of(flags) for name, flags in symbols.kept.items()}
        packed = Symbols(
            numbers=_gathered(symbols.numbers, places),
            quantisation_levels=_gathered(symbols.quantisation_levels, places),
            scales=symbols.scales,
        )
        inside = _inside({**packed.numbers, **packed.quantisation_levels}, envelope)
        found = self.then.values(packed, inside)
        return {n: places[n].spread(rows) if n in places else rows for n, rows in found.items()}


def check_share(part: str, keep: float) -> None:
    """Refuses a share of entries that there is not."""
    if not 0 < keep <= 1:
        raise ValueError(
            f"{part}.keep is the share of entries that is sent, in (0, 1]; got {keep}."
        )


def target_fraction(asked: Tensor, own: float) -> Tensor:
    """Return the sent fraction that each row aims at: `own` where none was asked for (NaN)."""
    return torch.where(asked.isnan(), own, asked.clamp(max=_ALL))


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


@dataclass(frozen=True, eq=False)
class Places:
    """Where the kept entries of stacked rows are."""

    shape: torch.Size
    where: Tensor  # of all rows, one after the other
    filled: Tensor  # flags of what is there when the rows are packed side by side

    @staticmethod
    def of(kept: Tensor) -> "Places":
        counts = counted(kept)[:, None]
        filled = torch.arange(int(counts.max()), device=kept.device) < counts
        return Places(kept.shape, where_set(kept), filled)

    def gathered(self, rows: Tensor) -> Tensor:
        """The kept entries side by side; zeros after those of a row that has fewer."""
        values = rows.flatten().index_select(0, self.where)
        if len(values) == self.filled.numel():
            return values.reshape(self.filled.shape)
        return values.new_zeros(self.filled.shape).masked_scatter(self.filled, values)

    def spread(self, packed: Tensor) -> Tensor:
        """The inverse of `gathered`, with zeros where nothing was kept."""
        equal = len(self.where) == packed.numel()
        values = packed.flatten() if equal else packed[self.filled]
        found = packed.new_zeros(self.shape.numel())
        return found.index_copy_(0, self.where, values).reshape(self.shape)


def spread_symbols(symbols: Symbols, kept: Params, places: Mapping[str, Places]) -> Symbols:
    """Symbols of kept entries as symbols of all."""
    # A codec that leaves out some of what was kept has the last word.
    fewer = {name: places[name].spread(flags) for name, flags in symbols.kept.items()}
    return Symbols(
        numbers={name: places[name].spread(rows) for name, rows in symbols.numbers.items()},
        quantisation_levels={
            name: places[name].spread(rows) for name, rows in symbols.quantisation_levels.items()
        },
        kept={**kept, **fewer},
        scales=symbols.scales,
    )


def _gathered(tree: Params, places: Mapping[str, Places]) -> dict[str, Tensor]:
    return {n: places[n].gathered(rows) if n in places else rows for n, rows in tree.items()}


def _count(keep: float, rows: Tensor) -> int:
    return min(rows.shape[1], kept_channels(keep, rows.shape[1]))


def _inside(packed: Params, envelope: MessageLayout) -> MessageLayout:
    """How the kept entries would travel on their own."""
    sizes = {name: rows.shape[1] for name, rows in packed.items()}
    lanes: Mapping[str, TensorLayout] = {
        name: TensorLayout((n,), (n,)) for name, n in sizes.items()
    }
    return MessageLayout(lanes, envelope.dtype, envelope.key)


def _rest(rate: Tensor, kept: Params, envelope: MessageLayout) -> Tensor:
    """Return the sent fraction of what was kept, less the positions; NaN (not asked) stays NaN."""
    if bool(rate.isnan().all()) or not kept:
        return rate
    alone = Symbols(quantisation_levels={n: v.to(torch.int32) for n, v in kept.items()}, kept=kept)
    positions = packed_bits(alone, envelope, Layout(signs="within")).sum(dim=1).to(rate)
    every = NUMBER_BITS * sum(lane.entries for lane in envelope.tensors.values())
    sent = NUMBER_BITS * torch.stack([v.sum(dim=1) for v in kept.values()]).sum(dim=0).clamp(min=1)
    left = (rate.clamp(max=_ALL) * every - positions) / sent.to(rate)
    return left.clamp(_SMALLEST, 1.0)
