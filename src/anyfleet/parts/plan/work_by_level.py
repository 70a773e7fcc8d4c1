"""Local work by declared level."""

from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
from torch import Tensor

from anyfleet.arrays import Floats, Ints
from anyfleet.core.messages import Plans
from anyfleet.core.slots import Plan, State, Wrapper
from anyfleet.core.view import View
from anyfleet.parts.plan.widths import WholeModel

Column = TypeVar("Column", Ints, Floats)


@dataclass(frozen=True)
class WorkByLevel(Wrapper, Plan):
    """Batch size, epochs and learning rate of each level; an empty column leaves the trainer's own.

    `inner` plans the sizes. A level beyond the end of a column takes its last entry.
    """

    batch_sizes: tuple[int, ...] = ()
    epochs: tuple[int, ...] = ()
    lrs: tuple[float, ...] = ()
    inner: Plan = field(default_factory=WholeModel)

    def __post_init__(self) -> None:
        for name, column in (("batch_sizes", self.batch_sizes), ("epochs", self.epochs)):
            if any(value < 1 for value in column):
                raise ValueError(f"WorkByLevel.{name} must be at least 1 each, got {column}.")
        if any(not value > 0 for value in self.lrs):
            raise ValueError(f"WorkByLevel.lrs must be positive, got {self.lrs}.")

    def __call__(self, plans: Plans, view: View, state: State, key: Tensor) -> Plans:
        plans = self.inner(plans, view, state, key)
        level = view.devices.level[plans.device]
        numbers = replace(
            plans.hyperparameters,
            batch_size=_of_level(
                np.array(self.batch_sizes, dtype=np.int64), level, plans.hyperparameters.batch_size
            ),
            epochs=_of_level(
                np.array(self.epochs, dtype=np.int64), level, plans.hyperparameters.epochs
            ),
            lr=_of_level(np.array(self.lrs, dtype=np.float64), level, plans.hyperparameters.lr),
        )
        return replace(plans, hyperparameters=numbers)


def _of_level(column: Column, level: Ints, default: Column) -> Column:
    if not len(column):
        return default
    chosen: Column = column[np.minimum(level, len(column) - 1)]
    return chosen
