"""Planners: what each device shall do, decided on the server or offered as a menu."""

from anyfleet.parts.plan.assigned import Assigned
from anyfleet.parts.plan.just_in_time import JustInTime
from anyfleet.parts.plan.largest_fitting import LargestFitting
from anyfleet.parts.plan.local_steps import LocalStepsWithin
from anyfleet.parts.plan.sent_fractions import SentFractionByLevel, SentFractionByLink
from anyfleet.parts.plan.target_seconds import TargetSeconds
from anyfleet.parts.plan.trained_layers import TrainedLayersByLevel, TrainedLayersMenu
from anyfleet.parts.plan.widths import WholeModel, WidthByLevel, WidthMenu
from anyfleet.parts.plan.work_by_level import WorkByLevel

__all__ = [
    "Assigned",
    "JustInTime",
    "LargestFitting",
    "LocalStepsWithin",
    "SentFractionByLevel",
    "SentFractionByLink",
    "TargetSeconds",
    "TrainedLayersByLevel",
    "TrainedLayersMenu",
    "WholeModel",
    "WidthByLevel",
    "WidthMenu",
    "WorkByLevel",
]
