"""A fleet of unequal devices, in columns."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from anyfleet import rng
from anyfleet.columns import Floats, Ints
from anyfleet.types import Conditions, Devices


@dataclass(frozen=True)
class Fleet:
    """Capability levels, strongest first; devices are dealt to levels evenly, in a seeded order.

    Speeds in FLOP per second, links in bits per second, memory in bytes. A column with a single
    entry holds for all levels. `mortality` is the share of orders whose device dies half-way.
    """

    speeds: tuple[float, ...] = (2e9, 1e9, 5e8, 2.5e8, 1.25e8)
    uplinks: tuple[float, ...] = (1e7,)
    downlinks: tuple[float, ...] = (4e7,)
    memories: tuple[float, ...] = (4e9,)
    mortality: float = 0.0

    def __post_init__(self) -> None:
        columns = (self.uplinks, self.downlinks, self.memories)
        names = ("uplinks", "downlinks", "memories")
        for name, column in zip(("speeds", *names), (self.speeds, *columns), strict=True):
            if not column or not all(value > 0 for value in column):
                raise ValueError(f"Fleet.{name} must be positive numbers, got {column}.")
            if len(column) not in (1, len(self.speeds)):
                raise ValueError(
                    f"Fleet.{name} needs one entry, or one for each of the {len(self.speeds)} "
                    f"levels of Fleet.speeds; got {len(column)}."
                )
        if not 0 <= self.mortality <= 1:
            raise ValueError(f"Fleet.mortality must lie in [0, 1], got {self.mortality}.")

    def build(self, samples: Ints, seed: int) -> "World":
        """The fleet as columns, one row for each entry of `samples`."""
        count, levels = len(samples), len(self.speeds)
        everybody = torch.ones(count, dtype=torch.bool)
        dealt = rng.permutation(rng.root(seed, "fleet"), everybody).numpy()
        level = np.empty(count, dtype=np.int64)
        level[dealt] = np.arange(count) % levels

        def column(values: tuple[float, ...]) -> Floats:
            wide = values * levels if len(values) == 1 else values
            return np.array(wide, dtype=np.float64)[level]

        return World(
            declared=Devices(level=level, samples=samples),
            speed=column(self.speeds),
            up=column(self.uplinks),
            down=column(self.downlinks),
            memory=column(self.memories),
            mortality=self.mortality,
        )


@dataclass(frozen=True, eq=False)
class World:
    """What is true of the devices. Policies see only what devices report of it."""

    declared: Devices
    speed: Floats
    up: Floats
    down: Floats
    memory: Floats
    mortality: float = 0.0

    def conditions(self, devices: Ints, now: float) -> Conditions:
        """What these devices report at check-in."""
        return Conditions(
            speed=self.speed[devices],
            up=self.up[devices],
            down=self.down[devices],
            memory=self.memory[devices],
        )

    def dies(self, devices: Ints, visits: Ints, seed: int) -> NDArray[np.bool_]:
        """Which of these devices die during these visits."""
        key = rng.fold(rng.root(seed, "mortality"), torch.from_numpy(devices))
        draw = rng.uniform(rng.fold(key, torch.from_numpy(visits)), 1)[:, 0]
        return draw.numpy() < self.mortality
