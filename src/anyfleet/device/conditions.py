"""The conditions that a device reports: measured on this machine, or given by a file.

Measured are speed, overhead, latency and bandwidth, on real slices of the model and with the
threads that the device lends; bytes that are free; bit rates of the link, by the letters that have
crossed it; and what the system tells of battery, frequencies and load. What nobody knows is left
out. Joules for computing are estimated where the system tells what the machine draws.
"""

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import msgspec
import numpy as np

import anyfleet
from anyfleet.core.messages import Conditions
from anyfleet.device.device_task import DeviceTask
from anyfleet.device.limits import Loan
from anyfleet.device.sensors import Sensors, load_factor, read_sensors
from anyfleet.elastic import width
from anyfleet.errors import ConfigError, Problem
from anyfleet.hardware.probes import Sample, measure, weigh
from anyfleet.hardware.profile import fit, free_memory, slices
from anyfleet.names import near
from anyfleet.store import disk
from anyfleet.wire.check_in import condition_faults

MEASURED = "measured"  # in a file of given conditions: as this machine measures it
_NAMES = tuple(f.name for f in fields(Conditions))
_SECONDS = 4.0  # after which no further slice is measured
_SLICE_SECONDS = 0.3  # of repeating one slice
_BATCH = 16
_LEAST = 1 << 12  # bytes of a transfer below which it tells nothing of the bit rate
_ENOUGH = 1 << 16  # and above which latency hardly matters: smaller ones count until there is one
_NEW = 0.5  # weight of the newest transfer in the mean


class SpeedProfile(msgspec.Struct, frozen=True):
    """What was measured once of a machine with one bundle and so many threads."""

    version: str
    bundle: str
    threads: int
    speed: float  # FLOP per second
    overhead: float  # seconds for each local step
    latency: float  # seconds for each call of an operator
    bandwidth: float | None  # bytes per second; None: no limit was seen
    excess: float  # bytes that training takes, over those that planners compute
    watts: float | None  # that training draws beyond an idle machine; None: nobody tells


