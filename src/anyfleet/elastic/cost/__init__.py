"""The cost of training a slice: FLOP, bytes, calls, operations."""

__all__: list[str] = []
