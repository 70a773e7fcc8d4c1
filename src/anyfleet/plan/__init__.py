"""What each device shall do: decided on the server (plans) or offered as a menu."""

from anyfleet.plan.assigned import Assigned
from anyfleet.plan.by_level import WorkByLevel
from anyfleet.plan.choices import First, LargestInTime
from anyfleet.plan.depth import Depth, DepthMenu
from anyfleet.plan.fitting import LargestFitting
from anyfleet.plan.gain import MostGain
from anyfleet.plan.just_in_time import JustInTime
from anyfleet.plan.levels import FixedLevel, Menu, Whole
from anyfleet.plan.paced import Paced
from anyfleet.plan.rates import RateByLevel, RateByLink
from anyfleet.plan.steps import StepsWithin
from anyfleet.plan.utility import FisherUtility

__all__ = [
    "Assigned",
    "Depth",
    "DepthMenu",
    "First",
    "FisherUtility",
    "FixedLevel",
    "JustInTime",
    "LargestFitting",
    "LargestInTime",
    "Menu",
    "MostGain",
    "Paced",
    "RateByLevel",
    "RateByLink",
    "StepsWithin",
    "Whole",
    "WorkByLevel",
]
