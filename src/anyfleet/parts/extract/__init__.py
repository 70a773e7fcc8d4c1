"""Extractors: which channels make up a sub-model."""

from anyfleet.parts.extract.fisher_blocks import FisherBlocks
from anyfleet.parts.extract.leading import Leading
from anyfleet.parts.extract.random import Random
from anyfleet.parts.extract.rolling import Rolling
from anyfleet.parts.extract.strongest import Strongest

__all__ = ["FisherBlocks", "Leading", "Random", "Rolling", "Strongest"]
