"""Widths by memory: the largest model that a device can hold."""

from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from anyfleet.arrays import alike
from anyfleet.core.messages import SubModelSize
from anyfleet.core.plans import Plans
from anyfleet.core.slots import Plan, State, Wrapper
from anyfleet.core.view import View
from anyfleet.parts.plan.widths import WholeModel, check_widths


@dataclass(frozen=True)
class LargestFitting(Wrapper, Plan):
    """The largest of the `widths` whose training fits into the memory that a device reports.

    `inner` plans first, and no device gets more than it says. A device that cannot even hold the
    smallest is not asked, as with every planner.
    """

    widths: tuple[float, ...] = (1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16)
    inner: Plan = field(default_factory=WholeModel)

    def __post_init__(self) -> None:
        check_widths("LargestFitting", self.widths)

    def __call__(self, plans: Plans, view: View, state: State, key: Tensor) -> Plans:
        plans = self.inner(plans, view, state, key)
        room, batches = view.conditions(plans.device).memory, plans.hyperparameters.batch_size
        found = [SubModelSize()] * len(plans)
        for rows in alike(plans.size_index, batches):
            sizes = self._downwards(plans.size_of(int(rows[0])))
            slices = [size.prefix(view.blueprint) for size in sizes]
            needs = np.array([view.memory(each, int(batches[rows[0]])) for each in slices])
            fits = needs[:, None] <= room[rows]
            largest = np.where(fits.any(axis=0), fits.argmax(axis=0), len(sizes) - 1)
            for row, number in zip(rows.tolist(), largest.tolist(), strict=True):
                found[row] = sizes[number]
        return plans.with_sizes(found)

    def _downwards(self, planned: SubModelSize) -> list[SubModelSize]:
        """Return the planned size and all that are narrower, largest first."""
        narrower = sorted((w for w in self.widths if w < planned.width), reverse=True)
        return [planned, *(replace(planned, width=width) for width in narrower)]
