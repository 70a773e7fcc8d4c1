"""Laws: what one device drew once, and keeps."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import ClassVar

import numpy as np
from torch import Tensor

from anyfleet import rng
from anyfleet.arguments import checked
from anyfleet.arrays import Floats
from anyfleet.errors import refuse
from anyfleet.world.quantities import When

__all__ = ["Categorical", "Disc", "LogNormal", "Normal", "Uniform"]


class _Own(ABC):
    """A law as a quantity: every device keeps its draw, whatever the time."""

    changes: ClassVar[bool] = False

    @abstractmethod
    def draw(self, keys: Tensor) -> Floats:
        """One number for each key."""

    def at(self, keys: Tensor, when: When) -> Floats:
        return self.draw(keys)

    def until(self, when: When) -> float:
        return math.inf


@checked
@dataclass(frozen=True)
class Uniform(_Own):
    """Anything from `low` to `high`, all equally likely."""

    low: float
    high: float

    def __post_init__(self) -> None:
        refuse(_not_finite("Uniform", low=self.low, high=self.high))
        if self.low > self.high:
            raise ValueError(f"Uniform.low, {self.low}, is above Uniform.high, {self.high}.")

    def draw(self, keys: Tensor) -> Floats:
        share = _uniform(keys)
        # Rounding may step over either end.
        return np.clip(self.low * (1 - share) + self.high * share, self.low, self.high)

    def bounds(self) -> tuple[float, float]:
        return self.low, self.high


@checked
@dataclass(frozen=True)
class Categorical(_Own):
    """One of `values`, as often as its weight says; without `weights` all equally often."""

    values: tuple[float, ...]
    weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        refuse(self._faults())
        if self.weights and len(self.weights) != len(self.values):
            raise ValueError(
                f"Categorical.weights needs one entry for each of the {len(self.values)} "
                f"Categorical.values, got {len(self.weights)}."
            )

    def _faults(self) -> Iterator[str]:
        if not self.values or not all(map(math.isfinite, self.values)):
            yield f"Categorical.values must be one or more finite numbers: {self.values}."
        if not all(weight >= 0 for weight in self.weights) or (
            self.weights and not 0 < sum(self.weights) < math.inf
        ):
            yield (
                "Categorical.weights must not be negative, and their sum must be positive and finite; "
                f"got {self.weights}."
            )

    def draw(self, keys: Tensor) -> Floats:
        if not self.weights:
            borders = np.arange(1, len(self.values) + 1) / len(self.values)
        else:
            summed = np.cumsum(self.weights)
            borders = summed / summed[-1]
        # From the right: a value of weight zero has an empty interval, and is never drawn.
        chosen = np.searchsorted(borders, _uniform(keys), side="right")
        return np.array(self.values, dtype=np.float64)[chosen]

    def bounds(self) -> tuple[float, float]:
        weights = self.weights or (1.0,) * len(self.values)
        possible = [value for value, weight in zip(self.values, weights, strict=True) if weight]
        return min(possible), max(possible)


@checked
@dataclass(frozen=True)
class LogNormal(_Own):
    """`median` times the exponential of a normal number of deviation `sigma`.

    What would lie outside of `low` and `high` is put on the nearer of the two.
    """

    median: float
    sigma: float
    low: float = 0.0
    high: float = math.inf

    def __post_init__(self) -> None:
        refuse(self._faults())
        # Otherwise more than half of all devices would share one value, and it is no median.
        if not self.low <= self.median <= self.high:
            raise ValueError(
                f"LogNormal.median must lie between LogNormal.low and LogNormal.high, got "
                f"{self.median} for [{self.low}, {self.high}]."
            )

    def _faults(self) -> Iterator[str]:
        yield from _not_positive("LogNormal", median=self.median)
        for fault in _not_positive("LogNormal", sigma=self.sigma):
            yield f"{fault} For the same value everywhere write the plain number."
        yield from _negative("LogNormal", low=self.low)

    def draw(self, keys: Tensor) -> Floats:
        factor = (self.sigma * rng.normal(keys, 1)[:, 0]).exp()
        return _numpy((self.median * factor).clamp(self.low, self.high))

    def bounds(self) -> tuple[float, float]:
        return self.low, self.high


@checked
@dataclass(frozen=True)
class Disc(_Own):
    """How far from the centre a point is that lies anywhere in a disc; at least `floor`.

    The floor keeps a device off the antenna itself, where no path loss is defined.
    """

    radius: float
    floor: float = 1.0

    def __post_init__(self) -> None:
        faults = _not_positive("Disc", radius=self.radius), _negative("Disc", floor=self.floor)
        refuse(chain(*faults))
        if self.floor > self.radius:
            raise ValueError(
                f"Disc.floor must lie between 0 and Disc.radius, which is {self.radius}; "
                f"got {self.floor}."
            )

    def draw(self, keys: Tensor) -> Floats:
        return np.maximum(self.radius * np.sqrt(_uniform(keys)), self.floor)

    def bounds(self) -> tuple[float, float]:
        return self.floor, self.radius


@checked
@dataclass(frozen=True)
class Normal(_Own):
    """A normal number with exactly this mean and this deviation, also where it is clipped.

    To be able to choose the variance without moving the mean, both sides are clipped equally far
    from the mean, at the nearer of `low` and `high`, and the number that is clipped has a
    deviation so much larger that `deviation` remains. Near the largest possible deviation most
    devices thus sit at either end.
    """

    mean: float
    deviation: float
    low: float = -math.inf
    high: float = math.inf

    def __post_init__(self) -> None:
        faults = (
            _not_finite("Normal", mean=self.mean),
            _negative("Normal", deviation=self.deviation),
        )
        refuse(chain(*faults))
        if not self.low <= self.mean <= self.high:
            raise ValueError(
                f"Normal.mean must lie between Normal.low and Normal.high, got {self.mean} "
                f"for [{self.low}, {self.high}]."
            )
        if 0 < self.deviation >= self._reach:
            raise ValueError(
                f"Normal.deviation must be below {self._reach:g}, the way from the mean to the "
                f"nearer of low and high; got {self.deviation:g}. Nothing between them spreads "
                "further: widen them, or choose less."
            )

    @property
    def _reach(self) -> float:
        """How far from the mean a number may lie, on either side."""
        return min(self.mean - self.low, self.high - self.mean)

    def draw(self, keys: Tensor) -> Floats:
        if not self.deviation:
            return np.full(len(keys), self.mean)
        wide = self.mean + _before_clipping(self.deviation, self._reach) * _normal(keys)
        return np.clip(wide, *self.bounds())

    def bounds(self) -> tuple[float, float]:
        if not self.deviation:
            return self.mean, self.mean
        # The sums are rounded, the given ends are not.
        return max(self.low, self.mean - self._reach), min(self.high, self.mean + self._reach)


@lru_cache(maxsize=256)
def _before_clipping(deviation: float, reach: float) -> float:
    """The deviation of the normal number that has `deviation` once clipped at ± `reach`."""
    if math.isinf(reach):
        return deviation
    # In units of the wanted deviation: reach/deviation is where it would be clipped unwidened.
    below, above = 0.0, reach / deviation
    for _ in range(100):
        middle = (below + above) / 2
        if _clipped_deviation(middle) / middle > deviation / reach:
            below = middle
        else:
            above = middle
    return reach / above


def _clipped_deviation(at: float) -> float:
    """The deviation of a standard normal number that is clipped at ± `at`."""
    inside = math.erf(at / math.sqrt(2))
    density = math.exp(-at * at / 2) / math.sqrt(2 * math.pi)
    outside = math.erfc(at / math.sqrt(2))
    return math.sqrt(max(0.0, inside - 2 * at * density + at * at * outside))


def _uniform(keys: Tensor) -> Floats:
    return _numpy(rng.uniform(keys, 1)[:, 0])


def _normal(keys: Tensor) -> Floats:
    return _numpy(rng.normal(keys, 1)[:, 0])


def _numpy(numbers: Tensor) -> Floats:
    array: Floats = numbers.numpy()
    return array


def _not_finite(owner: str, **numbers: float) -> Iterator[str]:
    for name, number in numbers.items():
        if not math.isfinite(number):
            yield f"{owner}.{name} must be a finite number, got {number}."


def _not_positive(owner: str, **numbers: float) -> Iterator[str]:
    yield from _not_finite(owner, **numbers)
    for name, number in numbers.items():
        if -math.inf < number <= 0:
            yield f"{owner}.{name} must be positive, got {number}."


def _negative(owner: str, **numbers: float) -> Iterator[str]:
    yield from _not_finite(owner, **numbers)
    for name, number in numbers.items():
        if -math.inf < number < 0:
            yield f"{owner}.{name} must not be negative, got {number}."
