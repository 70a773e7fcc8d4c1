"""Runtimes: where orders are carried out. The simulated one is a clock, a world and an engine."""

from anyfleet.core.limits import Limits
from anyfleet.runtime.simulated.engines import Sequential, Stacked, Threads, Workers
from anyfleet.runtime.simulated.simulator import Simulated

__all__ = ["Limits", "Sequential", "Simulated", "Stacked", "Threads", "Workers"]
