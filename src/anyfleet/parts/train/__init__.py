"""Local training: trainers, optimisers and learning rates."""

from anyfleet.parts.train.frozen import FrozenPrefix
from anyfleet.parts.train.gradient import Gradient
from anyfleet.parts.train.learning_rates import Decaying, Inverse
from anyfleet.parts.train.optimisers import AdamW, Sgd
from anyfleet.parts.train.progressive import Progressive, Rush
from anyfleet.parts.train.summed import Fjord, Slim

__all__ = [
    "AdamW",
    "Decaying",
    "Fjord",
    "FrozenPrefix",
    "Gradient",
    "Inverse",
    "Progressive",
    "Rush",
    "Sgd",
    "Slim",
]
