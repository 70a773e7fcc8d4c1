"""A machine as a row of a fleet file: the one that explains best what was measured of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import numpy as np

from anyfleet.arrays import Floats
from anyfleet.config import to_toml
from anyfleet.core.objectives import Task
from anyfleet.elastic import Slice
from anyfleet.hardware.probes import Peak, Sample, measure, weigh

SHARES = (1.0, 1 / 4, 1 / 16)  # widths that a profile measures
_ROUNDS = 40  # of reweighting, in the fit


@dataclass(frozen=True)
class Rates:
    """What `timing` needs to know of a device to say how long an order takes."""

    speed: float  # FLOP per second
    overhead: float  # seconds for each local step
    latency: float  # seconds for each operator call
    bandwidth: float  # bytes per second that operators read and write

    def seconds(self, sample: Sample) -> float:
        """What the order of a sample should take."""
        handling = sample.steps * self.overhead + sample.calls * self.latency
        return handling + sample.flops / self.speed + sample.moved / self.bandwidth

    def error(self, sample: Sample) -> float:
        """Relative to what was measured: 0.1 is a tenth too long."""
        return self.seconds(sample) / sample.seconds - 1


@dataclass(frozen=True)
class Profile:
    """A machine: its rates, its free memory, and what they were found from.

    `memory` is in the planners' account: what is free, divided by how much more than they count an
    order really takes.
    """

    rates: Rates
    memory: float
    samples: tuple[Sample, ...]
    peaks: tuple[Peak, ...]


def profile(tasks: Mapping[str, Task], batch: int = 16) -> Profile:
    """Measures the machine on some slices of each task."""
    chosen = [(name, slice_) for name, task in tasks.items() for slice_ in slices(task)]
    found = [measure(name, tasks[name], slice_, batch) for name, slice_ in chosen]
    return conclude(found, [weigh(name, task, batch) for name, task in tasks.items()])


def conclude(samples: Sequence[Sample], peaks: Sequence[Peak]) -> Profile:
    """The machine that explains what was measured."""
    excess = max([1.0, *(peak.measured / peak.predicted for peak in peaks)])
    return Profile(fit(samples), free_memory() / excess, tuple(samples), tuple(peaks))


def slices(task: Task) -> tuple[Slice, ...]:
    """What a profile measures: three widths, trained whole and from the middle on."""
    middle = len(task.blueprint.layers) // 2
    depths = (0, middle) if middle else (0,)
    return tuple(
        replace(task.blueprint.prefix(share), first_trained_layer=first)
        for share in SHARES
        for first in depths
    )


def fit(samples: Sequence[Sample]) -> Rates:
    """The rates with the least sum of relative errors.

    Not of their squares: a slice that was disturbed matters less. No rate is negative: where that
    would fit best, its column is left out.
    """
    if not samples:
        raise ValueError("fit needs at least one sample.")
    seconds = np.array([s.seconds for s in samples])
    columns = np.array([[s.flops, s.steps, s.calls, s.moved] for s in samples])
    per_second, overhead, latency, per_byte = _least(columns / seconds[:, None])
    bandwidth = 1 / per_byte if per_byte else np.inf
    return Rates(float(1 / per_second), float(overhead), float(latency), float(bandwidth))


def as_toml(found: Profile, name: str = "this machine") -> str:
    """A group of a fleet file."""
    rates = found.rates
    row = {
        "name": name,
        "count": 1,
        "speed": _rounded(rates.speed),
        "overhead": _rounded(rates.overhead),
        "latency": _rounded(rates.latency),
        "bandwidth": _rounded(rates.bandwidth),
        "memory": _rounded(found.memory),
    }
    return "[[fleet.groups]]\n" + to_toml(row)


def free_memory() -> float:
    """Bytes that this machine could give to training; 4 GB where it does not say."""
    told = Path("/proc/meminfo")
    if not told.exists():
        return 4e9
    lines = dict(line.split(":") for line in told.read_text().splitlines())
    free = 1024.0 * int(lines["MemAvailable"].split()[0])
    # A container may be allowed less than the machine has.
    limit, used = (Path("/sys/fs/cgroup") / f"memory.{name}" for name in ("max", "current"))
    allowed = limit.read_text().strip() if limit.exists() and used.exists() else "max"
    return min(free, float(allowed) - float(used.read_text())) if allowed.isdecimal() else free


def _least(columns: Floats) -> Floats:
    """Non-negative x with the least sum of |columns @ x - 1|; the first entry is positive."""
    scale = columns.max(axis=0)
    scaled = columns / np.where(scale > 0, scale, 1.0)
    weights = np.ones(len(columns))
    for _ in range(_ROUNDS):
        best = _least_squares(scaled * weights[:, None], weights)
        # Weighted squares become plain sizes; the floor keeps what fits exactly from taking over.
        weights = np.maximum(np.abs(scaled @ best - 1), 1e-3) ** -0.5
    return best / np.where(scale > 0, scale, 1.0)


def _least_squares(columns: Floats, target: Floats) -> Floats:
    """By trying every set of columns with the first in it: there are eight."""
    found = []
    others = range(1, columns.shape[1])
    for used in ((0, *rest) for n in range(len(others) + 1) for rest in combinations(others, n)):
        part = np.linalg.lstsq(columns[:, used], target, rcond=None)[0]
        if part[0] > 0 and (part >= 0).all():
            whole = np.zeros(columns.shape[1])
            whole[list(used)] = part
            found.append((float(np.square(columns @ whole - target).sum()), used, whole))
    return min(found, key=lambda each: each[:2])[2]


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
