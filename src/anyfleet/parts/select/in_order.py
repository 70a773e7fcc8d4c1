"""Selection in a fixed order: devices take turns by their numbers."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from anyfleet.arrays import Ints
from anyfleet.core.messages import Devices
from anyfleet.core.slots import Select, State
from anyfleet.core.view import View
from anyfleet.parts.select.uniform import more_than_all, wanted


@dataclass(frozen=True)
class InOrder(Select):
    """The next `count` devices by their numbers; after the last comes the first again.

    A device that is not free when it is its turn is passed over.
    """

    count: int = 1  # devices that are asked in each round

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"InOrder.count must be at least 1, got {self.count}.")

    def __call__(self, view: View, state: State, key: Tensor) -> Ints:
        size = len(view.devices)
        first = view.round_index * self.count
        turn = np.unique((first + np.arange(min(self.count, size))) % size)
        free = turn[view.free(turn)]
        return free[: wanted(view, len(free))]

    def excess(self, devices: Devices) -> str:
        return more_than_all("InOrder.count", self.count, len(devices))
