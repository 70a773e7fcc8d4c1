"""Where orders are carried out: a virtual clock and a world, times an engine."""

from anyfleet.limits import Limits
from anyfleet.runtime.engines import Reference, Stacked, Threads
from anyfleet.runtime.simulated import Simulated

__all__ = ["Limits", "Reference", "Simulated", "Stacked", "Threads"]
