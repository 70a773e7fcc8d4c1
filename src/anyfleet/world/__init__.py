"""The simulated world: who the devices are, how fast they compute, how fast their links are."""

from anyfleet.world.fleet import Fleet, World

__all__ = ["Fleet", "World"]
