"""Links between devices and the server: bit rates both ways, watts, and outage.

`Steady` and `Shannon` are the links that a fleet names; the closed forms are plain functions.
Distances are in metres, powers in watts, bands in hertz, bit rates in bits per second.
"""

import math
from collections.abc import Iterator, Sequence
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
from anyfleet.world.quantities import (
    LEAST,
    MOST,
    Moments,
    Number,
    Seconds,
    TakesMoments,
    Time,
    When,
    at,
    bounds,
    slot,
    until,
)

# Path loss formulas hold from one metre on; nearer, a device would receive more than was sent.
_NEAREST = 1.0
# Decibels beyond this are a slip of units, and the numbers they stand for overflow.
_LOUDEST = 1000.0


Way = Literal["up", "down"]
WAYS: tuple[Way, Way] = ("up", "down")


class BitRates(NamedTuple):
    """The bit rates of each device, both ways, in bits per second."""

    up: Floats
    down: Floats

    def of(self, way: Way) -> Floats:
        """Return the bit rates of one direction."""
        return self.up if way == "up" else self.down


class Link(Protocol):
    """The link of a group of devices."""

    @property
    def send_power(self) -> float:
        """Watts while sending: the energy of an upload is this power times its seconds.

        Seconds in which the link carries nothing cost nothing, here and in `receive_power`.
        """

    @property
    def receive_power(self) -> float:
        """Watts while receiving."""

    @property
    def shared(self) -> bool:
        """True if all active devices divide one band equally; False if each has its own."""

    def bit_rates(self, keys: Tensor, when: When, distance: Floats, active: int) -> BitRates:
        """Return the bit rates of each device while `active` devices use the link."""

    def until(self, when: When) -> Seconds:
        """Return the second at which time next changes the bit rates at one place, or infinity."""

    def outage(
        self, keys: Tensor, when: When, distance: Floats, minimum: float, *, active: int, way: Way
    ) -> Floats:
        """Return the probability that a column is lost because the bit rate is below `minimum`."""


def bit_rates_of(
    link: Link, keys: Tensor, when: When, distance: Floats, active: int, ways: Sequence[Way]
) -> list[Floats]:
    """Return the bit rates of some directions, without those of the other where that is less."""
    if isinstance(link, Steady):
        return [link.one_way(way, keys, when, active) for way in ways]
    both = link.bit_rates(keys, when, distance, active)
    return [both.of(way) for way in ways]


@checked
@dataclass(frozen=True)
class Steady(TakesMoments):
    """A link whose bit rates are given: constants, distributions, wandering or replayed numbers.

    Up and down are drawn independently. Distance does not matter. With `shared`, the bit rates are
    those of the whole medium, and the active devices divide them equally.
    """

    bit_rate_up: Number  # bits per second
    bit_rate_down: Number  # bits per second
    send_power: float = 0.1  # watts
    receive_power: float = 0.0  # watts
    shared: bool = False

    def __post_init__(self) -> None:
        refuse(
            (
                *bit_rate_faults("Steady.bit_rate_up", self.bit_rate_up),
                *bit_rate_faults("Steady.bit_rate_down", self.bit_rate_down),
                *_watt_faults(
                    "Steady", send_power=self.send_power, receive_power=self.receive_power
                ),
            )
        )

    def bit_rates(self, keys: Tensor, when: Time, distance: Floats, active: int) -> BitRates:
        up, down = (self.one_way(way, keys, when, active) for way in WAYS)
        return BitRates(up, down)

    def one_way(self, way: Way, keys: Tensor, when: Time, active: int) -> Floats:
        """Return the bit rates of one direction."""
        number = self.bit_rate_up if way == "up" else self.bit_rate_down
        # Plain numbers need no keys, which cost more than all the rest.
        own = keys if isinstance(number, int | float) else rng.fold(keys, way)
        return at(number, own, when) * _band_share(self.shared, active)

    def until(self, when: Time) -> Seconds:
        ends = until(self.bit_rate_up, when), until(self.bit_rate_down, when)
        return np.minimum(*ends) if isinstance(when, Moments) else min(ends)

    def outage(
        self, keys: Tensor, when: Time, distance: Floats, minimum: float, *, active: int, way: Way
    ) -> Floats:
        """Return 1 where the bit rate is too low, and 0 elsewhere: this link has no fades."""
        return (self.bit_rates(keys, when, distance, active).of(way) < minimum).astype(np.float64)


