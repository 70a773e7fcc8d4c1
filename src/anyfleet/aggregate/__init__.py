"""How what arrived becomes the new model."""

from anyfleet.aggregate.mean import Mean
from anyfleet.aggregate.server_step import ServerAdam, ServerSgd, ServerStep

__all__ = ["Mean", "ServerAdam", "ServerSgd", "ServerStep"]
