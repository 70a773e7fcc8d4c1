"""What each device shall do: decided on the server (plans) or offered as a menu."""

from anyfleet.parts.plan.assigned import Assigned
from anyfleet.parts.plan.just_in_time import JustInTime
from anyfleet.parts.plan.largest_fitting import LargestFitting
from anyfleet.parts.plan.local_steps import StepsWithin
from anyfleet.parts.plan.sent_fractions import RateByLevel, RateByLink
from anyfleet.parts.plan.target_seconds import Paced
from anyfleet.parts.plan.trained_layers import Depth, DepthMenu
from anyfleet.parts.plan.widths import FixedLevel, Menu, Whole
from anyfleet.parts.plan.work_by_level import WorkByLevel

__all__ = [
    "Assigned",
    "Depth",
    "DepthMenu",
    "FixedLevel",
    "JustInTime",
    "LargestFitting",
    "Menu",
    "Paced",
    "RateByLevel",
    "RateByLink",
    "StepsWithin",
    "Whole",
    "WorkByLevel",
]
