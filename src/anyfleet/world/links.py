"""Links between devices and the server: bits per second each way, watts, and outage.

The closed forms are plain functions; `Steady` and `Shannon` are the parts that a fleet names.
All distances are in metres, powers in watts, bands in hertz, rates in bits per second.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from anyfleet import rng
from anyfleet.arguments import checked
from anyfleet.arrays import Floats
from anyfleet.errors import refuse
from anyfleet.formulas import outage_probability
from anyfleet.world.processes import Wandering
from anyfleet.world.quantities import LEAST, MOST, Number, When, at, bounds, slot, until

# Path loss laws hold from a metre on; nearer, a device would receive more than was sent.
_NEAREST = 1.0
# Decibels beyond this are a slip of units, and the numbers behind them leave the floats.
_LOUDEST = 1000.0


Way = Literal["up", "down"]


class BitRates(NamedTuple):
    """Bits per second of each device, both ways."""

    up: Floats
    down: Floats

    def of(self, way: Way) -> Floats:
        return self.up if way == "up" else self.down


class Link(Protocol):
    """How bits cross the air, for one group of devices."""

    @property
    def power(self) -> float:
        """Watts while sending: the energy of a transmission is these times its seconds.

        Seconds in which the link carries nothing cost nothing, here and in `receive`.
        """

    @property
    def receive(self) -> float:
        """Watts while receiving."""

    @property
    def shared(self) -> bool:
        """Whether all active devices divide one band equally, or each has its own."""

    def rates(self, keys: Tensor, when: When, distance: Floats, active: int) -> BitRates:
        """What each device has now, when `active` devices use the link at the same time."""

    def until(self, when: When) -> float:
        """When time next changes the rates of a device that stands still."""

    def outage(
        self, keys: Tensor, when: When, distance: Floats, minimum: float, *, active: int, way: Way
    ) -> Floats:
        """The probability that what is sent now is lost because its way's rate is too low."""


@checked
@dataclass(frozen=True)
class Steady:
    """Rates that are given, not computed: constants, laws, wandering or replayed numbers.

    The ways up and down are drawn independently. Distance does not matter. With `shared`, the
    numbers are those of the whole medium, which the active devices divide equally.
    """

    up: Number
    down: Number
    power: float = 0.1
    receive: float = 0.0
    shared: bool = False

    def __post_init__(self) -> None:
        refuse(
            (
                *no_rate("Steady.up", self.up),
                *no_rate("Steady.down", self.down),
                *_no_watts("Steady", power=self.power, receive=self.receive),
            )
        )

    def rates(self, keys: Tensor, when: When, distance: Floats, active: int) -> BitRates:
        part = _part(self.shared, active)
        up, down = (
            at(number, rng.fold(keys, way), when) * part
            for way, number in (("up", self.up), ("down", self.down))
        )
        return BitRates(up, down)

    def until(self, when: When) -> float:
        return min(until(self.up, when), until(self.down, when))

    def outage(
        self, keys: Tensor, when: When, distance: Floats, minimum: float, *, active: int, way: Way
    ) -> Floats:
        """Certain or impossible: nothing is known about fades within a transmission."""
        return (self.rates(keys, when, distance, active).of(way) < minimum).astype(np.float64)


