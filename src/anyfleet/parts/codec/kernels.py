"""Updates as kernels: their norms, the strongest of them, and a grid of magnitudes.

Everything works on stacks [devices, …] and on every device for itself: what is kept of one, how
many quantisation levels it has and how it is rounded does not depend on the others (specification
§1.12.2).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal

import torch
from torch import Tensor

from anyfleet import rng
from anyfleet.core.layout import MessageLayout, Symbols, TensorLayout
from anyfleet.core.messages import Params
from anyfleet.parts.codec.ranking import Chosen, in_order, joined, largest, split


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

    @cached_property
    def entries(self) -> Tensor:
        """The rows of all tensors side by side, [devices, entries]."""
        return joined(self.rows) if self.rows else torch.zeros(1, 0)

    @cached_property
    def draws(self) -> Tensor:
        """A number in [0, 1) for every entry, on an accelerator: drawn once for several tries."""
        return rng.uniforms(self.layout.key, self.entries.shape[1], self.entries.dtype)

    def take(self, devices: Tensor) -> "Kernels":
        """Return those of some devices."""
        every = self.entries.index_select(0, devices)
        key = self.layout.key.expand(self.devices).index_select(0, devices)
        found = Kernels(split(every, self.rows), replace(self.layout, key=key))
        # What is known of them need not be found again.
        for known in {"norms", "ascending", "draws"} & self.__dict__.keys():
            found.__dict__[known] = getattr(self, known).index_select(0, devices)
        found.__dict__["entries"] = every
        return found

    def split(self, flags: Tensor) -> dict[str, Tensor]:
        """Return what is said of all kernels, by tensor."""
        sizes = [units.shape[1] for units in self.units.values()]
        return dict(zip(self.units, torch.split(flags, sizes, dim=1), strict=True))

    def of_entries(self, values: Tensor) -> Tensor:
        """Return for every entry what is said of its kernel."""
        owner = _owner(tuple(self.layout.tensors[name] for name in self.rows), values.device)
        return values if owner is None else values.index_select(1, owner)

    def quantised(self, count: Tensor, levels: Tensor) -> Symbols:
        """Return symbols of `count` [devices] kernels on a grid with `levels` [devices] steps.

        Scales are the smallest and the largest magnitude and the steps, with the first tensor.
        """
        # A row of zeros has nothing to send.
        some = self.ascending[:, -1:].any(dim=1)
        kept = largest(self.norms, count * some, self.ascending)
        chosen = Chosen.of(self.of_entries(kept))
        values = chosen.values(self.entries)
        ends = torch.stack([*self._ends(chosen, values), levels.to(self.norms)], dim=1)
        return Symbols(
            quantisation_levels=split(
                chosen.everywhere(self._levels(chosen, values, ends)), self.rows
            ),
            kept=self.split(kept),
            scales=dict.fromkeys(list(self.rows)[:1], ends),
        )

    def _ends(self, chosen: Chosen, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the smallest and the largest kept magnitude above zero; 0 if there is none."""
        sizes = values.abs().float()
        high = _reduced(chosen, sizes, "amax", 0.0)
        low = _reduced(chosen, torch.where(sizes == 0, torch.inf, sizes), "amin", torch.inf)
        return torch.where(high == 0, 0, low), high

    def _levels(self, chosen: Chosen, values: Tensor, ends: Tensor) -> Tensor:
        """Return places on the grid, drawn so that the mean is exact."""
        low, high, steps = (chosen.of_row(each) for each in ends.to(values).unbind(1))
        place = (values.abs() - low) / (high - low) * steps
        # NaN, also where both ends are equal: one place for all.
        place = place.nan_to_num(0.0, 0.0, 0.0).clamp(min=0)
        below = torch.minimum(place.floor(), steps - 1)
        drawn = below + (self._draws(chosen) < place - below)
        return (torch.where(values < 0, -1 - drawn, 1 + drawn) * (values != 0)).int()

    def _draws(self, chosen: Chosen) -> Tensor:
        """Return what decides how entries are rounded: a number in [0, 1) for each."""
        key, (devices, size) = self.layout.key, self.entries.shape
        if chosen.where is None:
            return self.draws
        at = chosen.where - chosen.row * size
        return rng.uniforms_at(chosen.of_row(key.expand(devices)), at, self.entries.dtype)


def _reduced(chosen: Chosen, values: Tensor, how: Literal["amin", "amax"], empty: float) -> Tensor:
    """Return the smallest or largest chosen value of every row, or `empty`."""
    found = torch.full((len(chosen.flags),), empty, device=values.device)
    if not values.numel():
        return found
    if chosen.where is not None and len(found) > 1:
        return found.scatter_reduce(0, chosen.row, values, how)
    every = values[None] if chosen.where is not None else torch.where(chosen.flags, values, empty)
    return every.amin(dim=1) if how == "amin" else every.amax(dim=1)


@lru_cache(maxsize=64)
def _owner(tensors: tuple[TensorLayout, ...], device: torch.device) -> Tensor | None:
    """Return the kernel of every entry of a message; None: every entry is one."""
    if all(tensor.unit == 1 for tensor in tensors):
        return None
    unit = torch.tensor([tensor.unit for tensor in tensors])
    many = torch.tensor([tensor.entries for tensor in tensors]) // unit
    return torch.arange(int(many.sum())).repeat_interleave(unit.repeat_interleave(many)).to(device)


def _norms(units: Tensor) -> Tensor:
    if units.shape[2] == 1:
        return units[..., 0].abs().float()
    norms: Tensor = torch.linalg.vector_norm(units, dim=2, dtype=torch.float64)
    return norms.float()
