"""A method of one's own: a new part, and a function that puts it in its slot."""

from dataclasses import dataclass, replace
from typing import Unpack

import torch
from torch import Tensor

from anyfleet import Method
from anyfleet.methods import heterofl
from anyfleet.methods.heterofl import Parts
from anyfleet.parts import Aggregate, Aggregated, Params, State, Updates, View, add_delta


@dataclass(frozen=True)
class Median(Aggregate):
    """Per coordinate, the (lower) median of those who trained it: a few wild devices do no harm."""

    def __call__(
        self, model: Params, updates: Updates, view: View, state: State, key: Tensor
    ) -> Aggregated:
        rows: dict[str, list[Tensor]] = {}
        for update in updates:
            for name, change in update.delta.items():
                trained = torch.where(update.covered[name], change, torch.nan)
                rows.setdefault(name, []).append(trained)
        middle = {name: torch.stack(found).nanmedian(dim=0).values for name, found in rows.items()}
        delta = {name: value.nan_to_num(0.0) for name, value in middle.items()}  # nobody trained it
        return Aggregated(add_delta(model, delta), state)


def robust(*, widths: tuple[float, ...] = (1.0, 0.5), **parts: Unpack[Parts]) -> Method:
    """Return HeteroFL with the median in place of the mean."""
    return replace(heterofl(widths=widths, **parts), aggregate=Median())
