"""How batch normalisation lives in a federation."""

from anyfleet.parts.norm.batch_norm import BatchStatistics, OnDevice, PerWidth, Static, Tracked

__all__ = ["BatchStatistics", "OnDevice", "PerWidth", "Static", "Tracked"]
