"""The simulated devices: what is true of them at any time, and what they report of it."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
from anyfleet.world.availability import Always, Availability
from anyfleet.world.group import FIELDS, Group
from anyfleet.world.links import WAYS, BitRates, Link, Shannon, Steady, Way, bit_rates_of
from anyfleet.world.processes import changes_by_round
from anyfleet.world.quantities import (
    ALL,
    MOST,
    Changing,
    Number,
    Rows,
    Time,
    When,
    ask,
    at,
    bounds,
    changes,
    of_rows,
    some,
    until,
)

_AS_IN_GROUP = ("memory", "battery", "budget")
_COMPUTING = ("overhead", "latency", "bandwidth", "fixed")
_PACE = ("speed", "load", "energy", *_COMPUTING)  # all that decides how a device computes
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


# How many devices use the band of each device at the same time, or one number for all of them.
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

    def conditions(self, devices: Ints, when: Time, active: Active) -> Conditions:
        """Return the true conditions of these devices while `active` devices use their bands.

        The runtime knows the charge of the batteries and the last losses. Here every battery is
        full, and every loss is NaN.
        """
        rates = self.bit_rates(devices, when, active)
        group, link = self.group[devices], self.link[devices]
        ranges = self._frequencies[group]
        return Conditions(
            bit_rate_up=rates.up,
            bit_rate_down=rates.down,
            slowest=self._own_or("slowest", devices, ranges[:, 0]),
            fastest=self._own_or("fastest", devices, ranges[:, 1]),
            send_power=self._own_or("send_power", devices, self._powers[link, 0]),
            receive_power=self._own_or("receive_power", devices, self._powers[link, 1]),
            loss=np.full(len(devices), np.nan),
            exponent=self._own_or("exponent", devices, self._exponents[group]),
            **{name: self.values(name, devices, when) for name in _AS_IN_GROUP},
            **self.compute_conditions(devices, when),
        )

    def compute_conditions(
        self, devices: Ints, when: Time, names: Sequence[str] = _PACE
    ) -> dict[str, Floats]:
        """Return the conditions that decide how long computing takes and what it costs.

        With `names`, only those that come of these fields of the fleet, as of `changing_pace`.
        """
        found = {name: self.values(name, devices, when) for name in names}
        if "speed" in found:
            found["speed"] = found["speed"] / found["load"]
        if "energy" in found:
            found["coefficient"] = found.pop("energy")
        return found

    @cached_property
    def changing_pace(self) -> tuple[str, ...]:
        """The fields that decide how a device computes and may change: speed and load together."""
        found = {name for name in _PACE if any(map(changes, self._fields[name].numbers))}
        both = {"speed", "load"}
        return tuple(name for name in _PACE if name in (found | both if found & both else found))

    def compute_until(self, devices: Ints, when: Time) -> Floats:
        """Return the second at which time next changes how each device computes, or infinity."""
        end = np.full(len(devices), np.inf)
        for name in self.changing_pace:
            changed = self._field_until(name, devices, when)
            end = end if changed is None else np.minimum(end, changed)
        return end

    def _field_until(self, name: str, devices: Ints, when: Time) -> Floats | None:
        """Return the second at which time next changes a field of each device; None: never."""
        by_group = self._fields[name]
        if not by_group.drawn:
            return None
        end = _until(by_group.numbers, by_group.first_equal[self.group[devices]], when)
        if name in self.device_values:
            end = np.where(np.isnan(self.device_values[name][devices]), end, np.inf)
        return end

    def report(
        self, devices: Ints, when: When, true: Conditions, own: RuntimeConditions
    ) -> Conditions:
        """Return what devices report at check-in whose conditions are or were, then, the `true`."""
        reported = true.having(battery=own.battery, loss=own.loss)
        if not self.reports.noise:
            return reported
        keys = rng.fold(self._keys("noise", devices), when.round_index)
        errors = np.exp(self.reports.noise * rng.normal(keys, len(_NOISY)).numpy())
        noisy = {n: getattr(reported, n) * errors[:, i] for i, n in enumerate(_NOISY)}
        return reported.having(**noisy)

    def values(self, name: str, devices: Ints, when: Time) -> Floats:
        """Return the values of one field of the fleet for these devices."""
        by_group, mine = self._fields[name], self.group[devices]
        found = by_group.plain[mine]
        if not by_group.drawn:
            return self._own_or(name, devices, found)
        # Keys cost more than all the rest, and plain numbers need none.
        keys = self._keys(name, devices)
        for number, rows in _rows_by_number(by_group.first_equal[mine]):
            if number in by_group.drawn:
                moment = of_rows(when, rows)
                found[rows] = at(by_group.numbers[number], some(keys, rows), moment)
        return self._own_or(name, devices, found)

    def _own_or(self, name: str, devices: Ints, found: Floats) -> Floats:
        """Return the numbers that devices have of their own, and `found` for the others."""
        if name not in self.device_values:
            return found
        own = self.device_values[name][devices]
        return np.where(np.isnan(own), found, own)

    @cached_property
    def on_mains(self) -> bool:
        """True if no device has a battery that could run down."""
        own = self.device_values.get("battery", np.empty(0))
        plain = all(group.battery == math.inf for group in self.groups)
        return plain and bool(np.all(np.isnan(own) | (own == math.inf)))

    @cached_property
    def _frequencies(self) -> Floats:
        """The slowest and the fastest frequency of every group."""
        return np.array([group.frequency for group in self.groups])

    @cached_property
    def _powers(self) -> Floats:
        """The watts of every link, sending and receiving."""
        return np.array([(link.send_power, link.receive_power) for link in self.links])

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

    def sharing(self, devices: Ints, users: Ints) -> Ints:
        """Return how many of the `users` use the band of each device. Equal links are one band."""
        counts = np.bincount(self._band_of_link[self.link[users]], minlength=len(self.links))
        return counts[self._band_of_link[self.link[devices]]]

    @cached_property
    def shares_bands(self) -> bool:
        """True if devices divide a band, so that each lowers the bit rates of others."""
        return any(link.shared for link in self.links)

    def bit_rates(self, devices: Ints, when: Time, active: Active) -> BitRates:
        """Return the bit rates of these devices while `active` devices use their bands."""
        return BitRates(*self._bit_rates(devices, when, active, WAYS))

    def bit_rate(self, way: Way, devices: Ints, when: Time, active: Active) -> Floats:
        """Return the bit rates of one direction."""
        (rates,) = self._bit_rates(devices, when, active, (way,))
        return rates

    def _bit_rates(
        self, devices: Ints, when: Time, active: Active, ways: Sequence[Way]
    ) -> list[Floats]:
        plain = self._plain_bit_rates
        if plain is not None:
            link = self.link[devices]
            found = [plain[way][link] for way in ways]
        else:
            found = self._computed_bit_rates(devices, when, active, ways)
        pairs = zip(ways, found, strict=True)
        return [self._own_or(f"bit_rate_{way}", devices, rates) for way, rates in pairs]

    @cached_property
    def _plain_bit_rates(self) -> dict[Way, Floats] | None:
        """The bit rates of all links, if they are plain numbers that no device shares."""
        rates: dict[Way, list[float]] = {"up": [], "down": []}
        for link in self.links:
            if type(link) is not Steady or link.shared:
                return None
            for way in WAYS:
                number = link.bit_rate_up if way == "up" else link.bit_rate_down
                if not isinstance(number, int | float):
                    return None
                rates[way].append(float(number))
        return {way: np.array(numbers) for way, numbers in rates.items()}

    def _computed_bit_rates(
        self, devices: Ints, when: Time, active: Active, ways: Sequence[Way]
    ) -> list[Floats]:
        keys = self._keys("link", devices)
        distance = np.zeros(len(devices))
        if not self._given_bit_rates:
            distance = self.values("distance", devices, when)
        found = np.empty((len(ways), len(devices)))
        for number, sharing, rows in self._by_band(devices, active):
            use = _LinkUse(some(keys, rows), distance[rows], sharing, ways)
            found[:, rows] = _bit_rates(self.links[number], of_rows(when, rows), use)
        return list(found)

    def _by_band(self, devices: Ints, active: Active) -> Iterator[tuple[int, int, Rows]]:
        """Yield the rows of devices that have one band, as many of them active, with both."""
        for number, rows in _rows_by_number(self._band_of_link[self.link[devices]]):
            if isinstance(active, int):
                yield number, active, rows
                continue
            for sharing, alike in _rows_by_number(active[rows]):
                whole = isinstance(alike, slice)
                yield number, sharing, rows if whole else np.arange(len(devices))[rows][alike]

    def bit_rates_until(self, devices: Ints, when: Time) -> Floats:
        """Return the second at which time next changes the bit rates of each, or infinity."""
        if self.steady_links:
            return np.full(len(devices), np.inf)
        end = _until(self.links, self._band_of_link[self.link[devices]], when)
        moved = self._field_until("distance", devices, when)
        end = end if moved is None else np.minimum(end, moved)
        own = [self.device_values[n][devices] for n in _BIT_RATES if n in self.device_values]
        # Only a device with both bit rates of its own has none that change.
        return np.where(np.isnan(own).any(axis=0), end, np.inf) if len(own) == 2 else end

    @cached_property
    def _given_bit_rates(self) -> bool:
        """True if no link asks for the distance of its devices."""
        return all(isinstance(link, Steady) for link in self.links)

    @cached_property
    def steady_links(self) -> bool:
        """True if time changes no bit rate, as far as is known of these links."""
        known = all(type(link) in (Steady, Shannon) for link in self.links)
        return known and not any(map(changes, self._numbers_of_links))

    @cached_property
    def rounds_change_links(self) -> bool:
        """True if a new round may change a bit rate, as far as is known of these links."""
        known = all(
            type(link) is Steady or (type(link) is Shannon and not link.fading)
            for link in self.links
        )
        return not known or any(map(changes_by_round, self._numbers_of_links))

    @cached_property
    def _numbers_of_links(self) -> list[Number]:
        """The numbers that decide about bit rates."""
        steady = [link for link in self.links if isinstance(link, Steady)]
        rates = [rate for link in steady for rate in (link.bit_rate_up, link.bit_rate_down)]
        return [*(group.distance for group in self.groups), *rates]

    @cached_property
    def always_online(self) -> bool:
        """True if every device can be reached at any time."""
        return all(group.availability == Always() for group in self.groups)

    def online(self, devices: Ints, when: Time) -> Flags:
        """Return which of these devices can be reached."""
        if self.always_online:
            return np.ones(len(devices), dtype=bool)
        found = np.ones(len(devices), dtype=bool)
        for number, rows in _rows_by_number(self._availability_of_group[self.group[devices]]):
            availability, mine = self.groups[number].availability, devices[rows]
            if availability != Always():
                found[rows] = _online(
                    availability, self._keys("availability", mine), of_rows(when, rows)
                )
        return found

    def online_until(self, devices: Ints, when: Time) -> Floats:
        """Return the second at which each device may next come or go, or infinity."""
        if self.always_online:
            return np.full(len(devices), np.inf)
        parts = [group.availability for group in self.groups]
        return _until(parts, self._availability_of_group[self.group[devices]], when)

    @cached_property
    def mortal(self) -> bool:
        """True if any device may die during an order."""
        own = "mortality" in self.device_values
        return own or any(bounds(group.mortality)[1] > 0 for group in self.groups)

    def dies(self, devices: Ints, keys: Tensor, when: When) -> Flags:
        """Return which of these devices die during an order that begins now; one key per order."""
        share = self.values("mortality", devices, when)
        died: Flags = rng.uniform(keys, 1)[:, 0].numpy() < share
        return died

    @cached_property
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
                sharing = active if isinstance(active, int) else active[rows]
                outage = self._outage(
                    devices[rows], when, loss.minimum_bit_rate, active=sharing, way=way
                )
            found[rows] = loss.delivered(some(keys, rows), columns[rows], outage)
        return found

    def _outage(
        self, devices: Ints, when: When, minimum: float, *, active: Active, way: Way
    ) -> Floats:
        """Return the probability that a column of each device meets a bit rate below `minimum`."""
        keys, distance = self._keys("link", devices), self.values("distance", devices, when)
        found = np.empty(len(devices))
        for number, sharing, rows in self._by_band(devices, active):
            found[rows] = self.links[number].outage(
                some(keys, rows), when, distance[rows], minimum, active=sharing, way=way
            )
        name = f"bit_rate_{way}"
        if name in self.device_values:  # a constant bit rate is too low always or never
            own = self.device_values[name][devices]
            found = np.where(np.isnan(own), found, own < minimum)
        return found

    def _keys(self, name: str, devices: Ints) -> Tensor:
        keys = self._fleet_keys.get(name)
        if keys is None:
            everybody = torch.arange(len(self))
            keys = rng.fold(rng.root(self.seed, f"fleet {name}"), everybody).numpy()
            self._fleet_keys[name] = keys
        return torch.from_numpy(keys[devices])

    @cached_property
    def _fleet_keys(self) -> dict[str, Ints]:
        """The keys of all devices by purpose: to hash them for every question takes longer."""
        return {}


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


class _LinkUse(NamedTuple):
    """The devices that use one link, how many share its band, and which directions are meant."""

    keys: Tensor
    distance: Floats
    active: int
    ways: Sequence[Way]


def _bit_rates(link: Link, when: Time, use: _LinkUse) -> Floats:
    """Return the bit rates of a link: [ways, devices]."""

    def call(moment: When, rows: Rows) -> Floats:
        keys, distance = some(use.keys, rows), use.distance[rows]
        return np.stack(bit_rates_of(link, keys, moment, distance, use.active, use.ways), axis=1)

    return ask(link, when, call).T


def _online(availability: Availability, keys: Tensor, when: Time) -> Flags:
    return ask(
        availability, when, lambda moment, rows: availability.online(some(keys, rows), moment)
    )


def _until(parts: Sequence[Number | Changing], which: Ints, when: Time) -> Floats:
    """Return for each row the second at which time next changes its part, or infinity."""
    end = np.full(len(which), np.inf)
    for number, rows in _rows_by_number(which):
        part = parts[number]
        if not isinstance(part, int | float):
            end[rows] = until(part, of_rows(when, rows))
    return end


def _rows_by_number(numbers: Ints) -> list[tuple[int, Rows]]:
    """Return each number that occurs with its rows."""
    if not len(numbers):
        return []
    if (numbers == numbers[0]).all():
        return [(int(numbers[0]), ALL)]
    there = np.flatnonzero(np.bincount(numbers))
    return [(int(n), np.flatnonzero(numbers == n)) for n in there]
