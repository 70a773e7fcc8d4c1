"""Real devices over Flower: the runtime of a fleet, the link of a device, and their keys."""

__all__: list[str] = []
