"""Real devices over Flower: both ends of the link between a server and its devices."""

__all__: list[str] = []
