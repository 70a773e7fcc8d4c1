"""Which channels make up a sub-model."""

from anyfleet.extract.leading import Leading
from anyfleet.extract.random import Random
from anyfleet.extract.rolling import Rolling

__all__ = ["Leading", "Random", "Rolling"]
