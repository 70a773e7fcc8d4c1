"""The simulated runtime: a virtual clock and a world, times an engine."""

from anyfleet.runtime.simulated.engines import Sequential, Stacked, Threads
from anyfleet.runtime.simulated.simulator import Simulated

__all__ = ["Sequential", "Simulated", "Stacked", "Threads"]
