"""What an aggregator gets: facts about the devices, and reductions over their updates.

A stack or a cluster can do these reductions without handing out single updates.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from anyfleet.columns import Floats, Ints
from anyfleet.elastic import Blueprint, Slice, place
from anyfleet.types import Params, Report, Updates


def base(name: str) -> str:
    """The name in the blueprint of a tensor that the server keeps per width."""
    return name.partition("@")[0]


class Arrivals:
    """Updates of one server step, in the order in which they were issued.

    In canonical order, because float sums must not depend on who arrived first. Trees hold changes
    of the server's current model; `slices` say where they belong.
    """

    def __init__(
        self,
        updates: Updates,
        *,
        slices: Sequence[Slice],
        staleness: Ints,
        changes: Sequence[Params],
        blueprint: Blueprint,
    ) -> None:
        self.device = updates.device
        self.samples: Floats = updates.samples.astype(np.float64)
        self.bits = updates.bits
        self.report: tuple[Report, ...] = updates.report
        self.staleness = staleness
        self.slices = tuple(slices)
        self._changes = tuple(changes)
        self._masks = updates.masks
        self._blueprint = blueprint
        tensors = (value for change in changes for value in change.values())
        self._device = next((value.device for value in tensors), torch.device("cpu"))

    def __len__(self) -> int:
        return len(self.device)

    def mean(self, weights: Floats) -> dict[str, Tensor]:
        """Per coordinate, the weighted mean change of those who trained it; zero where nobody did.

        `overlap_mean` of METHODS §0.2, written as a change.
        """
        total, mass = self._sums(weights)
        return {name: torch.where(mass[name] > 0, total[name] / mass[name], 0.0) for name in total}

    def covered(self) -> dict[str, Tensor]:
        """Which coordinates somebody trained."""
        _, mass = self._sums(np.ones(len(self)))
        return {name: value > 0 for name, value in mass.items()}

    def norms(self) -> Floats:
        """The length of every update."""
        return np.sqrt(np.diagonal(self.gram()))

    def gram(self) -> Floats:
        """Inner products of all pairs of updates, over the coordinates both trained."""
        count = len(self)
        products = np.zeros((count, count))
        for name in self._names():
            flat = torch.stack([self._full(row, name).double().flatten() for row in range(count)])
            products += (flat @ flat.T).cpu().numpy()
        return products

    def dots(self, tree: Params) -> Floats:
        """The inner product of every update with a tree in global coordinates."""
        found = np.zeros(len(self))
        for row, change in enumerate(self._changes):
            for name in change:
                if name in tree:
                    pair = self._full(row, name).double() * tree[name].double()
                    found[row] += float(pair.sum())
        return found

    def _names(self) -> list[str]:
        return list(dict.fromkeys(name for change in self._changes for name in change))

    def _full(self, row: int, name: str) -> Tensor:
        """One update in global coordinates, zero outside its slice."""
        shape = self._blueprint.shape(base(name))
        change = self._changes[row].get(name)
        if change is None:
            return torch.zeros(shape, device=self._device)
        mask = self._mask(row, name)
        full = change.new_zeros(shape)
        full[self._place(row, name)] = change if mask is None else change * mask
        return full

    def _mask(self, row: int, name: str) -> Tensor | None:
        mask = self._masks[row].get(base(name))
        return None if mask is None else mask.to(self._changes[row][name])

    def _place(self, row: int, name: str) -> tuple[slice | Tensor, ...]:
        device = str(self._changes[row][name].device)
        return place(base(name), self.slices[row], self._blueprint, device)

    def _sums(self, weights: Floats) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        total: dict[str, Tensor] = {}
        mass: dict[str, Tensor] = {}
        # Normalised first: equal weights then give the same bits whatever their common value.
        shares = weights / weights.sum() if weights.sum() > 0 else weights
        for row, change in enumerate(self._changes):
            share = float(shares[row])
            if not share:
                continue  # what does not count may be anything, even not a number
            for name, value in change.items():
                if name not in total:
                    shape = self._blueprint.shape(base(name))
                    total[name] = value.new_zeros(shape)
                    mass[name] = value.new_zeros(shape)
                mask = self._mask(row, name)
                where = self._place(row, name)
                # In place, on arrays made here: copying costs four times as much.
                total[name][where] += share * value if mask is None else share * (mask * value)
                mass[name][where] += share if mask is None else share * mask
        return total, mass
