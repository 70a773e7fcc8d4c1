"""UVeQFed: lattices and dither that both ends know, so that errors do not depend on the update."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from anyfleet import rng
from anyfleet.core.layout import MessageLayout, Symbols
from anyfleet.core.messages import Params
from anyfleet.errors import refuse
from anyfleet.papers import UVEQFED, Paper
from anyfleet.parts.codec import lattice
from anyfleet.parts.codec.levelled import Levelled
from anyfleet.parts.codec.scales import as_scale, check_scales, scales_of, whole
from anyfleet.parts.codec.stream import Layout
from anyfleet.parts.codec.topk import NUMBER_BITS

_FINEST, _COARSEST = -20.0, 4.0  # log2 of a step over the root mean square of what is sent
_FINE = 20.0  # bits for an entry beyond which levels are too large for whole numbers of 32 bits
_HALVINGS = 11
_SAMPLE = 1 << 12  # blocks of a row that stand for all while searching
_SHOWN = 8.0  # most bits of an entry that a sample tells
_MOST = 1 << 13  # levels that are told apart while searching
_CHECKS = 8
_FULL = 0.98  # of a budget: not worth another try
_SPARE = 1.002  # a step is this much longer than it seems to need


class _Blocks(NamedTuple):
    """Entries in blocks, mirrored to where the dither is positive, and that dither.

    Both ends know the dither, and signs of what is small beside a step follow it: levels then are 0
    and 1 where they would be -1, 0 and 1.
    """

    turned: Tensor  # [rows, dimension, blocks]
    shift: Tensor

    def levels(self, step: Tensor) -> Tensor:
        """In a lattice of such a step; 0 where it is 0."""
        wide = step.to(self.turned.dtype)[:, None, None]
        placed = (self.turned / wide).add_(self.shift)
        if not bool((step > 0).all()):
            placed = torch.where(wide > 0, placed, 0.0)
        return whole(lattice.nearest(placed))


class _Tried(NamedTuple):
    """Symbols of all rows with some steps, and how many bits each of their entries takes."""

    symbols: Symbols
    bits: Tensor


@dataclass(frozen=True)
class Uveq(Levelled):
    """The nearest point of a lattice, for blocks of one or two entries (specification §1.15).

    The lattice is as fine as an order's target rate allows, or with `bits_each` for every entry
    where an order has none (a rate of 1). Its step is never more than 16 times the root mean square
    of the entries; for lower rates than that leaves, keep fewer: `TopK(0.15, Uveq())`. Nobody gets
    more than 20 bits for an entry: errors are then less than a millionth.
    """

    bits_each: float = 2.0
    dimension: Literal[1, 2] = 2
    papers: ClassVar[tuple[Paper, ...]] = (UVEQFED,)

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
    def follows_sent_fraction(self) -> bool:
        return True

    @property
    def layout(self) -> Layout:
        return Layout(signs="within")

    def quantise(self, laid: Params, rate: Tensor, envelope: MessageLayout) -> Symbols:
        entries = sum(rows.shape[1] for rows in laid.values())
        if not entries:
            return Symbols(
                quantisation_levels={n: rows.to(torch.int32) for n, rows in laid.items()}
            )
        size = _root_mean_square(laid, entries)
        asked = torch.where(rate.isnan(), self.bits_each, rate * NUMBER_BITS).to(size)
        each = asked.clamp(max=_FINE)
        blocks = {name: self._blocks(rows, name, envelope) for name, rows in laid.items()}

        def tried(step: Tensor) -> _Tried:
            symbols = _symbols(laid, blocks, step)
            return _Tried(symbols, self.bits(symbols, envelope).sum(dim=1).to(each) / entries)

        return _fitted(_guessed(blocks, size, each), as_scale(size * 2**_COARSEST), each, tried)

    def values(self, symbols: Symbols, envelope: MessageLayout) -> Params:
        step = scales_of(symbols, next(iter(envelope.tensors), ""), 1, envelope.dtype)
        found = {}
        for name, rows in symbols.quantisation_levels.items():
            levels = lattice.blocks(rows, self.dimension).to(envelope.dtype)
            shift, side = self._dither(name, levels, envelope)
            points = (lattice.points(levels) - shift) * (side * step[:, :, None])
            found[name] = lattice.entries(points, rows.shape[1])
        return found

    def unpack(self, columns: Sequence[bytes], layout: MessageLayout) -> Symbols:
        symbols = super().unpack(columns, layout)
        entries = sum(lane.entries for lane in layout.tensors.values())
        check_scales(symbols, {next(iter(layout.tensors), ""): min(1, entries)})
        return symbols

    def _blocks(self, rows: Tensor, name: str, envelope: MessageLayout) -> _Blocks:
        blocks = lattice.blocks(rows, self.dimension)
        shift, side = self._dither(name, blocks, envelope)
        return _Blocks(blocks * side, shift)

    def _dither(self, name: str, blocks: Tensor, envelope: MessageLayout) -> lattice.Dither:
        many = blocks.shape[2]
        key = rng.fold(envelope.key, name)
        u = rng.uniforms(key, many * self.dimension, blocks.dtype).to(blocks.device)
        return lattice.dither(lattice.blocks(u, self.dimension))


def _symbols(laid: Params, blocks: Mapping[str, _Blocks], step: Tensor) -> Symbols:
    levels = {
        name: lattice.entries(blocks[name].levels(step), rows.shape[1])
        for name, rows in laid.items()
    }
    # One lattice for all tensors: it travels with the first.
    return Symbols(quantisation_levels=levels, scales={next(iter(laid)): step[:, None]})


def _guessed(blocks: Mapping[str, _Blocks], size: Tensor, each: Tensor) -> Tensor:
    """The step with about so many bits per entry, by bisection on a sample of blocks."""
    turned, shift = (torch.cat(parts, dim=2) for parts in zip(*blocks.values(), strict=True))
    apart = -(-turned.shape[2] // _SAMPLE)
    some = _Blocks(turned[:, :, ::apart].contiguous(), shift[:, :, ::apart].contiguous())
    low, high = torch.full_like(each, _FINEST), torch.full_like(each, _COARSEST)
    # A sample cannot show more than this. Finer lattices take a bit more for every halving.
    shown = each.clamp(max=_SHOWN)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        fits = _entropy(some.levels(as_scale(size * middle.exp2())).flatten(1)) <= shown
        low, high = torch.where(fits, low, middle), torch.where(fits, middle, high)
    return as_scale(size * (high - (each - shown)).exp2())


def _fitted(step: Tensor, most: Tensor, each: Tensor, tried: Callable[[Tensor], _Tried]) -> Symbols:
    """Symbols that fit, from a step that is about right; with step `most` where none do."""
    fits, over = most, torch.zeros_like(step)
    for attempt in range(1, _CHECKS + 1):
        symbols, bits = tried(step)
        good = bits <= each
        fits = torch.where(good, fits.minimum(step), fits)
        over = torch.where(good, over, over.maximum(step))
        # What is settled stays, whoever else is in the stack.
        done = (good & (bits >= _FULL * each)) | (over >= most)
        if bool(done.all()):
            break
        # Fine lattices lose a bit by every doubling, coarse ones half of their bits.
        longer, ratio = (bits - each).exp2(), bits / each
        # Some are flatter still, so strides grow until there is a step on either side.
        stride = torch.where(good, longer.minimum(ratio), longer.maximum(ratio)) * _SPARE
        guess = step * stride**attempt
        within = (guess > over) & (guess < fits)
        other = torch.where(within, guess, (over.clamp(min=1e-45) * fits).sqrt())
        step = torch.where(done, step, as_scale(other))
    return symbols if torch.equal(step, fits) else tried(fits).symbols


def _root_mean_square(laid: Params, entries: int) -> Tensor:
    squares = [rows.double().square().sum(dim=1) for rows in laid.values()]
    return (torch.stack(squares).sum(dim=0) / entries).sqrt()


def _entropy(levels: Tensor) -> Tensor:
    """Bits per level of every row, if the levels were independent."""
    # Every row for itself; the few beyond a bound are as one.
    above = (levels - levels.amin(dim=1, keepdim=True)).clamp(max=_MOST)
    size = int(above.amax()) + 1
    row = torch.arange(len(levels), device=levels.device)[:, None] * size
    counts = torch.bincount((above + row).flatten(), minlength=len(levels) * size)
    share = counts.reshape(len(levels), size).double() / levels.shape[1]
    return -(share * share.clamp(min=1e-300).log2()).sum(dim=1)
