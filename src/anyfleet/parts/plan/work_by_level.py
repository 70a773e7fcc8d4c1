"""Local work by declared level."""

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from anyfleet.core.plans import Plans
from anyfleet.core.slots import Plan, State, Wrapper
from anyfleet.core.view import View
from anyfleet.parts.plan.widths import WholeModel


@dataclass(frozen=True)
class WorkByLevel(Wrapper, Plan):
    """The batch size, epochs and learning rate of each level, strongest first.

    What is left empty stays the trainer's own. A level beyond the end takes the last entry. `inner`
    plans the sizes.
    """

    batch_sizes: tuple[int, ...] = ()  # of each level, strongest first
    epochs: tuple[int, ...] = ()  # of each level, strongest first
    lrs: tuple[float, ...] = ()  # of each level, strongest first
    inner: Plan = field(default_factory=WholeModel)

    def __post_init__(self) -> None:
        for name, values in (("batch_sizes", self.batch_sizes), ("epochs", self.epochs)):
            if any(value < 1 for value in values):
                raise ValueError(f"WorkByLevel.{name} must be at least 1 each, got {values}.")
        if any(not value > 0 for value in self.lrs):
            raise ValueError(f"WorkByLevel.lrs must be positive, got {self.lrs}.")

    def __call__(self, plans: Plans, view: View, state: State, key: Tensor) -> Plans:
        plans = self.inner(plans, view, state, key)
        level = view.devices.level[plans.device]
        given = {"batch_size": self.batch_sizes, "epochs": self.epochs, "lr": self.lrs}
        return plans.with_hyperparameters(
            **{
                name: np.array(values)[np.minimum(level, len(values) - 1)]
                for name, values in given.items()
                if values
            }
        )
