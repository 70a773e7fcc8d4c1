"""A part of one's own: a frozen dataclass that derives from its slot (`anyfleet.parts.Select`)."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from anyfleet.parts import Ints, Select, State, View


@dataclass(frozen=True)
class Fastest(Select):
    """The `count` fastest of the idle devices, by the speed they report at check-in."""

    count: int = 5

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"Fastest.count must be at least 1, got {self.count}.")

    def __call__(self, view: View, state: State, key: Tensor) -> Ints:
        slowness = -view.conditions(view.idle).speed
        chosen: Ints = view.idle[np.argsort(slowness, kind="stable")[: self.count]]
        return chosen
