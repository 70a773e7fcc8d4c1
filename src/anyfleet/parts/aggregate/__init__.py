"""Aggregators: how the server makes a new model of the updates of a round."""

from anyfleet.parts.aggregate.all_in_one import Aio
from anyfleet.parts.aggregate.angle_weighted import AngleWeighted
from anyfleet.parts.aggregate.by_rank import CoordinateMedian, TrimmedMean
from anyfleet.parts.aggregate.clipped import Clipped
from anyfleet.parts.aggregate.diagnosed import Diagnosed
from anyfleet.parts.aggregate.error_weighted import ErrorWeighted
from anyfleet.parts.aggregate.mean import Mean, Weighted
from anyfleet.parts.aggregate.server_optimiser import ServerAdam, ServerOptimised, ServerSgd
from anyfleet.parts.aggregate.subset import Subset

__all__ = [
    "Aio",
    "AngleWeighted",
    "Clipped",
    "CoordinateMedian",
    "Diagnosed",
    "ErrorWeighted",
    "Mean",
    "ServerAdam",
    "ServerOptimised",
    "ServerSgd",
    "Subset",
    "TrimmedMean",
    "Weighted",
]
