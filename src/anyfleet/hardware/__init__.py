"""This machine as a member of a fleet: its profile, and the probes that measure it."""

__all__: list[str] = []
