"""The command `anyfleet`."""

from anyfleet.cli.app import main

__all__ = ["main"]
