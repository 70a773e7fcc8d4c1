"""The batteries of the devices: orders discharge them, and they recharge between orders."""

import math

import numpy as np

from anyfleet.arrays import Flags, Floats, Ints
from anyfleet.world import World
from anyfleet.world.quantities import When

_START = When(0.0, 0)


class Batteries:
    """The charge of all batteries; stored only for devices that have worked."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._mains = world.on_mains
        count = 0 if self._mains else len(world)
        # Joules missing from a full battery when the device last finished; NaN: it never worked.
        self._missing: Floats = np.full(count, np.nan)
        # The second since which the device recharges; infinite while it works.
        self._since: Floats = np.zeros(count)
        # Devices found above their reserve. Until they work again their batteries only fill.
        self._ready: Flags = np.zeros(count, dtype=bool)

    def charge(self, devices: Ints, now: float) -> Floats:
        """Return the joules left; infinite on mains."""
        if self._mains:
            return np.full(len(devices), math.inf)
        full = self._world.values("battery", devices, _START)
        return full - self._missing_now(devices, full, now)

    def above_reserve(self, devices: Ints, now: float) -> Flags:
        """Return which devices have more than their reserve."""
        if self._mains:
            return np.ones(len(devices), dtype=bool)
        ready: Flags = self._ready[devices]
        unknown = np.flatnonzero(~ready)
        ready[unknown] = self._compare_with_reserve(devices[unknown], now)
        self._ready[devices] = ready
        return ready

    def _compare_with_reserve(self, devices: Ints, now: float) -> Flags:
        full = self._world.values("battery", devices, _START)
        reserve = self._world.values("reserve", devices, _START)
        left = full - self._missing_now(devices, full, now)
        least = reserve * np.where(np.isinf(full), 0.0, full)
        enough: Flags = (left > 0) & (left >= least)
        return enough

    def start_work(self, devices: Ints, now: float) -> None:
        """Record that devices work from now on; they do not recharge meanwhile."""
        if self._mains:
            return
        full = self._world.values("battery", devices, _START)
        self._missing[devices] = self._missing_now(devices, full, now)
        self._since[devices] = math.inf
        self._ready[devices] = False

    def finish_work(self, devices: Ints, joules: Floats, now: Floats | float) -> None:
        """Record that devices have finished, each at its own second, after it spent `joules`."""
        if self._mains:
            return
        full = self._world.values("battery", devices, _START)
        missing = self._missing[devices] + joules
        # Sums of joules round: a rest in an empty battery must not start another order.
        empty = missing >= full * (1 - 1e-12)
        self._missing[devices], self._since[devices] = np.where(empty, full, missing), now
        self._ready[devices] = False

    def save(self) -> tuple[Floats, Floats]:
        """Return the state for a checkpoint."""
        return self._missing.copy(), self._since.copy()

    def restore(self, saved: tuple[Floats, Floats]) -> None:
        """Go back to the state that `save` returned."""
        self._missing, self._since = (array.copy() for array in saved)
        self._ready = np.zeros(len(self._missing), dtype=bool)

    def _missing_now(self, devices: Ints, full: Floats, now: float) -> Floats:
        """Return the joules missing from a full battery; 0 on mains."""
        used = 1 - self._world.values("charge", devices, _START)
        start = np.where(np.isinf(full), 0.0, full) * used
        known = self._missing[devices]
        recharge = self._world.values("recharge", devices, _START)
        gained = recharge * np.maximum(0.0, now - self._since[devices])
        return np.maximum(0.0, np.where(np.isnan(known), start, known) - gained)
