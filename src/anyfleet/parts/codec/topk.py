"""The largest entries alone, sent in the way of another codec."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from anyfleet.core.layout import MessageLayout, Symbols, TensorLayout
from anyfleet.core.message_size import NUMBER_BITS
from anyfleet.core.messages import Params
from anyfleet.core.signals import FollowsSentFraction, Signal
from anyfleet.formulas.sub_models import kept_channels
from anyfleet.parts.codec.bitstream import SymbolFormat, packed_bits
from anyfleet.parts.codec.quantiser import Quantiser, target_fraction
from anyfleet.parts.codec.ranking import (
    Chosen,
    counted_parts,
    joined,
    largest_parts,
    numbered,
    on_host,
    parts,
    pieces,
    split,
    widths,
)

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
        if not rows:
            return self.then.quantise(rows, sent_fraction, layout)
        every, within = joined(rows), widths(rows)
        kept = top(every, within, self.keep)
        places = Places.of(kept, within, kept_entries(self.keep, within))
        gathered = places.split(every, rows)
        left = sent_fraction
        if FollowsSentFraction() in self.then.provides:
            left = _without_positions(left, split(kept, rows), sum(places.slots), layout)
        inner = self.then.quantise(gathered, left, _gathered_layout(gathered, layout))
        return _spread_symbols(inner, kept, rows, places)

    def dequantise(self, symbols: Symbols, layout: MessageLayout) -> Params:
        sent = {**symbols.numbers, **symbols.quantisation_levels}
        if not symbols.kept:
            return self.then.dequantise(symbols, _gathered_layout(sent, layout))
        within = widths(sent)
        kept = joined(
            {
                name: symbols.kept.get(name, torch.ones_like(v, dtype=torch.bool))
                for name, v in sent.items()
            }
        )
        places = Places.of(kept, within, kept_entries(self.keep, within))
        gathered = Symbols(
            numbers=_gathered(symbols.numbers, places),
            quantisation_levels=_gathered(symbols.quantisation_levels, places),
            scales=symbols.scales,
        )
        every = {**gathered.numbers, **gathered.quantisation_levels}
        found = self.then.dequantise(gathered, _gathered_layout(every, layout))
        return split(places.spread(joined(found)), sent)


def check_keep(part: str, keep: float) -> None:
    """Raise ValueError unless 0 < keep ≤ 1."""
    if not 0 < keep <= 1:
        raise ValueError(
            f"{part}.keep is the share of entries that is sent, in (0, 1]; got {keep}."
        )


def top(rows: Tensor, within: tuple[int, ...], keep: float) -> Tensor:
    """Return flags of the largest magnitudes of each part of rows [devices, entries]."""
    return largest_parts(rows.abs(), within, kept_entries(keep, within))


@lru_cache(maxsize=256)
def kept_entries(keep: float, within: tuple[int, ...]) -> tuple[int, ...]:
    """Return how many entries of parts of these sizes a share of each is."""
    return tuple(min(size, kept_channels(keep, size)) for size in within)


@dataclass(frozen=True, eq=False)
class Places:
    """The places of the kept entries of a stack of rows, all tensors side by side."""

    shape: tuple[int, int]  # of the rows
    slots: tuple[int, ...]  # room for kept entries of each tensor
    where: Tensor  # on the host of all rows, one after the other; elsewhere [devices, slots]
    filled: Tensor | None  # flags of what is there when kept entries lie side by side; None: all

    @staticmethod
    def of(kept: Tensor, within: tuple[int, ...], most: tuple[int, ...]) -> "Places":
        """Return the places of set flags [devices, entries] of tensors of these sizes.

        Off the host there is room for so many of a tensor (`most`), as nobody waits for a count.
        """
        shape, chosen = (len(kept), kept.shape[1]), Chosen.of(kept)
        if chosen.where is not None:
            counts = counted_parts(chosen, within)[0]
            slots = tuple(counts.amax(dim=0).tolist()) if len(kept) else most
            every = bool((counts == torch.tensor(slots)).all())
            return Places(shape, slots, chosen.where, None if every else _filled(counts, slots))
        number, counts = numbered(kept, within, most)
        width = sum(most)
        # What is not kept goes behind the others.
        where = number.new_zeros(len(kept), width + 1, dtype=torch.int64)
        place = torch.arange(kept.shape[1], device=kept.device).expand_as(number)
        where = where.scatter_(1, torch.where(kept, number, width).long(), place)[:, :width]
        return Places(shape, most, where, _filled(counts, most))

    def gathered(self, rows: Tensor) -> Tensor:
        """Return the kept entries side by side; zeros follow those of a row that has fewer."""
        if not on_host(rows):
            found = rows.gather(1, self.where)
            return found if self.filled is None else torch.where(self.filled, found, 0)
        values = rows.reshape(-1).index_select(0, self.where)
        if self.filled is None:
            return values.view(len(rows), sum(self.slots))
        return values.new_zeros(self.filled.shape).masked_scatter(self.filled, values)

    def split(self, rows: Tensor, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the kept entries of every tensor side by side."""
        return dict(zip(names, pieces(self.gathered(rows), self.slots), strict=True))

    def spread(self, gathered: Tensor) -> Tensor:
        """Return entries at their places again, with zeros where nothing was kept."""
        devices, entries = self.shape
        if not on_host(gathered):
            found = gathered.new_zeros(devices, entries + 1)
            where = self.where
            if self.filled is not None:
                where = torch.where(self.filled, where, entries)
            return found.scatter_(1, where, gathered)[:, :-1]
        values = gathered.flatten() if self.filled is None else gathered[self.filled]
        found = gathered.new_zeros(devices * entries)
        return found.index_copy_(0, self.where, values).view(self.shape)


