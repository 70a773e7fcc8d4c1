"""The network of a blueprint, run at any width."""

__all__: list[str] = []
