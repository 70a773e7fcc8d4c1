"""The simulated runtime: devices in this process under virtual time."""

from anyfleet.runtime.simulated.engines import Sequential, Stacked, Threads, Workers
from anyfleet.runtime.simulated.simulator import Simulated

__all__ = ["Sequential", "Simulated", "Stacked", "Threads", "Workers"]
