"""Local training: trainers, optimisers, learning rates, batch normalisation policies."""

from anyfleet.measure.fisher import Observed
from anyfleet.parts.train.gradient import Gradient
from anyfleet.parts.train.learning_rates import Decaying, Inverse
from anyfleet.parts.train.optimisers import AdamW, Sgd
from anyfleet.parts.train.progressive import Progressive, Rush
from anyfleet.parts.train.summed import Fjord, Slim

__all__ = [
    "AdamW",
    "Decaying",
    "Fjord",
    "Gradient",
    "Inverse",
    "Observed",
    "Progressive",
    "Rush",
    "Sgd",
    "Slim",
]
