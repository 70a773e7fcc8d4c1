"""Selections: which devices of the fleet are asked to take part."""

from anyfleet.parts.select.in_order import InOrder
from anyfleet.parts.select.largest import Largest
from anyfleet.parts.select.learned import Learned
from anyfleet.parts.select.quota import Quota
from anyfleet.parts.select.uniform import Everyone, Uniform

__all__ = ["Everyone", "InOrder", "Largest", "Learned", "Quota", "Uniform"]
