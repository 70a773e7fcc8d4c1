"""Checks that a blueprint is its module's own function."""

__all__: list[str] = []
