"""Which of the idle devices take part."""

from anyfleet.select.uniform import Everyone, Uniform

__all__ = ["Everyone", "Uniform"]
