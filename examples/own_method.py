"""A method of one's own: a new part, and a function that puts it in its slot."""

from dataclasses import dataclass, replace
from typing import Unpack

import torch
from torch import Tensor

from anyfleet.core.messages import Aggregated, Params
from anyfleet.core.method import Method
from anyfleet.core.slots import Aggregate, State
from anyfleet.core.updates import Updates
from anyfleet.core.view import View
from anyfleet.methods import heterofl
from anyfleet.methods.heterofl import Parts


@dataclass(frozen=True)
class Median(Aggregate):
    """Per coordinate, the (lower) median of those who trained it: a few wild devices do no harm."""

    def __call__(
        self, model: Params, state: State, updates: Updates, view: View, key: Tensor
    ) -> Aggregated:
        alone = [updates.take([row]) for row in range(len(updates))]
        changes = [(one.mean(one.samples), one.covered()) for one in alone]

        def middle(name: str) -> Tensor:
            known = [(new[name], have[name]) for new, have in changes if name in new]
            rows = torch.stack([torch.where(have, new, torch.nan) for new, have in known])
            return rows.nanmedian(dim=0).values.nan_to_num(0.0)  # nobody trained it: no change

        names = {name for new, _ in changes for name in new}
        moved = {name: model[name] + middle(name) for name in names}
        return Aggregated({**model, **moved}, state)


def robust(*, widths: tuple[float, ...] = (1.0, 0.5), **parts: Unpack[Parts]) -> Method:
    """HeteroFL's widths, with the median in place of the mean."""
    return replace(heterofl(widths=widths, **parts), aggregate=Median())
