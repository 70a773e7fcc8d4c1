"""When to ask devices, and when to step."""

from anyfleet.schedule.buffered import Buffered
from anyfleet.schedule.rounds import Deadline, Synchronous
from anyfleet.schedule.surveyed import Surveyed
from anyfleet.schedule.two_phase import TwoPhase

__all__ = ["Buffered", "Deadline", "Surveyed", "Synchronous", "TwoPhase"]
