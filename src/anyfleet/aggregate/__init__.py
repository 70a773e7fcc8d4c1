"""How what arrived becomes the new model."""

from anyfleet.aggregate.all_in_one import Aio
from anyfleet.aggregate.angles import AngleWeighted
from anyfleet.aggregate.by_error import ErrorWeighted
from anyfleet.aggregate.by_rank import CoordinateMedian, TrimmedMean
from anyfleet.aggregate.clipped import Clipped
from anyfleet.aggregate.diagnosed import Diagnosed
from anyfleet.aggregate.mean import Mean, Weighted
from anyfleet.aggregate.server_step import ServerAdam, ServerSgd, ServerStep
from anyfleet.aggregate.subset import Subset

__all__ = [
    "Aio",
    "AngleWeighted",
    "Clipped",
    "CoordinateMedian",
    "Diagnosed",
    "ErrorWeighted",
    "Mean",
    "ServerAdam",
    "ServerSgd",
    "ServerStep",
    "Subset",
    "TrimmedMean",
    "Weighted",
]
