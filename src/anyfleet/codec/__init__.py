"""How trees travel: as tensors with an exact size, and as bytes of that size."""

from anyfleet.codec.raw import Nothing, Raw

__all__ = ["Nothing", "Raw"]
