"""UVeQFed: lattices and dither that both ends know, so that errors do not depend on the update."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from anyfleet.core.layout import MessageLayout, Symbols
from anyfleet.core.message_size import NUMBER_BITS
from anyfleet.core.messages import Params
from anyfleet.core.signals import FollowsSentFraction, Signal
from anyfleet.errors import refuse
from anyfleet.papers import UVEQFED, Paper
from anyfleet.parts.codec import lattice
from anyfleet.parts.codec.bitstream import Outline, SymbolFormat
from anyfleet.parts.codec.entropy_tables import Bins
from anyfleet.parts.codec.qsgd import uniforms
from anyfleet.parts.codec.quantiser import Quantiser, as_scale, check_scales, whole
from anyfleet.parts.codec.ranking import (
    joined,
    log2,
    on_host,
    pieces,
    split,
    still_left,
    widths,
)

_FINEST, _COARSEST = -20.0, 4.0  # log2 of a step over the root mean square of what is sent
_FINE = 20.0  # bits for an entry beyond which quantisation levels exceed 32 bits
_HALVINGS = 11
_AHEAD = 3  # halvings that are tried together off the host: seven places instead of three
_SAMPLE = 1 << 12  # blocks of a row that stand for all while a step is searched
_SHOWN = 8.0  # most bits of an entry that a sample tells
_MOST = 1 << 13  # quantisation levels that are told apart while a step is searched
_CHECKS = 8
_FULL = 0.98  # of a budget: not worth another try
_SPARE = 1.002  # a step is this much longer than it seems to need


class _Blocks(NamedTuple):
    """Entries in blocks, mirrored to where the dither is positive, and that dither.

    Both ends know the dither, and signs of what is small beside a step follow it: quantisation
    levels then are 0 and 1 where they would be -1, 0 and 1.
    """

    mirrored: Tensor  # [devices, dimension, blocks]
    shift: Tensor

    def take(self, devices: Tensor) -> "_Blocks":
        """Return those of some devices."""
        if len(devices) == len(self.shift):
            return self
        return _Blocks(*(each.index_select(0, devices) for each in self))

    def repeated(self, times: int) -> "_Blocks":
        """Return those of all devices so many times."""
        return self if times == 1 else _Blocks(*(each.repeat(times, 1, 1) for each in self))

    def levels(self, step: Tensor) -> Tensor:
        """Return quantisation levels in a lattice with `step` [devices]; 0 where it is 0."""
        steps = step.to(self.mirrored.dtype)[:, None, None]
        placed = (self.mirrored / steps).add_(self.shift)
        if not on_host(step) or not bool((step > 0).all()):
            placed = torch.where(steps > 0, placed, 0.0)
        return whole(lattice.nearest(placed))


@dataclass(frozen=True)
class Uveq(Quantiser):
    """The nearest point of a lattice, for blocks of one or two entries (specification §1.15).

    The lattice is as fine as the sent fraction of an order allows, or as `bits_each` entry allow
    where an order asks for nothing. Its step is never more than 16 times the root mean square
    of the entries; for smaller sent fractions keep fewer entries: `TopK(0.15, Uveq())`. No entry
    gets more than 20 bits: errors are then less than a millionth.
    """

    bits_each: float = 2.0
    dimension: Literal[1, 2] = 2  # entries that share a point of the lattice
    papers: ClassVar[tuple[Paper, ...]] = (UVEQFED,)
    provides: ClassVar[frozenset[Signal]] = frozenset({FollowsSentFraction()})

    def __post_init__(self) -> None:
        refuse(self._faults())

    def _faults(self) -> list[str]:
        faults = []
        if not 0 < self.bits_each <= NUMBER_BITS:
            faults.append(f"Uveq.bits_each must lie in (0, {NUMBER_BITS}], got {self.bits_each}.")
        if self.dimension not in (1, 2):
            faults.append(f"Uveq.dimension must be 1 or 2, got {self.dimension}.")
        return faults

    @property
    def symbol_format(self) -> SymbolFormat:
        return SymbolFormat(signs="within")

    def quantise(self, rows: Params, sent_fraction: Tensor, layout: MessageLayout) -> Symbols:
        entries, within = sum(widths(rows)), widths(rows)
        if not entries:
            return Symbols(quantisation_levels=rows)
        every, outline = joined(rows), Outline.of(Symbols(numbers=rows), layout, self.symbol_format)
        # One lattice for all tensors: its step travels with the first.
        outline = replace(outline, stated=(1, *[0] * (len(rows) - 1)))
        size = _root_mean_square(every, within)
        asked = torch.where(sent_fraction.isnan(), self.bits_each, sent_fraction * NUMBER_BITS)
        most = asked.to(size).clamp(max=_FINE)  # bits for an entry
        blocks = self._in_blocks(every, within)
        shift, side = self._dither(blocks, within, tuple(rows), layout)
        known = _Blocks(blocks * side, shift)

        def levels(of: _Blocks, step: Tensor) -> Tensor:
            return self._entries(of.levels(step), within)

        def tried(devices: Tensor, step: Tensor) -> Tensor:
            found = levels(known.take(devices), step)
            sizes = outline.rows(slice(0, len(devices))).of_all(found).bits()
            return sizes.sum(dim=1).to(most) / entries

        coarsest = as_scale(size * 2**_COARSEST)
        step = _fitted(_guessed(known, size, most), coarsest, most, tried)
        found = split(levels(known, step), rows)
        return Symbols(quantisation_levels=found, scales={next(iter(rows)): step[:, None]})

    def dequantise(self, symbols: Symbols, layout: MessageLayout) -> Params:
        sent = symbols.quantisation_levels
        if not sent:
            return {}
        within, step = widths(sent), symbols.scale(next(iter(layout.tensors), "")).to(layout.dtype)
        levels = self._in_blocks(joined(sent), within).to(layout.dtype)
        shift, side = self._dither(levels, within, tuple(sent), layout)
        points = (lattice.points(levels) - shift) * (side * step[:, :, None])
        return split(self._entries(points, within), sent)

    def unpack(self, columns: Sequence[bytes], layout: MessageLayout) -> Symbols:
        symbols = super().unpack(columns, layout)
        check_scales(symbols, {next(iter(layout.tensors), ""): min(1, layout.entries)})
        return symbols

    def _full(self, within: tuple[int, ...]) -> tuple[int, ...]:
        """Return the sizes of tensors whose last blocks are filled."""
        return tuple(size + -size % self.dimension for size in within)

    def _in_blocks(self, rows: Tensor, within: tuple[int, ...]) -> Tensor:
        """Return tensors side by side as blocks, the last of each filled with zeros."""
        full = self._full(within)
        if full != within:
            parts = zip(pieces(rows, within), full, strict=True)
            rows = torch.cat([pad(part, (0, size - part.shape[1])) for part, size in parts], dim=1)
        return lattice.blocks(rows, self.dimension)

    def _entries(self, blocks: Tensor, within: tuple[int, ...]) -> Tensor:
        """Return blocks as tensors side by side: the inverse of `_in_blocks`."""
        full = self._full(within)
        rows = lattice.entries(blocks, sum(full))
        if full == within:
            return rows
        parts = zip(pieces(rows, full), within, strict=True)
        return torch.cat([part[:, :size] for part, size in parts], dim=1)

    def _dither(
        self, blocks: Tensor, within: tuple[int, ...], names: tuple[str, ...], layout: MessageLayout
    ) -> lattice.Dither:
        like = blocks.flatten(1)
        u = uniforms(like, self._full(within), names, layout)
        return lattice.dither(lattice.blocks(u, self.dimension))


def _guessed(blocks: _Blocks, size: Tensor, most: Tensor) -> Tensor:
    """Return the step with about `most` bits for an entry, by bisection on a sample of blocks."""
    every = -(-blocks.shift.shape[2] // _SAMPLE)
    some = _Blocks(*(each[:, :, ::every].contiguous() for each in blocks))
    low, high = torch.full_like(most, _FINEST), torch.full_like(most, _COARSEST)
    # A sample cannot show more than this. Finer lattices take a bit more for every halving.
    shown = most.clamp(max=_SHOWN)
    ahead = 1 if on_host(most) else _AHEAD
    for begin in range(0, _HALVINGS, ahead):
        # All places that so many halvings may come to are tried together, as if they were devices.
        halvings = min(ahead, _HALVINGS - begin)
        apart, places = (high - low) / (1 << halvings), range(1, 1 << halvings)
        tried = torch.stack([low + place * apart for place in places])
        steps = as_scale(size * tried.exp2()).flatten()
        levels = some.repeated(len(places)).levels(steps).flatten(1)
        fits = _entropy(levels).view(tried.shape) <= shown
        low = low + _bisected(fits, halvings) * apart
        high = low + apart
    return as_scale(size * (high - (most - shown)).exp2())


def _bisected(fits: Tensor, halvings: int) -> Tensor:
    """Return before which place so many halvings end, [devices], from 0 on.

    `fits` says of every place between the ends, [places, devices], whether they go on below it.
    """
    found = torch.zeros_like(fits[0], dtype=torch.int64)
    for left in reversed(range(halvings)):
        middle = found + (1 << left)
        found = torch.where(fits.gather(0, middle[None] - 1)[0], found, middle)
    return found


def _fitted(
    step: Tensor, coarsest: Tensor, most: Tensor, size: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Return steps of at most `most` bits for an entry, from steps that are about right.

    Where none fit, they are the coarsest. `size` gives the bits for an entry of some devices at
    some steps. Devices leave the search when they are settled; who is left is all that is waited
    for, off the host after every second check.
    """
    search = torch.stack([step, coarsest, torch.zeros_like(step), coarsest])
    row, found = torch.arange(len(step), device=step.device), coarsest
    unsettled = torch.ones_like(row, dtype=torch.bool)
    for attempt in range(1, _CHECKS + 1):
        step, fits, over, coarse = search.unbind(0)
        bits, wanted = size(row, step), most.index_select(0, row)
        good = bits <= wanted
        fits = torch.where(good, fits.minimum(step), fits)
        over = torch.where(good, over, over.maximum(step))
        # What is settled stays, whoever else is in the stack.
        found = found.index_copy(0, row, torch.where(unsettled, fits, found.index_select(0, row)))
        unsettled = unsettled & ~((good & (bits >= _FULL * wanted)) | (over >= coarse))
        # Fine lattices lose a bit by every doubling, coarse ones half of their bits.
        longer, ratio = (bits - wanted).exp2(), bits / wanted
        # Some are flatter still, so strides grow until there is a step on either side.
        stride = torch.where(good, longer.minimum(ratio), longer.maximum(ratio)) * _SPARE
        guess = step * stride**attempt
        within = (guess > over) & (guess < fits)
        other = torch.where(within, guess, (over.clamp(min=1e-45) * fits).sqrt())
        search = torch.stack([as_scale(other), fits, over, coarse])
        if attempt < _CHECKS and (on_host(unsettled) or attempt % 2 == 0):
            left = still_left(unsettled)
            if not len(left):
                break
            if len(left) < len(row):
                search, row, unsettled = search.index_select(1, left), row[left], unsettled[left]
    return found


def _root_mean_square(rows: Tensor, within: tuple[int, ...]) -> Tensor:
    squares = [each.sum(dim=1) for each in pieces(rows.double().square(), within)]
    return (torch.stack(squares).sum(dim=0) / rows.shape[1]).sqrt()


def _entropy(levels: Tensor) -> Tensor:
    """Return the bits for a level of every row, as if the levels were independent."""
    # The few levels beyond a bound count as one.
    above = (levels - levels.amin(dim=1, keepdim=True)).clamp(max=_MOST)
    size = 1 + (int(above.amax()) if on_host(above) else _MOST)
    row = torch.arange(len(levels), device=levels.device)[:, None] * size
    bins = Bins.of(above + row, (len(levels), 1, 1, size))
    share = bins.often / levels.shape[1]
    return -torch.as_tensor(bins.by_column(share * log2(share.clip(min=1e-300))))[:, 0]
