"""What a device can measure beside training."""

from anyfleet.measure.fisher import Fisher

__all__ = ["Fisher"]