def speed_profile(task: DeviceTask, threads: int, file: Path) -> SpeedProfile:
    """Return the profile of this machine, measured in some seconds unless the file has it."""
    own = replace(task, number=0)
    expected = anyfleet.__version__, task.bundle.digest, threads
    try:
        known = msgspec.json.decode(file.read_bytes(), type=SpeedProfile)
        if (known.version, known.bundle, known.threads) == expected:
            return known
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        pass  # it is measured again
    found = _measured(own, threads)
    disk.write(file, msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    return found


def _measured(task: DeviceTask, threads: int) -> SpeedProfile:
    idle = read_sensors().power
    samples = list(_samples(task, threads))
    working = read_sensors().power
    peak, fitted = weigh("model", task, _BATCH), fit(samples)
    return SpeedProfile(
        version=anyfleet.__version__,
        bundle=task.bundle.digest,
        threads=threads,
        speed=fitted.speed,
        overhead=fitted.overhead,
        latency=fitted.latency,
        bandwidth=fitted.bandwidth if math.isfinite(fitted.bandwidth) else None,
        excess=max(1.0, peak.measured / peak.predicted),
        watts=working - idle if working is not None and idle is not None else None,
    )


def _samples(task: DeviceTask, threads: int) -> Iterator[Sample]:
    """Yield how long slices take, the smallest first, as many as there is time for."""
    end = time.monotonic() + _SECONDS
    chosen = sorted(slices(task), key=lambda each: width(each, task.blueprint))
    for number, slice_ in enumerate(chosen):
        if number and time.monotonic() > end:
            return
        yield measure(
            "model", task, slice_, _BATCH, steps=1, threads=threads, enough=_SLICE_SECONDS
        )


# --- the link ---------------------------------------------------------------------------------


@dataclass
class BitRates:
    """The bit rates of a device's link: running means over the letters that crossed it."""

    up: float | None = None  # bits per second; None: not known yet
    down: float | None = None
    _large: set[str] = field(default_factory=set, init=False)  # ways that a large letter has gone

    def sent(self, count: int, seconds: float) -> None:
        """Note that so many bytes were sent in so many seconds."""
        self.up = self._mean("up", self.up, count, seconds)

    def received(self, count: int, seconds: float) -> None:
        """Note that so many bytes were received in so many seconds."""
        self.down = self._mean("down", self.down, count, seconds)

    def _mean(self, way: str, before: float | None, count: int, seconds: float) -> float | None:
        large, known = count >= _ENOUGH, way in self._large
        if count < _LEAST or seconds <= 0 or (known and not large):
            return before
        now = 8.0 * count / seconds
        if large and not known:
            self._large.add(way)
            return now
        return now if before is None else (1 - _NEW) * before + _NEW * now


# --- what is reported -------------------------------------------------------------------------


@dataclass(frozen=True)
class GivenConditions:
    """Conditions from a file: a number for each name, or one for every round, or "measured"."""

    values: Mapping[str, float | Sequence[float] | str] = field(default_factory=dict)

    @property
    def measured(self) -> frozenset[str]:
        """The names that the machine measures all the same."""
        return frozenset(name for name, value in self.values.items() if value == MEASURED)

    def at(self, round_index: int) -> dict[str, float]:
        """Return the numbers of a round; a list that has ended goes on with its last."""
        found: dict[str, float] = {}
        for name, value in self.values.items():
            if isinstance(value, str):
                continue
            number = value
            if isinstance(number, Sequence):
                number = number[min(max(0, round_index), len(number) - 1)]
            if not math.isnan(number):
                found[name] = number
        return found


def read_given(file: Path) -> GivenConditions:
    """Return the conditions in a JSON file; raise ConfigError with all that is wrong in it."""
    try:
        plain = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError([Problem(str(file), "there is no such file.")]) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError([Problem(str(file), f"cannot be read as JSON: {error}")]) from error
    if not isinstance(plain, dict):
        raise ConfigError([Problem(str(file), 'expected {"speed": 1e9, …}.')])
    if problems := [Problem(f"{file}: {name}", w) for name, w in _given_faults(plain)]:
        raise ConfigError(problems)
    return GivenConditions(plain)


def _given_faults(plain: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    for name, value in plain.items():
        numbers = value if isinstance(value, list) else [value]
        if name not in _NAMES:
            yield name, f"is not a condition{near(name, _NAMES) or '.'}"
        elif value == MEASURED:
            continue
        elif not numbers or not all(_is_number(each) for each in numbers):
            yield name, f'must be a number, a list of numbers (one for each round), or "{MEASURED}"'
        else:
            known = [float(str(each)) for each in numbers]
            wrong = [
                fault
                for each in known
                if not math.isnan(each)
                for fault in condition_faults({name: each})
            ]
            yield from ((name, fault) for fault in wrong[:1])


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True)
class Meter:
    """What this machine measures of itself for its reports."""

    profile: SpeedProfile
    loan: Loan
    rates: BitRates

    def conditions(self, sensors: Sensors) -> dict[str, float]:
        """Return the conditions of this machine now; what it does not know is absent."""
        load, own = load_factor(), self.profile
        # The system sets the frequency, not we: planners see a machine with one frequency.
        fastest = sensors.fastest or 1e9
        free = free_memory()
        lent = free if self.loan.memory is None else min(free, float(self.loan.memory))
        watts = own.watts if own.watts is not None and own.watts > 0 else None
        found = {
            "speed": own.speed / load,  # that of now, as planners take it
            "load": load,
            "overhead": own.overhead,
            "latency": own.latency,
            "bandwidth": math.inf if own.bandwidth is None else own.bandwidth,
            "fixed": 0.0,
            "memory": max(0.0, lent / own.excess),
            "battery": math.inf if sensors.battery is None else sensors.battery,
            "budget": math.inf,
            "slowest": fastest,
            "fastest": fastest,
            "bit_rate_up": self.rates.up,
            "bit_rate_down": self.rates.down,
            "coefficient": None if watts is None else watts / fastest**3,
        }
        return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True)
class Reporter:
    """What a device reports of itself: what it measures, unless a file gives its conditions."""

    given: GivenConditions | None
    meter: Meter | None  # None: nothing need be measured

    def conditions(
        self, round_index: int, loss: float | None, sensors: Sensors
    ) -> dict[str, float]:
        """Return the conditions in a round, with the loss of the device's last reply."""
        own = {} if loss is None or not math.isfinite(loss) else {"loss": loss}
        measured = {} if self.meter is None else self.meter.conditions(sensors)
        if self.given is None:
            return own | measured
        wanted = self.given.measured
        some = {name: value for name, value in measured.items() if name in wanted}
        return own | some | self.given.at(round_index)


def assumed(known: Mapping[str, float]) -> dict[str, float]:
    """Return conditions by which a machine may choose that does not know all of itself.

    A link that was never measured takes no time: it is measured by the first order. Where nothing
    limits the joules, it does not matter how many they are.
    """
    free = {"bit_rate_up": math.inf, "bit_rate_down": math.inf}
    if known.get("battery") == known.get("budget") == math.inf:
        free |= {"send_power": 0.0, "receive_power": 0.0, "coefficient": 0.0}
    return {**free, **known}


def as_conditions(known: Mapping[str, float]) -> Conditions:
    """Return conditions of one device; those that are not known are NaN."""
    return Conditions(**{name: np.array([known.get(name, math.nan)]) for name in _NAMES})
