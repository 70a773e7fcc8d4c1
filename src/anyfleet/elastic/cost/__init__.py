"""What training a slice costs: FLOP, bytes, calls."""

__all__: list[str] = []
