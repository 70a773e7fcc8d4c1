"""Choosing on the device: by what it knows of itself."""

from collections.abc import Sequence
from dataclasses import dataclass

from anyfleet.elastic import Cost
from anyfleet.local import limits, processed
from anyfleet.types import Numbers, Own

BITS_PER_PARAMETER = 32


@dataclass(frozen=True)
class First:
    """The first entry of the menu."""

    def __call__(self, menu: Sequence[Cost], own: Own, numbers: Numbers) -> int:
        return 0


@dataclass(frozen=True)
class LargestInTime:
    """The first entry that finishes within `seconds`, else the last; menus go downwards."""

    seconds: float

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ValueError(f"LargestInTime.seconds must be positive, got {self.seconds}.")

    def __call__(self, menu: Sequence[Cost], own: Own, numbers: Numbers) -> int:
        for index, cost in enumerate(menu):
            if seconds_for(cost, own, numbers) <= self.seconds:
                return index
        return len(menu) - 1


def seconds_for(cost: Cost, own: Own, numbers: Numbers) -> float:
    """Download, training and upload of one device, as it would estimate them itself."""
    link = own.conditions
    (limit,) = limits(numbers, [own.samples])
    count = processed(limit, own.samples, int(numbers.batch[0]))
    compute = count * (cost.forward_flops + cost.backward_flops) / link.speed[0]
    down = BITS_PER_PARAMETER * cost.params / link.down[0]
    up = BITS_PER_PARAMETER * cost.sent_params / link.up[0]
    return float(down + compute + up)
