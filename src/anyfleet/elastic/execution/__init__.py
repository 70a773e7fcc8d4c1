"""Execution of a blueprint's program: as a pure function, or as a module."""

__all__: list[str] = []
