"""Selections without preferences, and the uniform draw that others use."""

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
    """All idle devices; a uniform draw of them when the schedule wants fewer."""

    def __call__(self, view: View, state: State, key: Tensor) -> Ints:
        return view.idle if view.most_devices is None else drawn(view, view.most_devices, key)


@dataclass(frozen=True)
class Uniform(Select):
    """A uniform draw without replacement: `count` devices, or a `fraction` of the whole fleet.

    Fewer when fewer are free.
    """

    count: int | None = None  # devices that are asked in each round
    fraction: float | None = None  # of the fleet that is asked in each round

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
        count = self.count or max(1, round((self.fraction or 0) * len(view.devices)))
        return drawn(view, wanted(view, count), key)

    def excess(self, devices: Devices) -> str:
        return more_than_all("Uniform.count", self.count or 0, len(devices))


def more_than_all(what: str, asked: int, available: int) -> str:
    """Return a warning if a selection asks for more devices than are available, or ""."""
    if asked <= available:
        return ""
    return (
        f"{what} is {asked}, but the fleet has {available} devices: everybody who is free takes "
        f"part. {available} is the most that fits; for all devices use select.Everyone()."
    )


def wanted(view: View, count: int) -> int:
    """Return `count`, or fewer when the schedule wants fewer devices."""
    return count if view.most_devices is None else min(count, view.most_devices)


def drawn(view: View, count: int, key: Tensor) -> Ints:
    """Return `count` free devices, each equally likely, in ascending order; all if fewer are free.

    They are the first free ones of a random order of the fleet, so that few have to be looked at.
    """
    found: list[Ints] = []
    for chunk in rng.draws(key, len(view.devices)):
        candidates: Ints = chunk.numpy()
        found.append(candidates[view.free(candidates)])
        if sum(map(len, found)) >= count:
            break
    return np.sort(np.concatenate(found)[:count])
