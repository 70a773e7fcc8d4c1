"""When to ask devices, and when to step."""

from anyfleet.schedule.buffered import Buffered
from anyfleet.schedule.overselected import Overselected
from anyfleet.schedule.rounds import Deadline, Synchronous
from anyfleet.schedule.surveyed import Surveyed
from anyfleet.schedule.tiers import Tiers
from anyfleet.schedule.two_phase import TwoPhase

__all__ = [
    "Buffered",
    "Deadline",
    "Overselected",
    "Surveyed",
    "Synchronous",
    "Tiers",
    "TwoPhase",
]
