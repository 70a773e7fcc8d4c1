"""Choosers: how a device chooses from its menu."""

from anyfleet.parts.choose.fisher_utility import FisherUtility
from anyfleet.parts.choose.in_time import First, LargestInTime
from anyfleet.parts.choose.most_gain import MostGain

__all__ = ["First", "FisherUtility", "LargestInTime", "MostGain"]
