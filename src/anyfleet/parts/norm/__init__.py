"""Batch normalisation in federated learning: what is averaged, and what stays on devices."""

from anyfleet.parts.norm.batch_norm import BatchStatistics, OnDevice, PerWidth, Static, Tracked

__all__ = ["BatchStatistics", "OnDevice", "PerWidth", "Static", "Tracked"]
