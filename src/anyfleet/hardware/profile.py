"""The profile of a machine: the group of a fleet file that explains best what was measured."""

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

WIDTHS = (1.0, 1 / 4, 1 / 16)  # widths that a profile measures
_ROUNDS = 40  # of reweighting, in the fit


@dataclass(frozen=True)
class FittedSpeed:
    """The numbers of a device from which the seconds of an order are computed."""

    speed: float  # FLOP per second
    overhead: float  # seconds for each local step
    latency: float  # seconds for each operator call
    bandwidth: float  # bytes per second that operators read and write

    def seconds(self, sample: Sample) -> float:
        """Return how long the order of a sample should take."""
        handling = sample.local_steps * self.overhead + sample.calls * self.latency
        return handling + sample.flops / self.speed + sample.moved / self.bandwidth

    def error(self, sample: Sample) -> float:
        """Return the error relative to the measured seconds: 0.1 is a tenth too long."""
        return self.seconds(sample) / sample.seconds - 1


@dataclass(frozen=True)
class Profile:
    """A machine: its speed, its free memory, and the measurements behind them.

    `memory` is in the bytes that planners compute: the free bytes, divided by the factor by which
    an order really takes more than they compute.
    """

    fitted: FittedSpeed
    memory: float
    samples: tuple[Sample, ...]
    peaks: tuple[Peak, ...]


def profile(tasks: Mapping[str, Task], batch: int = 16) -> Profile:
    """Return the profile of this machine, measured on some slices of each task."""
    chosen = [(name, slice_) for name, task in tasks.items() for slice_ in slices(task)]
    found = [measure(name, tasks[name], slice_, batch) for name, slice_ in chosen]
    return conclude(found, [weigh(name, task, batch) for name, task in tasks.items()])


def conclude(samples: Sequence[Sample], peaks: Sequence[Peak]) -> Profile:
    """Return the profile that explains the measurements best."""
    excess = max([1.0, *(peak.measured / peak.predicted for peak in peaks)])
    return Profile(fit(samples), free_memory() / excess, tuple(samples), tuple(peaks))


def slices(task: Task) -> tuple[Slice, ...]:
    """Return the slices that a profile measures: three widths, all layers or the last half."""
    middle = len(task.blueprint.layers) // 2
    depths = (0, middle) if middle else (0,)
    return tuple(
        replace(task.blueprint.prefix(width), first_trained_layer=first)
        for width in WIDTHS
        for first in depths
    )


def fit(samples: Sequence[Sample]) -> FittedSpeed:
    """Return the numbers with the least sum of relative errors of the seconds.

    The errors are not squared, so a sample that was disturbed matters less. No number is negative:
    where that would fit best, its term is left out.
    """
    if not samples:
        raise ValueError("fit needs at least one sample.")
    seconds = np.array([s.seconds for s in samples])
    terms = np.array([[s.flops, s.local_steps, s.calls, s.moved] for s in samples])
    per_second, overhead, latency, per_byte = _least(terms / seconds[:, None])
    bandwidth = 1 / per_byte if per_byte else np.inf
    return FittedSpeed(float(1 / per_second), float(overhead), float(latency), float(bandwidth))


def as_toml(found: Profile, name: str = "this machine") -> str:
    """Return the profile as a group of a fleet file."""
    fitted = found.fitted
    row = {
        "name": name,
        "count": 1,
        "speed": _rounded(fitted.speed),
        "overhead": _rounded(fitted.overhead),
        "latency": _rounded(fitted.latency),
        "bandwidth": _rounded(fitted.bandwidth),
        "memory": _rounded(found.memory),
    }
    return "[[fleet.groups]]\n" + to_toml(row)


def free_memory() -> float:
    """Return the bytes that this machine can give to training; 4 GB where it does not say."""
    info = Path("/proc/meminfo")
    if not info.exists():
        return 4e9
    lines = dict(line.split(":") for line in info.read_text().splitlines())
    free = 1024.0 * int(lines["MemAvailable"].split()[0])
    # A container may be allowed less than the machine has.
    limit, used = (Path("/sys/fs/cgroup") / f"memory.{name}" for name in ("max", "current"))
    allowed = limit.read_text().strip() if limit.exists() and used.exists() else "max"
    return min(free, float(allowed) - float(used.read_text())) if allowed.isdecimal() else free


def _least(terms: Floats) -> Floats:
    """Return non-negative x with the least sum of |terms @ x - 1|; its first entry is positive."""
    scale = terms.max(axis=0)
    scaled = terms / np.where(scale > 0, scale, 1.0)
    weights = np.ones(len(terms))
    for _ in range(_ROUNDS):
        best = _least_squares(scaled * weights[:, None], weights)
        # The weights turn squares into absolute values; the floor bounds that of an exact fit.
        weights = np.maximum(np.abs(scaled @ best - 1), 1e-3) ** -0.5
    return best / np.where(scale > 0, scale, 1.0)


def _least_squares(terms: Floats, target: Floats) -> Floats:
    """Return the best non-negative solution, by trying all eight sets of terms with the first."""
    found = []
    others = range(1, terms.shape[1])
    for used in ((0, *rest) for n in range(len(others) + 1) for rest in combinations(others, n)):
        part = np.linalg.lstsq(terms[:, used], target, rcond=None)[0]
        if part[0] > 0 and (part >= 0).all():
            whole = np.zeros(terms.shape[1])
            whole[list(used)] = part
            found.append((float(np.square(terms @ whole - target).sum()), used, whole))
    return min(found, key=lambda each: each[:2])[2]


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
