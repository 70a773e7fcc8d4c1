"""What is true of the devices, computed when somebody asks; and what they say about it."""

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
from anyfleet.world.group import COLUMNS, Group
from anyfleet.world.links import BitRates, Link, Way
from anyfleet.world.quantities import MOST, Number, When, at, until

_AS_DECLARED = ("memory", "battery", "budget")
_COMPUTING = ("overhead", "latency", "bandwidth", "fixed")
# Numbers that devices may have for themselves.
OWN = (*COLUMNS, "exponent", "slowest", "fastest", "up", "down", "power", "receive")
# What a device measures about itself, and may measure badly.
_NOISY = ("speed", "bit_rate_up", "bit_rate_down", "memory", "battery")


@checked
@dataclass(frozen=True)
class Reports:
    """What policies learn at check-in: fresh and exact by default.

    A report may be `rounds` rounds and `seconds` old, and each of its numbers wrong by a
    log-normal factor whose logarithm deviates by `noise`. What the battery has left and the loss of
    the last answer are never old.
    """

    rounds: int = 0
    seconds: float = 0.0
    noise: float = 0.0

    def __post_init__(self) -> None:
        told = {name: getattr(self, name) for name in ("rounds", "seconds", "noise")}
        refuse(
            f"Reports.{name} must be a number that is not negative, at most {MOST:g}; got {value}."
            for name, value in told.items()
            if not 0 <= value <= MOST
        )

    def when(self, when: When) -> When:
        """The moment that a report of now is about."""
        return When(max(0.0, when.now - self.seconds), max(0, when.round_index - self.rounds))


class Told(NamedTuple):
    """What a device says that only the runtime knows."""

    battery: Floats
    loss: Floats


# Devices that use a band at the same time: on each, or as many on all.
Active = int | Ints


