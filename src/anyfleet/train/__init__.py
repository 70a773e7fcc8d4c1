"""Local training: trainers, optimisers, learning rates, batch normalisation policies."""

from anyfleet.train.gradient import Gradient
from anyfleet.train.norm import BatchStatistics, OnDevice, PerWidth, Static, Tracked
from anyfleet.train.optimisers import AdamW, Sgd
from anyfleet.train.rates import Decaying, Inverse

__all__ = [
    "AdamW",
    "BatchStatistics",
    "Decaying",
    "Gradient",
    "Inverse",
    "OnDevice",
    "PerWidth",
    "Sgd",
    "Static",
    "Tracked",
]
