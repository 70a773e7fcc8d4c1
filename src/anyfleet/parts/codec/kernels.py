"""Updates as kernels: their norms, the strongest of them, and a grid of magnitudes.

Everything works on stacks [devices, …] and on every device for itself: what is kept of one, how
many quantisation levels it has and how it is rounded does not depend on the others (specification
§1.12.2).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from anyfleet import rng
from anyfleet.core.layout import MessageLayout, Symbols
from anyfleet.core.messages import Params
from anyfleet.parts.codec.ranking import in_order, largest, on_host, worth_a_look


@dataclass(frozen=True, eq=False)
class Kernels:
    """Rows [devices, entries] of an update, and the kernels that they are made of."""

    rows: Params
    layout: MessageLayout

    @property
    def devices(self) -> int:
        """The number of devices of the stack."""
        return max((len(each) for each in self.rows.values()), default=1)

    @cached_property
    def units(self) -> Mapping[str, Tensor]:
        """The kernels of every tensor, [devices, kernels, entries of a kernel]."""
        tensors = self.layout.tensors.items()
        shapes = {name: (tensor.entries // tensor.unit, tensor.unit) for name, tensor in tensors}
        return {name: each.reshape(len(each), *shapes[name]) for name, each in self.rows.items()}

    @cached_property
    def norms(self) -> Tensor:
        """The norms of all kernels, one tensor after the other, [devices, kernels]."""
        found = [_norms(units) for units in self.units.values()]
        return torch.cat(found, dim=1) if found else torch.zeros(1, 0)

    @cached_property
    def ascending(self) -> Tensor:
        """The norms of all kernels in ascending order."""
        return in_order(self.norms)

    def take(self, devices: Tensor) -> "Kernels":
        """Return those of some devices."""
        rows = {name: each.index_select(0, devices) for name, each in self.rows.items()}
        key = self.layout.key.expand(self.devices).index_select(0, devices)
        found = Kernels(rows, replace(self.layout, key=key))
        # What is known of them need not be found again.
        for known in ("norms", "ascending"):
            found.__dict__[known] = getattr(self, known).index_select(0, devices)
        return found

    def split(self, flags: Tensor) -> dict[str, Tensor]:
        """Return what is said of all kernels, by tensor."""
        sizes = [units.shape[1] for units in self.units.values()]
        return dict(zip(self.units, torch.split(flags, sizes, dim=1), strict=True))

    def quantised(self, count: Tensor, levels: Tensor) -> Symbols:
        """Return symbols of `count` [devices] kernels on a grid with `levels` [devices] steps.

        Scales are the smallest and the largest magnitude and the steps, with the first tensor.
        """
        # A row of zeros has nothing to send.
        some = self.norms.any(dim=1)
        kept = self.split(largest(self.norms, count * some, self.ascending))
        chosen = {name: _Chosen.of(units, kept[name]) for name, units in self.units.items()}
        ends = torch.stack([*self._ends(chosen), levels.to(self.norms)], dim=1)
        first, found = 0, {}
        for name, units in self.units.items():
            found[name] = self._levels(units, chosen[name], ends, first)
            first += units[0].numel()
        return Symbols(
            quantisation_levels=found, kept=kept, scales=dict.fromkeys(list(self.units)[:1], ends)
        )

    def _ends(self, chosen: Mapping[str, "_Chosen"]) -> tuple[Tensor, Tensor]:
        """Return the smallest and the largest kept magnitude above zero; 0 if there is none."""
        low = torch.full((self.devices,), torch.inf, device=self.norms.device)
        high = torch.zeros_like(low)
        for each in chosen.values():
            if each.values.numel():
                sizes = each.only_kept(each.values.abs().float())
                high = _reduced(high, each.row, sizes.amax(dim=1), "amax")
                least = torch.where(sizes == 0, torch.inf, sizes).amin(dim=1)
                low = _reduced(low, each.row, least, "amin")
        return torch.where(high == 0, 0, low), high

    def _levels(self, units: Tensor, chosen: "_Chosen", ends: Tensor, first: int) -> Tensor:
        """Return places on the grid, drawn so that the mean is exact, for kept kernels alone."""
        values, (_, count, size) = chosen.values, units.shape
        low, high, steps = ends.to(values).index_select(0, chosen.row).unsqueeze(-1).unbind(1)
        place = (values.abs() - low) / (high - low) * steps
        # NaN, also where both ends are equal: one place for all.
        place = place.nan_to_num(0.0, 0.0, 0.0).clamp(min=0)
        below = torch.minimum(place.floor(), steps - 1)
        at = first + (chosen.where - count * chosen.row)[:, None] * size + _arange(size, values)
        key = self.layout.key.expand(self.devices).to(values.device).index_select(0, chosen.row)
        draws = rng.uniforms_at(key.repeat_interleave(size), at.flatten(), values.dtype)
        drawn = below + (draws.to(values.device).view(values.shape) < place - below)
        signed = torch.where(values < 0, -1 - drawn, 1 + drawn) * (values != 0)
        signed = chosen.only_kept(signed)
        found = torch.zeros(len(units) * count, size, dtype=torch.int32, device=values.device)
        return found.index_copy_(0, chosen.where, signed.int()).view(units.flatten(1).shape)


class _Chosen(NamedTuple):
    """The kept kernels of a tensor, those of all devices one after the other.

    Off the host these are all kernels, and `kept` says which of them count: nobody waits for how
    many they are.
    """

    where: Tensor
    row: Tensor
    values: Tensor  # [kernels, entries]
    kept: Tensor | None

    @classmethod
    def of(cls, units: Tensor, kept: Tensor) -> "_Chosen":
        """Return the kernels that flags keep."""
        where = worth_a_look(kept)
        values = units.flatten(0, 1).index_select(0, where)
        flags = None if on_host(kept) else kept.flatten()[:, None]
        return cls(where, where // max(1, units.shape[1]), values, flags)

    def only_kept(self, values: Tensor) -> Tensor:
        """Return values with 0 for kernels that are not kept."""
        return values if self.kept is None else torch.where(self.kept, values, 0)


def _reduced(found: Tensor, row: Tensor, values: Tensor, how: Literal["amin", "amax"]) -> Tensor:
    """Return the smallest or largest value of every row and of what was found before."""
    if len(found) == 1:
        best = values.amin() if how == "amin" else values.amax()
        return torch.minimum(found, best) if how == "amin" else torch.maximum(found, best)
    return found.scatter_reduce(0, row, values, how)


def _norms(units: Tensor) -> Tensor:
    if units.shape[2] == 1:
        return units[..., 0].abs().float()
    norms: Tensor = torch.linalg.vector_norm(units, dim=2, dtype=torch.float64)
    return norms.float()


def _arange(size: int, like: Tensor) -> Tensor:
    return torch.arange(size, device=like.device)
