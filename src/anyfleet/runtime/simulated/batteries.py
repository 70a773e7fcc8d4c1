"""What is left in the devices' batteries: run down by orders, recharged between them."""

import math

import numpy as np

from anyfleet.arrays import Flags, Floats, Ints
from anyfleet.world import World
from anyfleet.world.quantities import When

_START = When(0.0, 0)


class Batteries:
    """Charges of a fleet. Kept for devices that have worked; all others are as they began."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._mains = world.on_mains
        count = 0 if self._mains else len(world)
        # Joules missing from a full battery when the device last finished; NaN: it never worked.
        self._missing: Floats = np.full(count, np.nan)
        self._since: Floats = np.zeros(count)  # it recharges; infinite while it works
        # Found to have enough. A battery only fills until its device works: no need to look again.
        self._ready: Flags = np.zeros(count, dtype=bool)

    def charge(self, devices: Ints, now: float) -> Floats:
        """Joules left; infinite on mains."""
        if self._mains:
            return np.full(len(devices), math.inf)
        full = self._world.values("battery", devices, _START)
        return full - self._lacking(devices, full, now)

    def enough(self, devices: Ints, now: float) -> Flags:
        """Which devices have more than their reserve."""
        if self._mains:
            return np.ones(len(devices), dtype=bool)
        ready: Flags = self._ready[devices]
        asked = np.flatnonzero(~ready)
        ready[asked] = self._above_reserve(devices[asked], now)
        self._ready[devices] = ready
        return ready

    def _above_reserve(self, devices: Ints, now: float) -> Flags:
        full = self._world.values("battery", devices, _START)
        reserve = self._world.values("reserve", devices, _START)
        left = full - self._lacking(devices, full, now)
        least = reserve * np.where(np.isinf(full), 0.0, full)
        enough: Flags = (left > 0) & (left >= least)
        return enough

    def begin(self, devices: Ints, now: float) -> None:
        """Devices work from now on; they do not recharge meanwhile."""
        if self._mains:
            return
        full = self._world.values("battery", devices, _START)
        self._missing[devices] = self._lacking(devices, full, now)
        self._since[devices] = math.inf
        self._ready[devices] = False

    def spend(self, device: int, joules: float, now: float) -> None:
        """A device has finished, after it spent so much."""
        if self._mains:
            return
        full = float(self._world.values("battery", np.array([device]), _START)[0])
        missing = float(self._missing[device]) + joules
        # Sums of joules round: what is left of an empty battery must not start another order.
        empty = missing >= full * (1 - 1e-12)
        self._missing[device], self._since[device] = full if empty else missing, now
        self._ready[device] = False

    def save(self) -> tuple[Floats, Floats]:
        return self._missing.copy(), self._since.copy()

    def restore(self, saved: tuple[Floats, Floats]) -> None:
        self._missing, self._since = (column.copy() for column in saved)
        self._ready = np.zeros(len(self._missing), dtype=bool)

    def _lacking(self, devices: Ints, full: Floats, now: float) -> Floats:
        """Joules missing from a full battery; 0 on mains."""
        used = 1 - self._world.values("charge", devices, _START)
        start = np.where(np.isinf(full), 0.0, full) * used
        known = self._missing[devices]
        recharge = self._world.values("recharge", devices, _START)
        gained = recharge * np.maximum(0.0, now - self._since[devices])
        return np.maximum(0.0, np.where(np.isnan(known), start, known) - gained)
