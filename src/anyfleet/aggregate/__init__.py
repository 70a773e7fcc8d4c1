"""How what arrived becomes the new model."""

from anyfleet.aggregate.angles import AngleWeighted
from anyfleet.aggregate.diagnosed import Diagnosed
from anyfleet.aggregate.mean import Mean
from anyfleet.aggregate.server_step import ServerAdam, ServerSgd, ServerStep
from anyfleet.aggregate.subset import Subset

__all__ = [
    "AngleWeighted",
    "Diagnosed",
    "Mean",
    "ServerAdam",
    "ServerSgd",
    "ServerStep",
    "Subset",
]
