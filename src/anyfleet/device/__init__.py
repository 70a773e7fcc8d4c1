"""This machine as a real device of a fleet: its bundle, its data, its memory, and its loop."""

__all__: list[str] = []
