"""Where orders are carried out: a virtual clock and a world, times an engine."""

from anyfleet.core.limits import Limits
from anyfleet.runtime.simulated.engines import Sequential, Stacked, Threads
from anyfleet.runtime.simulated.simulator import Simulated

__all__ = ["Limits", "Sequential", "Simulated", "Stacked", "Threads"]