@dataclass(frozen=True, eq=False)
class World:
    """The devices of a run. Policies never see it, only reports (`report`).

    `own` holds numbers that devices have for themselves, by column (`OWN`), one for each device:
    NaN where that of its group or its link counts. They do not change with time. `dealt` says in
    words how devices came to their groups.
    """

    groups: tuple[Group, ...]
    links: tuple[Link, ...]
    reports: Reports
    declared: Devices
    group: Ints  # of every device
    link: Ints  # of every device
    seed: int
    own: Mapping[str, Floats] = field(default_factory=dict)
    dealt: str = ""

    def __len__(self) -> int:
        return len(self.declared)

    def conditions(self, devices: Ints, when: When, active: Active) -> Conditions:
        """What is true of these devices, when so many are `active` on each band.

        Battery and loss are the runtime's: it knows what was spent and said. Here a battery is
        full, and nothing was said.
        """
        rates = self.rates(devices, when, active)
        link = self.link[devices]
        ranges = np.array([group.frequency for group in self.groups])[self.group[devices]]
        return Conditions(
            bit_rate_up=rates.up,
            bit_rate_down=rates.down,
            slowest=self._or_own("slowest", devices, ranges[:, 0]),
            fastest=self._or_own("fastest", devices, ranges[:, 1]),
            send_power=self.power(devices),
            receive_power=self._or_own(
                "receive", devices, np.array([each.receive for each in self.links])[link]
            ),
            loss=np.full(len(devices), np.nan),
            exponent=self._or_own("exponent", devices, self._exponents[self.group[devices]]),
            **{name: self.column(name, devices, when) for name in _AS_DECLARED},
            **self.computing(devices, when),
        )

    def computing(self, devices: Ints, when: When) -> dict[str, Floats]:
        """The conditions that say how long calculating takes and what it costs."""
        load = self.column("load", devices, when)
        return {
            "speed": self.column("speed", devices, when) / load,
            "load": load,
            "coefficient": self.column("energy", devices, when),
            **{name: self.column(name, devices, when) for name in _COMPUTING},
        }

    def computing_until(self, device: int, when: When) -> float:
        """When time next changes how a device calculates."""
        group: Group = self.groups[self.group[device]]
        columns = ("speed", "load", "energy", *_COMPUTING)
        open_ = [name for name in columns if not self._has_own(name, device)]
        return min((until(getattr(group, name), when) for name in open_), default=math.inf)

    def report(self, devices: Ints, when: When, active: Active, own: Told) -> Conditions:
        """What these devices say at check-in."""
        told = self.conditions(devices, self.reports.when(when), active)
        told = replace(told, battery=own.battery, loss=own.loss)
        if not self.reports.noise:
            return told
        keys = rng.fold(self._keys("noise", devices), when.round_index)
        errors = np.exp(self.reports.noise * rng.normal(keys, len(_NOISY)).numpy())
        noisy = {n: getattr(told, n) * errors[:, i] for i, n in enumerate(_NOISY)}
        return replace(told, **noisy)

    def column(self, name: str, devices: Ints, when: When) -> Floats:
        """One column of the fleet, for these devices, now."""
        column, mine = self._columns[name], self.group[devices]
        found = column.plain[mine]
        if not column.drawn:
            return self._or_own(name, devices, found)
        # Keys cost more than all the rest, and plain numbers need none.
        keys = self._keys(name, devices)
        for number, rows in _by(column.alike[mine]):
            if number in column.drawn:
                found[rows] = at(column.numbers[number], _of(keys, rows), when)
        return self._or_own(name, devices, found)

    def _or_own(self, name: str, devices: Ints, found: Floats) -> Floats:
        """What was found, or what a device has for itself."""
        if name not in self.own:
            return found
        own = self.own[name][devices]
        return np.where(np.isnan(own), found, own)

    def _has_own(self, name: str, device: int) -> bool:
        return name in self.own and not math.isnan(self.own[name][device])

    @cached_property
    def on_mains(self) -> bool:
        """Whether no device has a battery that could run down."""
        own = self.own.get("battery", np.empty(0))
        plain = all(group.battery == math.inf for group in self.groups)
        return plain and bool(np.all(np.isnan(own) | (own == math.inf)))

    @cached_property
    def _exponents(self) -> Floats:
        given = (group.exponent for group in self.groups)
        return np.array([math.nan if exponent is None else exponent for exponent in given])

    @cached_property
    def _columns(self) -> dict[str, "_Column"]:
        return {name: _column([getattr(g, name) for g in self.groups]) for name in COLUMNS}

    @cached_property
    def _hours(self) -> Ints:
        return _alike([group.availability for group in self.groups])

    @cached_property
    def _radios(self) -> Ints:
        return _alike(self.links)

    def on_air(self, devices: Ints) -> Ints:
        """How many of these devices use each band. Equal links are one band."""
        return np.bincount(self._radios[self.link[devices]], minlength=len(self.links))

    @cached_property
    def shares_bands(self) -> bool:
        """Whether devices take rate from each other."""
        return any(link.shared for link in self.links)

    def rates(self, devices: Ints, when: When, active: Active) -> BitRates:
        """Bits per second, up and down."""
        users = np.broadcast_to(active, len(self.links))
        keys = self._keys("link", devices)
        distance = self.column("distance", devices, when)
        up, down = np.empty(len(devices)), np.empty(len(devices))
        for number, rows in _by(self._radios[self.link[devices]]):
            link = self.links[number]
            rates = link.rates(_of(keys, rows), when, distance[rows], int(users[number]))
            up[rows], down[rows] = rates
        return BitRates(self._or_own("up", devices, up), self._or_own("down", devices, down))

    def rates_until(self, device: int, when: When) -> float:
        """When time next changes the rates of a device."""
        if self._has_own("up", device) and self._has_own("down", device):
            return math.inf
        distance = self.groups[int(self.group[device])].distance
        moved = math.inf if self._has_own("distance", device) else until(distance, when)
        link: Link = self.links[self.link[device]]
        return min(moved, link.until(when))

    def online(self, devices: Ints, when: When) -> Flags:
        """Which of these devices are there."""
        found = np.ones(len(devices), dtype=bool)
        for number, rows in _by(self._hours[self.group[devices]]):
            keys = self._keys("availability", devices[rows])
            found[rows] = self.groups[number].availability.online(keys, when)
        return found

    def online_until(self, device: int, when: When) -> float:
        """When a device may next come or go."""
        group: Group = self.groups[self.group[device]]
        return group.availability.until(when)

    def dies(self, devices: Ints, keys: Tensor, when: When) -> Flags:
        """Which of these devices die during an order that begins now, one key for each order."""
        share = self.column("mortality", devices, when)
        died: Flags = rng.uniform(keys, 1)[:, 0].numpy() < share
        return died

    @property
    def lossy(self) -> bool:
        """Whether any link may lose a part of a model."""
        return any(group.loss.fails for group in self.groups)

    def column_width(self, devices: Ints) -> Floats:
        """The share of the model's width in which it crosses each device's link."""
        return np.array([group.loss.width for group in self.groups])[self.group[devices]]

    def delivered(
        self, columns: Ints, devices: Ints, keys: Tensor, when: When, *, active: Active, way: Way
    ) -> Ints:
        """How many of a model's columns come through, one transmission for each key."""
        found = np.empty(len(devices), dtype=np.int64)
        for number, rows in _by(self.group[devices]):
            loss = self.groups[number].loss
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
        keys, distance = self._keys("link", devices), self.column("distance", devices, when)
        found, users = np.empty(len(devices)), np.broadcast_to(active, len(self.links))
        for number, rows in _by(self._radios[self.link[devices]]):
            link, sharing = self.links[number], int(users[number])
            found[rows] = link.outage(
                keys[rows], when, distance[rows], minimum, active=sharing, way=way
            )
        if way in self.own:  # a rate that does not change is too low always or never
            own = self.own[way][devices]
            found = np.where(np.isnan(own), found, own < minimum)
        return found

    def power(self, devices: Ints) -> Floats:
        """Watts while sending."""
        watts = np.array([each.power for each in self.links])[self.link[devices]]
        return self._or_own("power", devices, watts)

    def _keys(self, name: str, devices: Ints) -> Tensor:
        return rng.fold(rng.root(self.seed, f"fleet {name}"), torch.from_numpy(devices))


class _Column(NamedTuple):
    """One column of a fleet, group by group."""

    numbers: Sequence[Number]
    plain: Floats  # those that are the same for all devices of a group; else NaN
    alike: Ints  # the first group that says the same
    drawn: frozenset[int]  # groups whose devices differ, or change


def _column(numbers: Sequence[Number]) -> _Column:
    plain = [number if isinstance(number, int | float) else math.nan for number in numbers]
    drawn = frozenset(i for i, n in enumerate(numbers) if not isinstance(n, int | float))
    return _Column(numbers, np.array(plain, dtype=np.float64), _alike(numbers), drawn)


def _alike(parts: Sequence[object]) -> Ints:
    """For each part the first one that equals it: devices that share one are asked together."""
    return np.array([parts.index(part) for part in parts], dtype=np.int32)


def _of(keys: Tensor, rows: Ints) -> Tensor:
    # Torch is slow to take an index that is not its own.
    return keys[torch.from_numpy(rows)]


def _by(numbers: Ints) -> list[tuple[int, Ints]]:
    """The rows of each number that occurs."""
    there = np.flatnonzero(np.bincount(numbers))
    return [(int(n), np.flatnonzero(numbers == n)) for n in there]
