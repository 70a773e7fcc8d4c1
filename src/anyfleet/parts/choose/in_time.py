"""Choosing on the device: by what it knows of itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import numpy as np

from anyfleet.config.number_values import Unbounded
from anyfleet.core.check_in import Choices, ChoosingDevice, MenuEntry
from anyfleet.core.messages import Hyperparameters
from anyfleet.core.slots import Choose
from anyfleet.core.time_and_energy import transfer_seconds

NEEDS_MENU: Mapping[str, str] = MappingProxyType(
    {"menu": "plan=WidthMenu(...) or TrainedLayersMenu(...), which offers some"}
)


@dataclass(frozen=True)
class First(Choose):
    """The first entry of the menu."""

    def __call__(
        self, menu: Sequence[MenuEntry], device: ChoosingDevice, hyperparameters: Hyperparameters
    ) -> Choices:
        return _choice(0, hyperparameters)


@dataclass(frozen=True)
class LargestInTime(Choose):
    """The first entry that finishes within `seconds`, else the last; menus go downwards."""

    seconds: Unbounded
    requires: ClassVar[Mapping[str, str]] = NEEDS_MENU

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ValueError(f"LargestInTime.seconds must be positive, got {self.seconds}.")

    def __call__(
        self, menu: Sequence[MenuEntry], device: ChoosingDevice, hyperparameters: Hyperparameters
    ) -> Choices:
        for entry, offer in enumerate(menu):
            if seconds_for(offer, device, hyperparameters) <= self.seconds:
                return _choice(entry, hyperparameters)
        return _choice(len(menu) - 1, hyperparameters)


def _choice(entry: int, numbers: Hyperparameters) -> Choices:
    return Choices(np.array([entry]), numbers, np.array([np.nan]), ("",))


def seconds_for(offer: MenuEntry, own: ChoosingDevice, numbers: Hyperparameters) -> float:
    """Download, training and upload of one device, as it would estimate them itself."""
    link = own.conditions
    compute = offer.demand.effort.seconds(link, numbers.frequency)
    crossing = transfer_seconds(offer.down, link.bit_rate_down) + transfer_seconds(
        offer.up, link.bit_rate_up
    )
    return float((compute + crossing)[0])
