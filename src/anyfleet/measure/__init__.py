"""What a device can measure beside training."""

from anyfleet.measure.fisher import Fisher, Observed

__all__ = ["Fisher", "Observed"]
