"""Local work by declared level."""

from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
from torch import Tensor

from anyfleet.arrays import Floats, Ints
from anyfleet.core.messages import Plans
from anyfleet.core.slots import Around, Plan, State
from anyfleet.core.view import View
from anyfleet.parts.plan.widths import Whole

Column = TypeVar("Column", Ints, Floats)


@dataclass(frozen=True)
class WorkByLevel(Around, Plan):
    """Batch size, epochs and learning rate of each level; an empty column leaves the trainer's own.

    `inner` plans the sizes. A level beyond the end of a column takes its last entry.
    """

    batches: tuple[int, ...] = ()
    epochs: tuple[int, ...] = ()
    rates: tuple[float, ...] = ()
    inner: Plan = field(default_factory=Whole)

    def __post_init__(self) -> None:
        for name, column in (("batches", self.batches), ("epochs", self.epochs)):
            if any(value < 1 for value in column):
                raise ValueError(f"WorkByLevel.{name} must be at least 1 each, got {column}.")
        if any(not value > 0 for value in self.rates):
            raise ValueError(f"WorkByLevel.rates must be positive, got {self.rates}.")

    def __call__(self, drafts: Plans, view: View, state: State, key: Tensor) -> Plans:
        plans = self.inner(drafts, view, state, key)
        level = view.devices.level[plans.device]
        numbers = replace(
            plans.numbers,
            batch=_of_level(np.array(self.batches, dtype=np.int64), level, plans.numbers.batch),
            epochs=_of_level(np.array(self.epochs, dtype=np.int64), level, plans.numbers.epochs),
            lr=_of_level(np.array(self.rates, dtype=np.float64), level, plans.numbers.lr),
        )
        return replace(plans, numbers=numbers)


def _of_level(column: Column, level: Ints, default: Column) -> Column:
    if not len(column):
        return default
    chosen: Column = column[np.minimum(level, len(column) - 1)]
    return chosen
