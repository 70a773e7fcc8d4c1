"""What each device shall do: decided on the server (plans) or offered as a menu."""

from anyfleet.plan.by_level import WorkByLevel
from anyfleet.plan.choices import First, LargestInTime
from anyfleet.plan.fitting import LargestFitting
from anyfleet.plan.levels import FixedLevel, Menu, Whole
from anyfleet.plan.steps import StepsWithin

__all__ = [
    "First",
    "FixedLevel",
    "LargestFitting",
    "LargestInTime",
    "Menu",
    "StepsWithin",
    "Whole",
    "WorkByLevel",
]
