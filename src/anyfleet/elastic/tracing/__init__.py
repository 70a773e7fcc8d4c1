"""The tracer: from a module to a blueprint, every axis followed through the network."""

__all__: list[str] = []
