"""Selection without preferences."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from anyfleet import rng
from anyfleet.arrays import Ints
from anyfleet.core.messages import Devices
from anyfleet.core.slots import Select, State
from anyfleet.core.view import View


@dataclass(frozen=True)
class Everyone(Select):
    """All idle devices; a uniform draw of them when a schedule wants fewer."""

    def __call__(self, view: View, state: State, key: Tensor) -> Ints:
        return view.idle if view.most_devices is None else drawn(view, view.most_devices, key)


@dataclass(frozen=True)
class Uniform(Select):
    """A uniform draw without replacement: `count` devices, or a `fraction` of the whole fleet.

    Fewer when fewer are free.
    """

    count: int | None = None
    fraction: float | None = None

    def __post_init__(self) -> None:
        if (self.count is None) == (self.fraction is None):
            raise ValueError(
                "Uniform needs either count or fraction, "
                f"got count={self.count} and fraction={self.fraction}. "
                "For all devices use Everyone()."
            )
        if self.count is not None and self.count < 1:
            raise ValueError(f"Uniform.count must be at least 1, got {self.count}.")
        if self.fraction is not None and not 0 < self.fraction <= 1:
            raise ValueError(f"Uniform.fraction must lie in (0, 1], got {self.fraction}.")

    def __call__(self, view: View, state: State, key: Tensor) -> Ints:
        wanted = self.count or max(1, round((self.fraction or 0) * len(view.devices)))
        return drawn(
            view, wanted if view.most_devices is None else min(wanted, view.most_devices), key
        )

    def excess(self, devices: Devices) -> str:
        return more_than_all("Uniform.count", self.count or 0, len(devices))


def more_than_all(what: str, asked: int, there: int) -> str:
    """Say that a selection asks for more devices than there are; nothing if it does not."""
    if asked <= there:
        return ""
    return (
        f"{what} is {asked}, but the fleet has {there} devices: everybody who is free takes part. "
        f"{there} is the most that fits; for all devices use select.Everyone()."
    )


def drawn(view: View, wanted: int, key: Tensor) -> Ints:
    """So many free devices, each equally likely; fewer when fewer are free."""
    found: list[Ints] = []
    # The first free ones of a random order of all: nobody else has to be looked at.
    for chunk in rng.draws(key, len(view.devices)):
        candidates: Ints = chunk.numpy()
        found.append(candidates[view.free(candidates)])
        if sum(map(len, found)) >= wanted:
            break
    chosen: Ints = np.sort(np.concatenate(found)[:wanted])
    return chosen
