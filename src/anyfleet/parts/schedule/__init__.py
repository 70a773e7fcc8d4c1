"""Schedules: when devices are asked, and when a round ends."""

from anyfleet.parts.schedule.buffered import Buffered
from anyfleet.parts.schedule.deadline import Deadline
from anyfleet.parts.schedule.hold_and_fetch import HoldAndFetch
from anyfleet.parts.schedule.overselected import Overselected
from anyfleet.parts.schedule.surveyed import Surveyed
from anyfleet.parts.schedule.synchronous import Synchronous
from anyfleet.parts.schedule.tiers import Tiers

__all__ = [
    "Buffered",
    "Deadline",
    "HoldAndFetch",
    "Overselected",
    "Surveyed",
    "Synchronous",
    "Tiers",
]
