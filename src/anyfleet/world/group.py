"""Groups: devices of one kind, and what a fleet file says about them, field by field."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import index

from anyfleet.arguments import checked
from anyfleet.core.limits import MOST_DEVICES
from anyfleet.errors import refuse
from anyfleet.world.availability import Always, Availability
from anyfleet.world.column_loss import ColumnLoss
from anyfleet.world.links import Link, Steady
from anyfleet.world.quantities import LEAST, MOST, Number, bounds, changes

# For each field: the least value, whether the least itself is allowed, and the largest.
_RANGES: dict[str, tuple[float, bool, float]] = {
    "speed": (0, False, MOST),
    "overhead": (0, True, MOST),
    "latency": (0, True, MOST),
    "bandwidth": (0, False, MOST),
    "fixed": (0, True, 1),
    "load": (0, False, MOST),
    "memory": (0, False, MOST),
    "energy": (0, True, MOST),
    "distance": (0, True, MOST),
    "battery": (0, False, MOST),
    "charge": (0, True, 1),
    "reserve": (0, True, 1),
    "recharge": (0, True, MOST),
    "budget": (0, False, MOST),
    "mortality": (0, True, 1),
}
FIELDS = tuple(_RANGES)
# Numbers that divide others: near 0, time would have no end and the clock would overflow.
_DIVISORS = ("speed", "bandwidth", "load")
HIGHEST_LEVEL = 999  # levels are classes of devices: a larger number is a mistake
_MAY_BE_INFINITE = ("bandwidth", "battery", "budget")
# A battery's charge is computed from these since its last order, so they must not change.
_CONSTANT = ("battery", "charge", "reserve", "recharge")


@checked
@dataclass(frozen=True)
class Group:
    """`count` devices of one kind; without a count, an even share of the devices without a group.

    Which devices belong to the group is drawn with the run's seed, unless `devices` names them: by
    number, or by the owner of the data that a device has (under the partition `ByOwner`).
    A field is a number, a distribution that draws one for each device (`Uniform`, `Normal` …), or
    a number that changes with time (`Redrawn`, `Wandering`, `Replayed`). Fields of the battery do
    not change: each is a number or a distribution.
    """

    name: str = ""  # shown in tables
    count: int | None = None  # devices; none: an even share of the rest
    level: int | None = None  # capability class, 0 the strongest; without it the group's position
    devices: tuple[int | str, ...] = ()  # the devices of the group, by number or by owner
    # -- computing
    speed: Number = 1e9  # FLOP per second at the highest frequency, without load
    overhead: Number = 0.0  # seconds for each local step
    latency: Number = 0.0  # seconds for each call of an operator
    bandwidth: Number = math.inf  # bytes per second between memory and processor
    fixed: Number = 0.0  # share of the whole model's time that no slice saves
    exponent: float | None = None  # the rest shrinks with this power of the width; None: with FLOP
    load: Number = 1.0  # factor by which other work slows everything down
    memory: Number = 4e9  # bytes free for training
    frequency: tuple[float, float] = (1e8, 1e9)  # slowest and fastest, cycles per second
    energy: Number = 7.5e-27  # joules for a cycle, divided by the frequency squared
    # -- the link
    link: Link = field(  # how devices are connected
        default_factory=lambda: Steady(bit_rate_up=1e7, bit_rate_down=4e7)
    )
    distance: Number = 100.0  # metres from the station
    column_loss: ColumnLoss = field(default_factory=ColumnLoss)  # how columns are lost on the link
    # -- battery and availability
    battery: Number = math.inf  # joules when full
    charge: Number = 1.0  # share of the battery at the start
    reserve: Number = 0.1  # share of the battery below which the device takes no orders
    recharge: Number = 0.0  # watts, while the device has no order
    budget: Number = math.inf  # joules that one order may cost, for planners
    availability: Availability = field(default_factory=Always)  # when devices are online
    mortality: Number = 0.0  # share of orders during which the device dies half-way

    def __post_init__(self) -> None:
        # Numbers from a NumPy array become plain ints, so that a run file can hold them.
        plain = (each if isinstance(each, str | bool) else index(each) for each in self.devices)
        object.__setattr__(self, "devices", tuple(plain))
        refuse(self._faults())

    def _faults(self) -> Iterator[str]:
        if self.count is not None and self.count < 1:
            yield (
                f"Group.count must be at least 1, got {self.count}: an empty group has no devices. "
                "Remove the group, or leave count out for an even share of the rest."
            )
        if self.count is not None and self.count > MOST_DEVICES:
            yield f"Group.count must be at most {MOST_DEVICES:,}, got {self.count}."
        if self.level is not None and not 0 <= self.level <= HIGHEST_LEVEL:
            yield f"Group.level must lie in 0 … {HIGHEST_LEVEL}, got {self.level}."
        yield from self._device_faults()
        if self.exponent is not None and not 0 < self.exponent < math.inf:
            yield f"Group.exponent must be above 0 and finite, got {self.exponent}."
        for name in FIELDS:
            yield from range_faults(f"Group.{name}", name, getattr(self, name))
        for name in _CONSTANT:
            if changes(getattr(self, name)):
                yield (
                    f"Group.{name} must be a number or a distribution: it cannot change with "
                    f"time or from round to round, got {getattr(self, name)}."
                )
        slowest, fastest = self.frequency
        if not LEAST <= slowest <= fastest <= MOST:
            yield (
                "Group.frequency must be the slowest and the fastest, in this order, at least "
                f"{LEAST:g} and at most {MOST:g}; got {list(self.frequency)}."
            )

    def _device_faults(self) -> Iterator[str]:
        """Yield what is wrong with the devices that the group names."""
        if not self.devices:
            return
        if self.count is not None and self.count != len(self.devices):
            yield (
                f"Group.count is {self.count}, but the group names {len(self.devices)} devices. "
                "Leave the count out."
            )
        twice = [each for each, times in Counter(self.devices).items() if times > 1]
        if twice:
            yield (
                f"Group.devices names these more than once: {', '.join(map(str, twice))}. "
                "Name each once."
            )
        wrong = [each for each in self.devices if _not_a_device(each)]
        if wrong:
            yield (
                "Group.devices must be numbers of devices, from 0, or names of owners; got "
                f"{', '.join(map(repr, wrong))}."
            )


def _not_a_device(named: int | str) -> bool:
    return isinstance(named, bool) or (not named if isinstance(named, str) else named < 0)


def range_faults(called: str, field_name: str, *numbers: Number) -> Iterator[str]:
    """Yield what is wrong with the first of these numbers that a field cannot have."""
    least, included, most = _RANGES[field_name]
    for number in numbers:
        low, high = bounds(number)
        if low == high == math.inf and field_name in _MAY_BE_INFINITE:
            continue
        if low == high and math.isinf(high):
            yield f"{called} must be finite, got {number}."
            return
        if math.isinf(low) or math.isinf(high):
            yield (
                f"{called} must be bounded, got {number}, which lies anywhere from {low:g} to "
                f"{high:g}. Give its distribution a low and a high bound."
            )
            return
        low_enough = low >= least if included else low > least
        if not low_enough or not high <= most:
            ends = [f"{'at least' if included else 'above'} {least:g}"]
            # The largest value only keeps the clock finite: name it only where it is exceeded.
            ends += [f"at most {most:g}"] if most != MOST or low_enough else []
            yield f"{called} must be {' and '.join(ends)}, got {number}" + (
                "." if low == high else f", which lies between {low:g} and {high:g}."
            )
            return
        if field_name in _DIVISORS and low < LEAST:
            yield (
                f"{called} must be at least {LEAST:g}, or orders would never end; got {number}. "
                "Check its unit."
            )
            return
