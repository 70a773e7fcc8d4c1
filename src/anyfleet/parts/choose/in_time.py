"""Choosing on the device: by what it knows of itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import numpy as np

from anyfleet.config.number_values import Unbounded
from anyfleet.core.check_in import Choices, Offer, Own
from anyfleet.core.messages import Numbers
from anyfleet.core.slots import Choose
from anyfleet.core.time_and_energy import crossing_seconds

NEEDS_MENU: Mapping[str, str] = MappingProxyType(
    {"menu": "plan=Menu(...) or DepthMenu(...), which offers some"}
)


@dataclass(frozen=True)
class First(Choose):
    """The first entry of the menu."""

    def __call__(self, menu: Sequence[Offer], own: Own, numbers: Numbers) -> Choices:
        return _choice(0, numbers)


@dataclass(frozen=True)
class LargestInTime(Choose):
    """The first entry that finishes within `seconds`, else the last; menus go downwards."""

    seconds: Unbounded
    needs: ClassVar[Mapping[str, str]] = NEEDS_MENU

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ValueError(f"LargestInTime.seconds must be positive, got {self.seconds}.")

    def __call__(self, menu: Sequence[Offer], own: Own, numbers: Numbers) -> Choices:
        for entry, offer in enumerate(menu):
            if seconds_for(offer, own, numbers) <= self.seconds:
                return _choice(entry, numbers)
        return _choice(len(menu) - 1, numbers)


def _choice(entry: int, numbers: Numbers) -> Choices:
    return Choices(np.array([entry]), numbers, np.array([np.nan]), ("",))


def seconds_for(offer: Offer, own: Own, numbers: Numbers) -> float:
    """Download, training and upload of one device, as it would estimate them itself."""
    link = own.conditions
    compute = offer.demand.effort.seconds(link, numbers.frequency)
    crossing = crossing_seconds(offer.down, link.down) + crossing_seconds(offer.up, link.up)
    return float((compute + crossing)[0])
