"""Which channels make up a sub-model."""

from anyfleet.extract.blocks import FisherBlocks
from anyfleet.extract.leading import Leading
from anyfleet.extract.random import Random
from anyfleet.extract.rolling import Rolling
from anyfleet.extract.strongest import Strongest

__all__ = ["FisherBlocks", "Leading", "Random", "Rolling", "Strongest"]
