"""From a module to a blueprint: every axis is followed through the network."""

__all__: list[str] = []
