"""What is left in the devices' batteries: run down by orders, recharged between them."""

import math

import numpy as np

from anyfleet.columns import Flags, Floats, Ints
from anyfleet.world import World
from anyfleet.world.quantities import When

_START = When(0.0, 0)


class Batteries:
    """Charges of a fleet. Kept for devices that have worked; all others are as they began."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._mains = all(group.battery == math.inf for group in world.groups)
        count = 0 if self._mains else len(world)
        # Joules missing from a full battery when the device last finished; NaN: it never worked.
        self._missing: Floats = np.full(count, np.nan)
        self._since: Floats = np.zeros(count)

    def charge(self, devices: Ints, now: float) -> Floats:
        """Joules left; infinite on mains."""
        if self._mains:
            return np.full(len(devices), math.inf)
        full = self._world.column("battery", devices, _START)
        start = full * (1 - self._world.column("charge", devices, _START))
        missing = np.where(np.isnan(self._missing[devices]), start, self._missing[devices])
        recharge = self._world.column("recharge", devices, _START)
        gained = recharge * (now - self._since[devices])
        left: Floats = np.where(np.isinf(full), math.inf, full - np.maximum(0.0, missing - gained))
        return left

    def enough(self, devices: Ints, now: float) -> Flags:
        """Which devices have more than their reserve."""
        if self._mains:
            return np.ones(len(devices), dtype=bool)
        full = self._world.column("battery", devices, _START)
        reserve = self._world.column("reserve", devices, _START)
        left = self.charge(devices, now)
        enough: Flags = np.isinf(full) | ((left > 0) & (left >= reserve * full))
        return enough

    def spend(self, device: int, joules: float, began: float, now: float) -> None:
        """A device worked from `began` until now; it does not recharge meanwhile."""
        if self._mains:
            return
        only = np.array([device])
        full = self._world.column("battery", only, _START)[0]
        if math.isfinite(full):
            left = max(0.0, float(self.charge(only, began)[0]) - joules)
            self._missing[device], self._since[device] = full - left, now

    def save(self) -> tuple[Floats, Floats]:
        return self._missing.copy(), self._since.copy()

    def restore(self, saved: tuple[Floats, Floats]) -> None:
        self._missing, self._since = (column.copy() for column in saved)
