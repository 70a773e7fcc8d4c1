"""Which of the idle devices take part."""

from anyfleet.select.largest import Largest
from anyfleet.select.learned import Learned
from anyfleet.select.quota import Quota
from anyfleet.select.uniform import Everyone, Uniform

__all__ = ["Everyone", "Largest", "Learned", "Quota", "Uniform"]
