"""Checks that a traced network computes what its module does."""

__all__: list[str] = []
