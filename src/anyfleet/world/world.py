"""The simulated devices: what is true of them at any time, and what they report of it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from anyfleet import rng
from anyfleet.arguments import checked
from anyfleet.arrays import Flags, Floats, Ints
from anyfleet.core.messages import Conditions, Devices
from anyfleet.errors import refuse
from anyfleet.world.group import FIELDS, Group
from anyfleet.world.links import BitRates, Link, Way
from anyfleet.world.quantities import MOST, Number, When, at, until

_AS_IN_GROUP = ("memory", "battery", "budget")
_COMPUTING = ("overhead", "latency", "bandwidth", "fixed")
_BIT_RATES = ("bit_rate_up", "bit_rate_down")
# Fields that may differ from device to device within a group: those that a table may have.
DEVICE_FIELDS = (
    *FIELDS,
    "exponent",
    "slowest",
    "fastest",
    *_BIT_RATES,
    "send_power",
    "receive_power",
)
# What a device measures about itself, with an error.
_NOISY = ("speed", *_BIT_RATES, "memory", "battery")


@checked
@dataclass(frozen=True)
class Reports:
    """The age and the error of the conditions that devices report at check-in.

    By default they are fresh and exact. Otherwise they are `rounds` rounds and `seconds` seconds
    old, and each number is wrong by a log-normal factor whose logarithm has the deviation `noise`.
    The charge of the battery and the loss of the last reply are never old.
    """

    rounds: int = 0
    seconds: float = 0.0
    noise: float = 0.0

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in ("rounds", "seconds", "noise")}
        refuse(
            f"Reports.{name} must be a number that is not negative, at most {MOST:g}; got {value}."
            for name, value in given.items()
            if not 0 <= value <= MOST
        )

    def when(self, when: When) -> When:
        """Return the time that a report made now is about."""
        return When(max(0.0, when.now - self.seconds), max(0, when.round_index - self.rounds))


class RuntimeConditions(NamedTuple):
    """The conditions of devices that only the runtime knows."""

    battery: Floats
    loss: Floats


# How many devices use each band at the same time, or one number for all bands.
Active = int | Ints


@dataclass(frozen=True, eq=False)
class World:
    """The devices of a run. Policies never see it, only what devices report (`report`).

    `device_values` holds numbers of single devices, by field (`DEVICE_FIELDS`), one for each
    device: NaN means that the number of its group or link applies. They do not change with time.
    `assignment` is a sentence that says how devices came to their groups.
    """

    groups: tuple[Group, ...]
    links: tuple[Link, ...]
    reports: Reports
    declared: Devices
    group: Ints  # of every device
    link: Ints  # of every device
    seed: int
    device_values: Mapping[str, Floats] = field(default_factory=dict)
    assignment: str = ""

    def __len__(self) -> int:
        return len(self.declared)

    def conditions(self, devices: Ints, when: When, active: Active) -> Conditions:
        """Return the true conditions of these devices while `active` devices use each band.

        The runtime knows the charge of the batteries and the last losses. Here every battery is
        full, and every loss is NaN.
        """
        rates = self.bit_rates(devices, when, active)
        link = self.link[devices]
        ranges = np.array([group.frequency for group in self.groups])[self.group[devices]]
        return Conditions(
            bit_rate_up=rates.up,
            bit_rate_down=rates.down,
            slowest=self._own_or("slowest", devices, ranges[:, 0]),
            fastest=self._own_or("fastest", devices, ranges[:, 1]),
            send_power=self._own_or(
                "send_power", devices, np.array([each.send_power for each in self.links])[link]
            ),
            receive_power=self._own_or(
                "receive_power",
                devices,
                np.array([each.receive_power for each in self.links])[link],
            ),
            loss=np.full(len(devices), np.nan),
            exponent=self._own_or("exponent", devices, self._exponents[self.group[devices]]),
            **{name: self.values(name, devices, when) for name in _AS_IN_GROUP},
            **self.compute_conditions(devices, when),
        )

    def compute_conditions(self, devices: Ints, when: When) -> dict[str, Floats]:
        """Return the conditions that decide how long computing takes and what it costs."""
        load = self.values("load", devices, when)
        return {
            "speed": self.values("speed", devices, when) / load,
            "load": load,
            "coefficient": self.values("energy", devices, when),
            **{name: self.values(name, devices, when) for name in _COMPUTING},
        }

    def compute_until(self, device: int, when: When) -> float:
        """Return the second at which time next changes how a device computes, or infinity."""
        group: Group = self.groups[self.group[device]]
        names = ("speed", "load", "energy", *_COMPUTING)
        shared = [name for name in names if not self._has_own(name, device)]
        return min((until(getattr(group, name), when) for name in shared), default=math.inf)

    def report(
        self, devices: Ints, when: When, active: Active, own: RuntimeConditions
    ) -> Conditions:
        """Return the conditions that these devices report at check-in."""
        reported = self.conditions(devices, self.reports.when(when), active)
        reported = replace(reported, battery=own.battery, loss=own.loss)
        if not self.reports.noise:
            return reported
        keys = rng.fold(self._keys("noise", devices), when.round_index)
        errors = np.exp(self.reports.noise * rng.normal(keys, len(_NOISY)).numpy())
        noisy = {n: getattr(reported, n) * errors[:, i] for i, n in enumerate(_NOISY)}
        return replace(reported, **noisy)

    def values(self, name: str, devices: Ints, when: When) -> Floats:
        """Return the values of one field of the fleet for these devices."""
        by_group, mine = self._fields[name], self.group[devices]
        found = by_group.plain[mine]
        if not by_group.drawn:
            return self._own_or(name, devices, found)
        # Keys cost more than all the rest, and plain numbers need none.
        keys = self._keys(name, devices)
        for number, rows in _rows_by_number(by_group.first_equal[mine]):
            if number in by_group.drawn:
                found[rows] = at(by_group.numbers[number], _take(keys, rows), when)
        return self._own_or(name, devices, found)

    def _own_or(self, name: str, devices: Ints, found: Floats) -> Floats:
        """Return the numbers that devices have of their own, and `found` for the others."""
        if name not in self.device_values:
            return found
        own = self.device_values[name][devices]
        return np.where(np.isnan(own), found, own)

    def _has_own(self, name: str, device: int) -> bool:
        return name in self.device_values and not math.isnan(self.device_values[name][device])

    @cached_property
    def on_mains(self) -> bool:
        """True if no device has a battery that could run down."""
        own = self.device_values.get("battery", np.empty(0))
        plain = all(group.battery == math.inf for group in self.groups)
        return plain and bool(np.all(np.isnan(own) | (own == math.inf)))

    @cached_property
    def _exponents(self) -> Floats:
        given = (group.exponent for group in self.groups)
        return np.array([math.nan if exponent is None else exponent for exponent in given])

    @cached_property
    def _fields(self) -> dict[str, "_FieldByGroup"]:
        return {name: _field_by_group([getattr(g, name) for g in self.groups]) for name in FIELDS}

    @cached_property
    def _availability_of_group(self) -> Ints:
        return _first_equal([group.availability for group in self.groups])

    @cached_property
    def _band_of_link(self) -> Ints:
        return _first_equal(self.links)

    def devices_per_band(self, devices: Ints) -> Ints:
        """Return how many of these devices use each band. Equal links are one band."""
        return np.bincount(self._band_of_link[self.link[devices]], minlength=len(self.links))

    @cached_property
    def shares_bands(self) -> bool:
        """True if devices divide a band, so that each lowers the bit rates of others."""
        return any(link.shared for link in self.links)

    def bit_rates(self, devices: Ints, when: When, active: Active) -> BitRates:
        """Return the bit rates of these devices while `active` devices use each band."""
        users = np.broadcast_to(active, len(self.links))
        keys = self._keys("link", devices)
        distance = self.values("distance", devices, when)
        up, down = np.empty(len(devices)), np.empty(len(devices))
        for number, rows in _rows_by_number(self._band_of_link[self.link[devices]]):
            link = self.links[number]
            rates = link.bit_rates(_take(keys, rows), when, distance[rows], int(users[number]))
            up[rows], down[rows] = rates
        return BitRates(
            self._own_or("bit_rate_up", devices, up), self._own_or("bit_rate_down", devices, down)
        )

    def bit_rates_until(self, device: int, when: When) -> float:
        """Return the second at which time next changes the bit rates of a device, or infinity."""
        if all(self._has_own(name, device) for name in _BIT_RATES):
            return math.inf
        distance = self.groups[int(self.group[device])].distance
        moved = math.inf if self._has_own("distance", device) else until(distance, when)
        link: Link = self.links[self.link[device]]
        return min(moved, link.until(when))

    def online(self, devices: Ints, when: When) -> Flags:
        """Return which of these devices can be reached."""
        found = np.ones(len(devices), dtype=bool)
        for number, rows in _rows_by_number(self._availability_of_group[self.group[devices]]):
            keys = self._keys("availability", devices[rows])
            found[rows] = self.groups[number].availability.online(keys, when)
        return found

    def online_until(self, device: int, when: When) -> float:
        """Return the second at which a device may next come or go, or infinity."""
        group: Group = self.groups[self.group[device]]
        return group.availability.until(when)

    def dies(self, devices: Ints, keys: Tensor, when: When) -> Flags:
        """Return which of these devices die during an order that begins now; one key per order."""
        share = self.values("mortality", devices, when)
        died: Flags = rng.uniform(keys, 1)[:, 0].numpy() < share
        return died

    @property
    def lossy(self) -> bool:
        """True if any link may lose columns of a model."""
        return any(group.column_loss.lossy for group in self.groups)

    def column_width(self, devices: Ints) -> Floats:
        """Return the width of the columns in which a model crosses each device's link."""
        widths = np.array([group.column_loss.column_width for group in self.groups])
        return widths[self.group[devices]]

    def delivered_columns(
        self, columns: Ints, devices: Ints, keys: Tensor, when: When, *, active: Active, way: Way
    ) -> Ints:
        """Return how many of a model's columns arrive; one transmission for each key."""
        found = np.empty(len(devices), dtype=np.int64)
        for number, rows in _rows_by_number(self.group[devices]):
            loss = self.groups[number].column_loss
            outage = None
            if loss.minimum_bit_rate is not None:
                outage = self._outage(
                    devices[rows], when, loss.minimum_bit_rate, active=active, way=way
                )
            found[rows] = loss.delivered(keys[rows], columns[rows], outage)
        return found

    def _outage(
        self, devices: Ints, when: When, minimum: float, *, active: Active, way: Way
    ) -> Floats:
        """Return the probability that a column of each device meets a bit rate below `minimum`."""
        keys, distance = self._keys("link", devices), self.values("distance", devices, when)
        found, users = np.empty(len(devices)), np.broadcast_to(active, len(self.links))
        for number, rows in _rows_by_number(self._band_of_link[self.link[devices]]):
            link, sharing = self.links[number], int(users[number])
            found[rows] = link.outage(
                keys[rows], when, distance[rows], minimum, active=sharing, way=way
            )
        name = f"bit_rate_{way}"
        if name in self.device_values:  # a constant bit rate is too low always or never
            own = self.device_values[name][devices]
            found = np.where(np.isnan(own), found, own < minimum)
        return found

    def _keys(self, name: str, devices: Ints) -> Tensor:
        return rng.fold(rng.root(self.seed, f"fleet {name}"), torch.from_numpy(devices))


