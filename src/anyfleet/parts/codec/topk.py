"""The largest entries alone, sent in the way of another codec."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from anyfleet.core.layout import MessageLayout, Symbols, TensorLayout
from anyfleet.core.message_size import NUMBER_BITS
from anyfleet.core.messages import Params
from anyfleet.core.signals import Signal
from anyfleet.formulas.sub_models import kept_channels
from anyfleet.parts.codec.bitstream import SymbolFormat, packed_bits
from anyfleet.parts.codec.quantiser import Quantiser, target_fraction
from anyfleet.parts.codec.ranking import counted, largest, on_host, where_set

_SMALLEST = 1e-9  # a sent fraction of what was kept that asks for as little as possible


@dataclass(frozen=True)
class Plain(Quantiser):
    """Every entry as it is: for what `TopK` keeps."""

    @property
    def symbol_format(self) -> SymbolFormat:
        return SymbolFormat(numbers=True)

    def quantise(self, rows: Params, sent_fraction: Tensor, layout: MessageLayout) -> Symbols:
        return Symbols(numbers=rows)

    def dequantise(self, symbols: Symbols, layout: MessageLayout) -> Params:
        return symbols.numbers


@dataclass(frozen=True)
class TopK(Quantiser):
    """The entries of largest magnitude of every tensor; `then` says how they travel.

    Exactly `max(1, ceil(keep × entries))` of each tensor are kept, ties to the lower index
    (specification §1.13–§1.15). Of the sent fraction that an order asks for, `then` gets what the
    positions leave.
    """

    keep: float = 0.15  # share of the entries that is sent
    then: Quantiser = field(default_factory=Plain)

    def __post_init__(self) -> None:
        check_keep("TopK", self.keep)
        if self.then.state_name:
            raise ValueError(
                f"TopK.then={self.then!r} would remember less than was left out; "
                "use ErrorFeedback(TopK(...))."
            )
        if self.then.symbol_format.kernels:
            raise ValueError(
                f"TopK.then={self.then!r} keeps whole kernels, of which a share of entries leaves "
                "nothing whole; use it without TopK."
            )

    @property
    def symbol_format(self) -> SymbolFormat:
        return self.then.symbol_format

    @property
    def drops(self) -> bool:
        return self.keep < 1 or self.then.drops

    @property
    def provides(self) -> frozenset[Signal]:
        return self.then.provides

    def quantise(self, rows: Params, sent_fraction: Tensor, layout: MessageLayout) -> Symbols:
        kept = top(rows, self.keep)
        places = self._places(kept)
        gathered = {name: places[name].gathered(each) for name, each in rows.items()}
        left = _without_positions(sent_fraction, kept, layout)
        inner = self.then.quantise(gathered, left, _gathered_layout(gathered, layout))
        return spread_symbols(inner, kept, places)

    def dequantise(self, symbols: Symbols, layout: MessageLayout) -> Params:
        places = self._places(symbols.kept)
        gathered = Symbols(
            numbers=_gathered(symbols.numbers, places),
            quantisation_levels=_gathered(symbols.quantisation_levels, places),
            scales=symbols.scales,
        )
        every = {**gathered.numbers, **gathered.quantisation_levels}
        found = self.then.dequantise(gathered, _gathered_layout(every, layout))
        return {n: places[n].spread(rows) if n in places else rows for n, rows in found.items()}

    def _places(self, kept: Params) -> dict[str, "Places"]:
        return {
            name: Places.of(flags, kept_entries(self.keep, flags)) for name, flags in kept.items()
        }


def check_keep(part: str, keep: float) -> None:
    """Raise ValueError unless 0 < keep ≤ 1."""
    if not 0 < keep <= 1:
        raise ValueError(
            f"{part}.keep is the share of entries that is sent, in (0, 1]; got {keep}."
        )


def top(
    rows: Params, keep: float, scope: Literal["tensor", "model"] = "tensor"
) -> dict[str, Tensor]:
    """Return flags of the largest magnitudes of each tensor, or of all tensors together."""
    if scope == "tensor":
        return {name: largest(each.abs(), kept_entries(keep, each)) for name, each in rows.items()}
    if not rows:
        return {}
    every = torch.cat(list(rows.values()), dim=1).abs()
    kept = largest(every, kept_entries(keep, every))
    parts = torch.split(kept, [each.shape[1] for each in rows.values()], dim=1)
    return dict(zip(rows, parts, strict=True))


def kept_entries(keep: float, rows: Tensor) -> int:
    """Return how many entries a share of rows [devices, entries] is."""
    return min(rows.shape[1], kept_channels(keep, rows.shape[1]))


@dataclass(frozen=True, eq=False)
class Places:
    """The places of the kept entries of a stack of rows."""

    kept: Tensor
    where: Tensor  # on the host of all rows, one after the other; elsewhere [devices, width]
    filled: Tensor  # flags of what is there when kept entries lie side by side

    @staticmethod
    def of(kept: Tensor, most: int | None = None) -> "Places":
        """Return the places of set flags [devices, entries].

        Off the host there is room for `most` of a row (None: all), as nobody waits for a count.
        """
        counts = counted(kept)[:, None]
        if on_host(kept):
            filled = torch.arange(int(counts.max()) if len(counts) else 0) < counts
            return Places(kept, where_set(kept), filled)
        entries = kept.shape[1]
        width = entries if most is None else min(most, entries)
        filled = torch.arange(width, device=kept.device) < counts
        # What is not kept goes behind the others.
        number = torch.where(kept, kept.cumsum(dim=1) - 1, width).clamp(max=width)
        where = number.new_zeros(len(kept), width + 1)
        place = torch.arange(entries, device=kept.device).expand_as(number)
        return Places(kept, where.scatter_(1, number, place)[:, :width], filled)

    def gathered(self, rows: Tensor) -> Tensor:
        """Return the kept entries side by side; zeros follow those of a row that has fewer."""
        if not on_host(rows):
            return torch.where(self.filled, rows.gather(1, self.where), 0)
        values = rows.flatten().index_select(0, self.where)
        if len(values) == self.filled.numel():
            return values.reshape(self.filled.shape)
        return values.new_zeros(self.filled.shape).masked_scatter(self.filled, values)

    def spread(self, gathered: Tensor) -> Tensor:
        """Return entries at their places again, with zeros where nothing was kept."""
        if not on_host(gathered):
            found = gathered.new_zeros(len(self.kept), self.kept.shape[1] + 1)
            place = torch.where(self.filled, self.where, self.kept.shape[1])
            return found.scatter_(1, place, gathered)[:, :-1].contiguous()
        equal = len(self.where) == gathered.numel()
        values = gathered.flatten() if equal else gathered[self.filled]
        found = gathered.new_zeros(self.kept.numel())
        return found.index_copy_(0, self.where, values).reshape(self.kept.shape)


def spread_symbols(symbols: Symbols, kept: Params, places: Mapping[str, Places]) -> Symbols:
    """Return symbols of kept entries as symbols of all."""
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


def _gathered_layout(gathered: Params, layout: MessageLayout) -> MessageLayout:
    """Return how the kept entries would travel on their own."""
    tensors = {name: _vector(rows.shape[1]) for name, rows in gathered.items()}
    return MessageLayout(tensors, layout.dtype, layout.key)


@lru_cache(maxsize=256)
def _vector(entries: int) -> TensorLayout:
    return TensorLayout((entries,), (entries,))


def _without_positions(asked: Tensor, kept: Params, layout: MessageLayout) -> Tensor:
    """Return the sent fraction of what was kept, less its positions; NaN (not asked) stays NaN."""
    if not kept or (on_host(asked) and bool(asked.isnan().all())):
        return asked
    alone = Symbols(quantisation_levels={n: v.to(torch.int32) for n, v in kept.items()}, kept=kept)
    positions = packed_bits(alone, layout, SymbolFormat(signs="within")).sum(dim=1).to(asked)
    every = NUMBER_BITS * layout.entries
    sent = NUMBER_BITS * torch.stack([v.sum(dim=1) for v in kept.values()]).sum(dim=0).clamp(min=1)
    left = (target_fraction(asked, torch.nan) * every - positions) / sent.to(asked)
    return left.clamp(_SMALLEST, 1.0)
