"""UVeQFed: lattices and dither that both ends know, so that errors do not depend on the update."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from anyfleet import rng
from anyfleet.core.layout import MessageLayout, Symbols
from anyfleet.core.message_size import NUMBER_BITS
from anyfleet.core.messages import Params
from anyfleet.core.signals import FollowsSentFraction, Signal
from anyfleet.errors import refuse
from anyfleet.papers import UVEQFED, Paper
from anyfleet.parts.codec import lattice
from anyfleet.parts.codec.bitstream import SymbolFormat
from anyfleet.parts.codec.quantiser import Quantiser, as_scale, check_scales, whole
from anyfleet.parts.codec.ranking import group_sums, on_host, tally, where_set

_FINEST, _COARSEST = -20.0, 4.0  # log2 of a step over the root mean square of what is sent
_FINE = 20.0  # bits for an entry beyond which quantisation levels exceed 32 bits
_HALVINGS = 11
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
        entries = sum(each.shape[1] for each in rows.values())
        if not entries:
            return Symbols(quantisation_levels=rows)
        size = _root_mean_square(rows, entries)
        asked = torch.where(sent_fraction.isnan(), self.bits_each, sent_fraction * NUMBER_BITS)
        most = asked.to(size).clamp(max=_FINE)  # bits for an entry
        blocks = {name: self._blocks(each, name, layout) for name, each in rows.items()}

        def tried(devices: Tensor, step: Tensor) -> Tensor:
            some = {name: each.take(devices) for name, each in blocks.items()}
            symbols = _symbols(rows, some, step)
            return self.bits(symbols, layout).sum(dim=1).to(most) / entries

        coarsest = as_scale(size * 2**_COARSEST)
        step = _fitted(_guessed(blocks, size, most), coarsest, most, tried)
        return _symbols(rows, blocks, step)

    def dequantise(self, symbols: Symbols, layout: MessageLayout) -> Params:
        step = symbols.scale(next(iter(layout.tensors), "")).to(layout.dtype)
        found = {}
        for name, rows in symbols.quantisation_levels.items():
            levels = lattice.blocks(rows, self.dimension).to(layout.dtype)
            shift, side = self._dither(name, levels, layout)
            points = (lattice.points(levels) - shift) * (side * step[:, :, None])
            found[name] = lattice.entries(points, rows.shape[1])
        return found

    def unpack(self, columns: Sequence[bytes], layout: MessageLayout) -> Symbols:
        symbols = super().unpack(columns, layout)
        check_scales(symbols, {next(iter(layout.tensors), ""): min(1, layout.entries)})
        return symbols

    def _blocks(self, rows: Tensor, name: str, layout: MessageLayout) -> _Blocks:
        blocks = lattice.blocks(rows, self.dimension)
        shift, side = self._dither(name, blocks, layout)
        return _Blocks(blocks * side, shift)

    def _dither(self, name: str, blocks: Tensor, layout: MessageLayout) -> lattice.Dither:
        key = rng.fold(layout.key, name)
        u = rng.uniforms(key, blocks.shape[2] * self.dimension, blocks.dtype).to(blocks.device)
        return lattice.dither(lattice.blocks(u, self.dimension))


def _symbols(rows: Params, blocks: Mapping[str, _Blocks], step: Tensor) -> Symbols:
    levels = {
        name: lattice.entries(blocks[name].levels(step), each.shape[1])
        for name, each in rows.items()
    }
    # One lattice for all tensors: its step travels with the first.
    return Symbols(quantisation_levels=levels, scales={next(iter(rows)): step[:, None]})


def _guessed(blocks: Mapping[str, _Blocks], size: Tensor, most: Tensor) -> Tensor:
    """Return the step with about `most` bits for an entry, by bisection on a sample of blocks."""
    mirrored, shift = (torch.cat(parts, dim=2) for parts in zip(*blocks.values(), strict=True))
    apart = -(-mirrored.shape[2] // _SAMPLE)
    some = _Blocks(mirrored[:, :, ::apart].contiguous(), shift[:, :, ::apart].contiguous())
    low, high = torch.full_like(most, _FINEST), torch.full_like(most, _COARSEST)
    # A sample cannot show more than this. Finer lattices take a bit more for every halving.
    shown = most.clamp(max=_SHOWN)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        fits = _entropy(some.levels(as_scale(size * middle.exp2())).flatten(1)) <= shown
        low, high = torch.where(fits, low, middle), torch.where(fits, middle, high)
    return as_scale(size * (high - (most - shown)).exp2())


def _fitted(
    step: Tensor, coarsest: Tensor, most: Tensor, size: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Return steps of at most `most` bits for an entry, from steps that are about right.

    Where none fit, they are the coarsest. `size` gives the bits for an entry of some devices at
    some steps. Devices leave the search when they are done; who is left is read once a try.
    """
    search = torch.stack([step, coarsest, torch.zeros_like(step), coarsest])
    row, found = torch.arange(len(step), device=step.device), coarsest
    for attempt in range(1, _CHECKS + 1):
        step, fits, over, coarse = search.unbind(0)
        bits, wanted = size(row, step), most.index_select(0, row)
        good = bits <= wanted
        fits = torch.where(good, fits.minimum(step), fits)
        over = torch.where(good, over, over.maximum(step))
        found = found.index_copy(0, row, fits)
        # What is settled stays, whoever else is in the stack.
        left = where_set(~((good & (bits >= _FULL * wanted)) | (over >= coarse)))
        if not len(left):
            break
        # Fine lattices lose a bit by every doubling, coarse ones half of their bits.
        longer, ratio = (bits - wanted).exp2(), bits / wanted
        # Some are flatter still, so strides grow until there is a step on either side.
        stride = torch.where(good, longer.minimum(ratio), longer.maximum(ratio)) * _SPARE
        guess = step * stride**attempt
        within = (guess > over) & (guess < fits)
        other = torch.where(within, guess, (over.clamp(min=1e-45) * fits).sqrt())
        search = torch.stack([as_scale(other), fits, over, coarse]).index_select(1, left)
        row = row.index_select(0, left)
    return found


def _root_mean_square(rows: Params, entries: int) -> Tensor:
    squares = [each.double().square().sum(dim=1) for each in rows.values()]
    return (torch.stack(squares).sum(dim=0) / entries).sqrt()


def _entropy(levels: Tensor) -> Tensor:
    """Return the bits for a level of every row, as if the levels were independent."""
    # The few levels beyond a bound count as one.
    above = (levels - levels.amin(dim=1, keepdim=True)).clamp(max=_MOST)
    size = 1 + (int(above.amax()) if on_host(above) else _MOST)
    row = torch.arange(len(levels), device=levels.device)[:, None] * size
    place, counts = tally((above + row).flatten(), len(levels) * size)
    share = counts.double() / levels.shape[1]
    return -group_sums(share * share.clamp(min=1e-300).log2(), place // size, len(levels))