class _FieldByGroup(NamedTuple):
    """One field of a fleet, group by group."""

    numbers: Sequence[Number]
    plain: Floats  # the plain number of each group; NaN where devices differ or change
    first_equal: Ints  # the first group with an equal number
    drawn: frozenset[int]  # groups whose devices differ or change


def _field_by_group(numbers: Sequence[Number]) -> _FieldByGroup:
    plain = [number if isinstance(number, int | float) else math.nan for number in numbers]
    drawn = frozenset(i for i, n in enumerate(numbers) if not isinstance(n, int | float))
    return _FieldByGroup(numbers, np.array(plain, dtype=np.float64), _first_equal(numbers), drawn)


def _first_equal(values: Sequence[object]) -> Ints:
    """Return for each value the index of the first equal one, so that equal ones are one call."""
    return np.array([values.index(value) for value in values], dtype=np.int32)


def _take(keys: Tensor, rows: Ints) -> Tensor:
    # Torch is slow with an index that is a NumPy array.
    return keys[torch.from_numpy(rows)]


def _rows_by_number(numbers: Ints) -> list[tuple[int, Ints]]:
    """Return each number that occurs with its rows."""
    there = np.flatnonzero(np.bincount(numbers))
    return [(int(n), np.flatnonzero(numbers == n)) for n in there]
