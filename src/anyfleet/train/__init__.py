"""Local training: trainers, optimisers, learning rates, batch normalisation policies."""

from anyfleet.fisher import Fisher, Observed
from anyfleet.train.gradient import Gradient
from anyfleet.train.norm import BatchStatistics, OnDevice, PerWidth, Static, Tracked
from anyfleet.train.optimisers import AdamW, Sgd
from anyfleet.train.progressive import Progressive, Rush
from anyfleet.train.rates import Decaying, Inverse
from anyfleet.train.summed import Fjord, Slim

__all__ = [
    "AdamW",
    "BatchStatistics",
    "Decaying",
    "Fisher",
    "Fjord",
    "Gradient",
    "Inverse",
    "Observed",
    "OnDevice",
    "PerWidth",
    "Progressive",
    "Rush",
    "Sgd",
    "Slim",
    "Static",
    "Tracked",
]
