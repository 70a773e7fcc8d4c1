"""Devices of one kind: what a fleet file says about them, column by column."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import index

from anyfleet.arguments import checked
from anyfleet.core.limits import MOST_DEVICES
from anyfleet.errors import refuse
from anyfleet.world.availability import Always, Availability
from anyfleet.world.column_loss import Columns
from anyfleet.world.links import Link, Steady
from anyfleet.world.quantities import LEAST, MOST, Number, bounds, changes

# Column: the least it may be, whether that itself is allowed, the most it may be.
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
COLUMNS = tuple(_RANGES)
# What others are divided by: near to 0 time would have no end, and the clock would be no number.
_DIVISORS = ("speed", "bandwidth", "load")
HIGHEST_LEVEL = 999  # levels are classes of devices: a larger number is a slip
_MAY_BE_INFINITE = ("bandwidth", "battery", "budget")
# What a battery holds is counted from its start, and filled at one pace between two orders.
_KEPT = ("battery", "charge", "reserve", "recharge")


@checked
@dataclass(frozen=True)
class Group:
    """`count` devices of one kind; without a count, an even part of those that no group counts.

    Which devices these are is drawn, with the run's seed, unless `devices` names them: by number,
    or by the name of the owner whose data a device has (under the partition `ByOwner`).
    A column is a number, a law that draws one for each device (`Uniform`, `Normal` …), or one that
    changes with time (`Redrawn`, `Wandering`, `Replayed`). What concerns the battery does not
    change: a number or a law.
    """

    name: str = ""
    count: int | None = None
    level: int | None = None  # capability class, 0 the strongest; its position unless given
    devices: tuple[int | str, ...] = ()  # which devices these are, by number or by owner
    # -- computing
    speed: Number = 1e9  # FLOP per second at the highest frequency, without other work
    overhead: Number = 0.0  # seconds for each local step
    latency: Number = 0.0  # seconds for each call of an operator
    bandwidth: Number = math.inf  # bytes per second that operators read and write
    fixed: Number = 0.0  # the part of a whole model's time that no slice saves
    exponent: float | None = None  # the rest shrinks with this power of the width; else with FLOP
    load: Number = 1.0  # other work: everything takes so many times longer
    memory: Number = 4e9  # bytes free for training
    frequency: tuple[float, float] = (1e8, 1e9)  # slowest and fastest, cycles per second
    energy: Number = 7.5e-27  # joules for a cycle, divided by the frequency squared
    # -- the link
    link: Link = field(default_factory=lambda: Steady(up=1e7, down=4e7))
    distance: Number = 100.0  # metres from the station
    loss: Columns = field(default_factory=Columns)
    # -- being there
    battery: Number = math.inf  # joules when full
    charge: Number = 1.0  # share of the battery at the start
    reserve: Number = 0.1  # share of the battery below which it takes no orders
    recharge: Number = 0.0  # watts, while it has nothing to do
    budget: Number = math.inf  # joules it is willing to spend on one order, for planners
    availability: Availability = field(default_factory=Always)
    mortality: Number = 0.0  # share of orders during which it dies half-way

    def __post_init__(self) -> None:
        # Numbers out of an array are ints to everybody who asks, and in a run file.
        plain = (each if isinstance(each, str | bool) else index(each) for each in self.devices)
        object.__setattr__(self, "devices", tuple(plain))
        refuse(self._faults())

    def _faults(self) -> Iterator[str]:
        if self.count is not None and self.count < 1:
            yield (
                f"Group.count must be at least 1, got {self.count}: an empty group has no devices. "
                "Remove the group, or leave count out for an even part of the rest."
            )
        if self.count is not None and self.count > MOST_DEVICES:
            yield f"Group.count must be at most {MOST_DEVICES:,}, got {self.count}."
        if self.level is not None and not 0 <= self.level <= HIGHEST_LEVEL:
            yield f"Group.level must lie in 0 … {HIGHEST_LEVEL}, got {self.level}."
        yield from self._misnamed()
        if self.exponent is not None and not 0 < self.exponent < math.inf:
            yield f"Group.exponent must be above 0 and finite, got {self.exponent}."
        for name in COLUMNS:
            yield from out_of_range(f"Group.{name}", name, getattr(self, name))
        for name in _KEPT:
            if changes(getattr(self, name)):
                yield (
                    f"Group.{name} must be a number or a law: it cannot change with time or from "
                    f"step to step, got {getattr(self, name)}."
                )
        slowest, fastest = self.frequency
        if not LEAST <= slowest <= fastest <= MOST:
            yield (
                "Group.frequency must be the slowest and the fastest, in this order, at least "
                f"{LEAST:g} and at most {MOST:g}; got {list(self.frequency)}."
            )

    def _misnamed(self) -> Iterator[str]:
        """What is wrong with the devices that it names."""
        if not self.devices:
            return
        if self.count is not None and self.count != len(self.devices):
            yield (
                f"Group.count is {self.count}, but the group names {len(self.devices)} devices. "
                "Leave the count out."
            )
        twice = [each for each, times in Counter(self.devices).items() if times > 1]
        if twice:
            yield f"Group.devices names twice: {', '.join(map(str, twice))}."
        wrong = [each for each in self.devices if _no_device(each)]
        if wrong:
            yield (
                "Group.devices must be numbers of devices, from 0, or names of owners; got "
                f"{', '.join(map(repr, wrong))}."
            )


def _no_device(named: int | str) -> bool:
    return isinstance(named, bool) or (not named if isinstance(named, str) else named < 0)


def out_of_range(called: str, column: str, *numbers: Number) -> Iterator[str]:
    """What is wrong with the first of these numbers that a column cannot have."""
    least, included, most = _RANGES[column]
    for number in numbers:
        low, high = bounds(number)
        if low == high == math.inf and column in _MAY_BE_INFINITE:
            continue
        if low == high and math.isinf(high):
            yield f"{called} must be finite, got {number}."
            return
        if math.isinf(low) or math.isinf(high):
            yield (
                f"{called} must be bounded, got {number}, which lies anywhere from {low:g} to "
                f"{high:g}. Give its law a low and a high end."
            )
            return
        low_enough = low >= least if included else low > least
        if not low_enough or not high <= most:
            ends = [f"{'at least' if included else 'above'} {least:g}"]
            # The bound that only keeps the clock finite is told where it is met, not elsewhere.
            ends += [f"at most {most:g}"] if most != MOST or low_enough else []
            yield f"{called} must be {' and '.join(ends)}, got {number}" + (
                "." if low == high else f", which lies between {low:g} and {high:g}."
            )
            return
        if column in _DIVISORS and low < LEAST:
            yield (
                f"{called} must be at least {LEAST:g}, or nothing would ever end; got {number}. "
                "Is it in the right unit?"
            )
            return