@checked
@dataclass(frozen=True)
class Shannon:
    """Capacity of a band after path loss: `b log2(1 + |h| P / (N0 b + I))`.

    `|h|` is `ref_loss_db` at one metre, then falls with distance to the `exponent`. Readings of
    AnycostFL's cell: 0 dB (literal), 15.3 dB (3GPP's intercept for kilometres) and 40 dB, which
    fits its results. `interference` is in watts at the receiver, whatever the band.

    With `fading` (Rayleigh, so `|h|²` is exponential with mean 1) each device meets one fade for
    each server step and way in its rates; a column that may be lost meets a fade of its own, so
    `outage` is the closed form.

    Private bands: each device sends in its own `band`, and the station's signal fills
    `station_band` for all who listen. Shared: the active devices divide both bands equally, and
    the station its power too; a device always sends with all of its `power`. Nothing is published
    about the station: 10 W (40 dBm) over 10 MHz are our assumption.
    """

    band: float = 1e6
    power: float = 0.1
    noise_dbm_per_mhz: float = -114.0
    exponent: float = 3.76
    ref_loss_db: float = 40.0
    interference: float = 0.0
    fading: bool = False
    shared: bool = False
    station_power: float = 10.0
    station_band: float = 1e7
    receive: float = 0.0

    def __post_init__(self) -> None:
        refuse(self._faults())

    def _faults(self) -> Iterator[str]:
        for name in ("band", "power", "exponent", "station_power", "station_band"):
            value = getattr(self, name)
            if not LEAST <= value <= MOST:
                yield (f"Shannon.{name} must be above 0, from {LEAST:g} to {MOST:g}; got {value}.")
        for name in ("noise_dbm_per_mhz", "ref_loss_db"):
            value = getattr(self, name)
            if not abs(value) <= _LOUDEST:
                yield f"Shannon.{name} must lie within ±{_LOUDEST:g} decibels, got {value}."
        yield from _no_watts("Shannon", interference=self.interference, receive=self.receive)

    def rates(self, keys: Tensor, when: When, distance: Floats, active: int) -> BitRates:
        part = _part(self.shared, active)
        up, down = self._snr(distance, active)
        if self.fading:
            up, down = (
                snr * _fade(rng.fold(keys, way), when) for way, snr in (("up", up), ("down", down))
            )
        return BitRates(
            shannon_rate(self.band * part, up), shannon_rate(self.station_band * part, down)
        )

    def until(self, when: When) -> float:
        return math.inf

    def outage(
        self, keys: Tensor, when: When, distance: Floats, minimum: float, *, active: int, way: Way
    ) -> Floats:
        if not self.fading:
            return (self.rates(keys, when, distance, active).of(way) < minimum).astype(np.float64)
        band = self.band if way == "up" else self.station_band
        efficiency = minimum / (band * _part(self.shared, active))
        return outage_probability(efficiency, self._snr(distance, active).of(way))

    def _snr(self, distance: Floats, active: int) -> BitRates:
        """Signal to noise both ways, before any fade."""
        part = _part(self.shared, active)
        gain = path_gain(distance, self.exponent, self.ref_loss_db)
        above, below = (
            noise_watts(self.noise_dbm_per_mhz, band * part) + self.interference
            for band in (self.band, self.station_band)
        )
        return BitRates(gain * self.power / above, gain * self.station_power * part / below)


def shannon_rate(band: float, snr: Floats | float) -> Floats:
    """Bits per second of a band in hertz."""
    # log1p: the rate of a very weak signal is small, not 0.
    rate: Floats = band * np.log1p(np.asarray(snr, dtype=np.float64)) / math.log(2)
    return rate


def noise_watts(dbm_per_mhz: float, band: float) -> float:
    """Thermal noise in a band; densities are given per megahertz, not per hertz."""
    return float(10 ** ((dbm_per_mhz - 30) / 10)) * band / 1e6


def path_gain(distance: Floats | float, exponent: float, ref_loss_db: float) -> Floats:
    """The share of the sent power that arrives; nearer than a metre counts as a metre."""
    metres = np.maximum(np.asarray(distance, dtype=np.float64), _NEAREST)
    gain: Floats = 10 ** (-ref_loss_db / 10) * metres**-exponent
    return gain


def wifi() -> Steady:
    """Wi-Fi 5 as WHALE-FL has it, 80 Mbit/s; the watts are our assumption."""
    return Steady(Wandering(80e6), Wandering(80e6), power=0.8, receive=0.6)


def lte() -> Steady:
    """LTE as WHALE-FL has it, 20 Mbit/s; the watts are our assumption."""
    return Steady(Wandering(20e6), Wandering(20e6), power=1.2, receive=1.0)


def bluetooth() -> Steady:
    """Bluetooth 3.0 as WHALE-FL has it, 10 Mbit/s; the watts are our assumption."""
    return Steady(Wandering(10e6), Wandering(10e6), power=0.1, receive=0.1)


def _fade(keys: Tensor, when: When) -> Floats:
    """`|h|²` of the server step that is under way, exponential with mean 1."""
    drawn = rng.uniform(rng.fold(keys, slot(when, None)), 1)[:, 0].numpy()
    # Half a step away from 0, where nothing at all would arrive.
    fade: Floats = -np.log1p(-(drawn + 2.0**-54))
    return fade


def _part(shared: bool, active: int) -> float:
    return 1 / max(active, 1) if shared else 1.0


def no_rate(name: str, *numbers: Number) -> Iterator[str]:
    """What is wrong with rates that nobody can have."""
    for low, high in map(bounds, numbers):
        if not (low >= 0 and LEAST <= high <= MOST):
            yield (
                f"{name} must be finite bits per second above 0, at most {MOST:g}; got numbers "
                f"from {low:g} to {high:g}; give a law bounds. A device that cannot be reached is "
                "a matter of its availability."
            )
            return


def _no_watts(owner: str, **values: float) -> Iterator[str]:
    for name, value in values.items():
        if not 0 <= value <= MOST:
            yield f"{owner}.{name} must be watts, at least 0 and at most {MOST:g}, got {value}."
