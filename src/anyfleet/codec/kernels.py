"""Updates as kernels: their norms, the strongest of them, and a grid of magnitudes (§1.12.2).

Everything works on stacks, one row per device, and every row for itself: what is kept of one, how
many levels it has and how it is rounded does not depend on the others.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from anyfleet import rng
from anyfleet.envelope import Envelope
from anyfleet.method import Symbols
from anyfleet.types import Params

_MAGNITUDE = 0x7FFFFFFF  # a float without its sign
_DIGITS = ((20, 11), (10, 10), (0, 10))  # its 31 bits in digits: where they begin, how many


@dataclass(frozen=True, eq=False)
class Kernels:
    """Rows of entries, and the kernels that they are made of."""

    laid: Params
    envelope: Envelope

    @property
    def rows(self) -> int:
        return max((len(rows) for rows in self.laid.values()), default=1)

    @property
    def entries(self) -> int:
        return sum(lane.entries for lane in self.envelope.lanes.values())

    @cached_property
    def units(self) -> Mapping[str, Tensor]:
        """As [rows, kernels, entries of a kernel]."""
        lanes = self.envelope.lanes.items()
        shapes = {name: (lane.entries // lane.unit, lane.unit) for name, lane in lanes}
        return {name: rows.reshape(len(rows), *shapes[name]) for name, rows in self.laid.items()}

    @cached_property
    def norms(self) -> Tensor:
        """Of all kernels of the message, one lane after the other, as [rows, kernels]."""
        found = [_norms(units) for units in self.units.values()]
        return torch.cat(found, dim=1) if found else torch.zeros(1, 0)

    def split(self, flags: Tensor) -> dict[str, Tensor]:
        """What is said of all kernels, lane by lane."""
        sizes = [units.shape[1] for units in self.units.values()]
        return dict(zip(self.units, torch.split(flags, sizes, dim=1), strict=True))

    def quantised(self, count: Tensor, levels: Tensor) -> Symbols:
        """So many kernels of every row, on a grid with so many steps.

        Scales are the smallest and the largest magnitude and the steps, with the first lane.
        """
        # A row of zeros has nothing to say.
        some = self.norms.ne(0).any(dim=1)
        kept = self.split(strongest(self.norms, torch.where(some, count, 0)))
        low, high = self._ends(kept)
        ends = torch.stack([low, high, levels.to(low)], dim=1)
        first, found = 0, {}
        for name, units in self.units.items():
            found[name] = self._levels(units, kept[name], ends, first)
            first += units[0].numel()
        scales = dict.fromkeys(list(self.units)[:1], ends)
        return Symbols(levels=found, kept=kept, scales=scales)

    def _ends(self, kept: Params) -> tuple[Tensor, Tensor]:
        """The smallest and the largest magnitude that is kept and not zero; 0 if there is none."""
        low = torch.full((self.rows,), torch.inf, device=self.norms.device)
        high = torch.zeros_like(low)
        for name, units in self.units.items():
            if units.numel():
                sizes = torch.where(kept[name][..., None], units, 0).abs().flatten(1)
                high = torch.maximum(high, sizes.amax(dim=1))
                low = torch.minimum(low, torch.where(sizes == 0, torch.inf, sizes).amin(dim=1))
        return torch.where(high == 0, 0, low).float(), high.float()

    def _levels(self, units: Tensor, kept: Tensor, ends: Tensor, first: int) -> Tensor:
        """Places on the grid, drawn so that the mean is exact; only kernels that are kept cost."""
        where = kept.flatten().nonzero()[:, 0]
        row, wide = where // max(1, kept.shape[1]), units.shape[2]
        values = units.reshape(-1, wide).index_select(0, where)
        low, high, steps = ends.to(values).index_select(0, row).unsqueeze(-1).unbind(1)
        place = (values.abs() - low) * (steps / (high - low))
        # Nothing between the ends, or a number that is none: one place for all.
        place = place.nan_to_num(0.0, 0.0, 0.0).clamp(min=0)
        below = torch.minimum(place.floor(), steps - 1)
        at = first + (where % max(1, kept.shape[1]) * wide)[:, None] + _arange(wide, where)
        key = self.envelope.key.to(where.device).expand(self.rows).index_select(0, row)
        drawn = below + (rng.uniform_at(key[:, None], at, values.dtype) < place - below)
        signed = torch.where(values < 0, -1 - drawn, 1 + drawn) * (values != 0)
        found = torch.zeros(kept.numel(), wide, dtype=torch.int32, device=where.device)
        return found.index_copy_(0, where, signed.int()).view(units.flatten(1).shape)


def strongest(norms: Tensor, count: Tensor) -> Tensor:
    """Flags of the `count` largest of every row, ties to the lower index.

    Without sorting: the smallest that is kept is looked up digit by digit, in histograms. Numbers
    that are none are the largest.
    """
    if not norms.shape[1]:
        return torch.zeros_like(norms, dtype=torch.bool)
    bits = norms.float().contiguous().view(torch.int32) & _MAGNITUDE
    count = count.to(bits.device).clamp(max=norms.shape[1])
    members, row = bits.flatten(), _arange(len(norms), bits).int().repeat_interleave(bits.shape[1])
    least, left = torch.zeros_like(count), count.clamp(min=1)
    for shift, width in _DIGITS:
        digit = (members >> shift) & ((1 << width) - 1)
        found, left = _digit(digit + (row << width), left, 1 << width)
        least |= found << shift
        inside = digit == found.int().index_select(0, row)
        members, row = members[inside], row[inside]
    equal = bits == least.int()[:, None]
    if (left < equal.sum(dim=1)).any():
        equal &= equal.cumsum(dim=1) <= left[:, None]
    return ((bits > least.int()[:, None]) | equal) & (count > 0)[:, None]


def _digit(digits: Tensor, count: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Which digit the count-th largest of every row has, and its place among these."""
    found = torch.bincount(digits, minlength=size * len(count)).view(len(count), size)
    reached = found.flip(1).cumsum(dim=1)
    place = torch.searchsorted(reached, count[:, None])
    before = reached.gather(1, place) - found.flip(1).gather(1, place)
    return size - 1 - place[:, 0], count - before[:, 0]


def _norms(units: Tensor) -> Tensor:
    if units.shape[2] == 1:
        return units[..., 0].abs().float()
    norms: Tensor = torch.linalg.vector_norm(units, dim=2, dtype=torch.float64)
    return norms.float()


def _arange(size: int, like: Tensor) -> Tensor:
    return torch.arange(size, device=like.device)
