"""Which channels make up a sub-model."""

from anyfleet.extract.leading import Leading

__all__ = ["Leading"]