def _filled(counts: Tensor, slots: tuple[int, ...]) -> Tensor:
    """Return which slots are filled when so many entries [devices, tensors] of tensors are kept."""
    room = parts(slots, counts.device)
    first = torch.arange(sum(slots), device=counts.device) - room.begins.index_select(
        0, room.number
    )
    return first < counts.index_select(1, room.number)


def _spread_symbols(symbols: Symbols, kept: Tensor, rows: Params, places: Places) -> Symbols:
    """Return symbols of kept entries of rows as symbols of all."""

    def everywhere(tree: Params) -> dict[str, Tensor]:
        return split(places.spread(joined(tree)), rows) if tree else {}

    # A codec that leaves out some of what was kept has the last word.
    fewer = {
        name: symbols.kept[name] if name in symbols.kept else kept.new_ones(len(kept), slots)
        for name, slots in zip(rows, places.slots, strict=True)
    }
    return Symbols(
        numbers=everywhere(symbols.numbers),
        quantisation_levels=everywhere(symbols.quantisation_levels),
        kept=everywhere(fewer) if symbols.kept else split(kept, rows),
        scales=symbols.scales,
    )


def _gathered(tree: Params, places: Places) -> dict[str, Tensor]:
    return places.split(joined(tree), tree) if tree else {}


def _gathered_layout(gathered: Params, layout: MessageLayout) -> MessageLayout:
    """Return how the kept entries would travel on their own."""
    tensors = {name: _vector(rows.shape[1]) for name, rows in gathered.items()}
    return MessageLayout(tensors, layout.dtype, layout.key)


@lru_cache(maxsize=256)
def _vector(entries: int) -> TensorLayout:
    return TensorLayout((entries,), (entries,))


def _without_positions(asked: Tensor, kept: Params, sent: int, layout: MessageLayout) -> Tensor:
    """Return the sent fraction of `sent` kept entries, less their positions.

    NaN (not asked) stays NaN.
    """
    if on_host(asked) and bool(asked.isnan().all()):
        return asked
    levels = split(joined(kept).to(torch.int32), kept)
    alone = Symbols(quantisation_levels=levels, kept=kept)
    positions = packed_bits(alone, layout, SymbolFormat(signs="within", most_level=1)).sum(dim=1)
    every = NUMBER_BITS * layout.entries
    left = target_fraction(asked, torch.nan) * every - positions.to(asked)
    return (left / (NUMBER_BITS * max(1, sent))).clamp(_SMALLEST, 1.0)