@checked
@dataclass(frozen=True)
class Shannon(TakesMoments):
    """A link with Shannon's capacity after path loss: `b log2(1 + |h| P / (N0 b + I))`.

    The gain `|h|` is `ref_loss_db` at one metre, then falls with distance to the `exponent`. Three
    readings of AnycostFL's cell are 0 dB (literal), 15.3 dB (3GPP's intercept for kilometres) and
    40 dB, which fits its results. `interference` is in watts at the receiver, whatever the band.

    With `fading` (Rayleigh, so `|h|²` is exponential with mean 1) the bit rates of a device meet
    one fade in each round and direction. A column that may be lost meets a fade of its own, so
    `outage` is the closed form.

    With private bands each device sends in its own `band`, and the station sends to every device
    in all of `station_band`. With `shared` the active devices divide both bands equally, and the
    station divides its power too; a device always sends with all of its `send_power`. AnycostFL
    says nothing about the station: 10 W (40 dBm) over 10 MHz are our assumption.
    """

    band: float = 1e6
    send_power: float = 0.1
    noise_dbm_per_mhz: float = -114.0
    exponent: float = 3.76
    ref_loss_db: float = 40.0
    interference: float = 0.0
    fading: bool = False
    shared: bool = False
    station_power: float = 10.0
    station_band: float = 1e7
    receive_power: float = 0.0

    def __post_init__(self) -> None:
        refuse(self._faults())

    def _faults(self) -> Iterator[str]:
        for name in ("band", "send_power", "exponent", "station_power", "station_band"):
            value = getattr(self, name)
            if not LEAST <= value <= MOST:
                yield (f"Shannon.{name} must be above 0, from {LEAST:g} to {MOST:g}; got {value}.")
        for name in ("noise_dbm_per_mhz", "ref_loss_db"):
            value = getattr(self, name)
            if not abs(value) <= _LOUDEST:
                yield f"Shannon.{name} must lie within ±{_LOUDEST:g} decibels, got {value}."
        yield from _watt_faults(
            "Shannon", interference=self.interference, receive_power=self.receive_power
        )

    def bit_rates(self, keys: Tensor, when: Time, distance: Floats, active: int) -> BitRates:
        share = _band_share(self.shared, active)
        up, down = self._snr(distance, active)
        if self.fading:
            up, down = (
                snr * _fade(rng.fold(keys, way), when) for way, snr in (("up", up), ("down", down))
            )
        return BitRates(
            shannon_rate(self.band * share, up), shannon_rate(self.station_band * share, down)
        )

    def until(self, when: Time) -> float:
        return math.inf

    def outage(
        self, keys: Tensor, when: Time, distance: Floats, minimum: float, *, active: int, way: Way
    ) -> Floats:
        if not self.fading:
            return (self.bit_rates(keys, when, distance, active).of(way) < minimum).astype(
                np.float64
            )
        band = self.band if way == "up" else self.station_band
        efficiency = minimum / (band * _band_share(self.shared, active))
        return outage_probability(efficiency, self._snr(distance, active).of(way))

    def _snr(self, distance: Floats, active: int) -> BitRates:
        """Return the signal-to-noise ratio both ways, before any fade."""
        share = _band_share(self.shared, active)
        gain = path_gain(distance, self.exponent, self.ref_loss_db)
        above, below = (
            noise_watts(self.noise_dbm_per_mhz, band * share) + self.interference
            for band in (self.band, self.station_band)
        )
        return BitRates(gain * self.send_power / above, gain * self.station_power * share / below)


def shannon_rate(band: float, snr: Floats | float) -> Floats:
    """Return the bits per second of a band in hertz."""
    # With log1p the bit rate of a very weak signal is small, not 0.
    rate: Floats = band * np.log1p(np.asarray(snr, dtype=np.float64)) / math.log(2)
    return rate


def noise_watts(dbm_per_mhz: float, band: float) -> float:
    """Return the thermal noise in a band in watts; the density is per megahertz."""
    return float(10 ** ((dbm_per_mhz - 30) / 10)) * band / 1e6


def path_gain(distance: Floats | float, exponent: float, ref_loss_db: float) -> Floats:
    """Return the share of the sent power that arrives; nearer than a metre counts as a metre."""
    metres = np.maximum(np.asarray(distance, dtype=np.float64), _NEAREST)
    gain: Floats = 10 ** (-ref_loss_db / 10) * metres**-exponent
    return gain


def wifi() -> Steady:
    """Return the Wi-Fi 5 link of WHALE-FL, 80 Mbit/s; the watts are our assumption."""
    return Steady(Wandering(80e6), Wandering(80e6), send_power=0.8, receive_power=0.6)


def lte() -> Steady:
    """Return the LTE link of WHALE-FL, 20 Mbit/s; the watts are our assumption."""
    return Steady(Wandering(20e6), Wandering(20e6), send_power=1.2, receive_power=1.0)


def bluetooth() -> Steady:
    """Return the Bluetooth 3.0 link of WHALE-FL, 10 Mbit/s; the watts are our assumption."""
    return Steady(Wandering(10e6), Wandering(10e6), send_power=0.1, receive_power=0.1)


def _fade(keys: Tensor, when: Time) -> Floats:
    """Return `|h|²` of the round under way, exponential with mean 1."""
    drawn = rng.uniform(rng.fold(keys, slot(when, None)), 1)[:, 0].numpy()
    # Moved off 0 by half the grid of the draws: at 0 nothing at all would arrive.
    fade: Floats = -np.log1p(-(drawn + 2.0**-54))
    return fade


def _band_share(shared: bool, active: int) -> float:
    """Return the share of the band that one device has."""
    return 1 / max(active, 1) if shared else 1.0


def bit_rate_faults(name: str, *numbers: Number) -> Iterator[str]:
    """Yield what is wrong with the first of these numbers that cannot be a bit rate."""
    for low, high in map(bounds, numbers):
        if not (low >= 0 and LEAST <= high <= MOST):
            yield (
                f"{name} must be finite bits per second above 0, at most {MOST:g}; got numbers "
                f"from {low:g} to {high:g}; give a distribution bounds. For a device that cannot "
                "be reached, set its availability."
            )
            return


def _watt_faults(owner: str, **values: float) -> Iterator[str]:
    for name, value in values.items():
        if not 0 <= value <= MOST:
            yield f"{owner}.{name} must be watts, at least 0 and at most {MOST:g}, got {value}."
