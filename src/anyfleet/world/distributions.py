"""Distributions: numbers that each device draws once, and keeps."""

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
from anyfleet.world.quantities import TakesMoments, Time

__all__ = ["Categorical", "Disc", "LogNormal", "Normal", "Uniform"]


class _DrawnOnce(TakesMoments, ABC):
    """A distribution as a quantity: every device keeps its draw, whatever the time."""

    changes: ClassVar[bool] = False

    @abstractmethod
    def draw(self, keys: Tensor) -> Floats:
        """Return one number for each key."""

    def at(self, keys: Tensor, when: Time) -> Floats:
        return self.draw(keys)

    def until(self, when: Time) -> float:
        return math.inf


@checked
@dataclass(frozen=True)
class Uniform(_DrawnOnce):
    """Numbers from `low` to `high`, all equally likely."""

    low: float
    high: float

    def __post_init__(self) -> None:
        refuse(_finite_faults("Uniform", low=self.low, high=self.high))
        if self.low > self.high:
            raise ValueError(
                f"Uniform.low, {self.low}, is above Uniform.high, {self.high}; swap them."
            )

    def draw(self, keys: Tensor) -> Floats:
        share = _uniform(keys)
        # Rounding may pass either end.
        return np.clip(self.low * (1 - share) + self.high * share, self.low, self.high)

    def bounds(self) -> tuple[float, float]:
        return self.low, self.high


@checked
@dataclass(frozen=True)
class Categorical(_DrawnOnce):
    """One of `values`, as likely as its weight says; without `weights` all are equally likely."""

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
                "Categorical.weights must not be negative, and their sum must be positive and "
                f"finite; got {self.weights}."
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
class LogNormal(_DrawnOnce):
    """Log-normal numbers: `median` times the exponential of a normal number of deviation `sigma`.

    A number outside of `low` and `high` is moved to the nearer of the two.
    """

    median: float
    sigma: float
    low: float = 0.0
    high: float = math.inf

    def __post_init__(self) -> None:
        refuse(self._faults())
        # Otherwise more than half of all devices would share one value other than the median.
        if not self.low <= self.median <= self.high:
            raise ValueError(
                f"LogNormal.median must lie between LogNormal.low and LogNormal.high, got "
                f"{self.median} for [{self.low}, {self.high}]."
            )

    def _faults(self) -> Iterator[str]:
        yield from _positive_faults("LogNormal", median=self.median)
        for fault in _positive_faults("LogNormal", sigma=self.sigma):
            yield f"{fault} For the same value everywhere write the plain number."
        yield from _nonnegative_faults("LogNormal", low=self.low)

    def draw(self, keys: Tensor) -> Floats:
        factor = (self.sigma * rng.normal(keys, 1)[:, 0]).exp()
        return _numpy((self.median * factor).clamp(self.low, self.high))

    def bounds(self) -> tuple[float, float]:
        return self.low, self.high


@checked
@dataclass(frozen=True)
class Disc(_DrawnOnce):
    """Distances from the centre of points spread evenly over a disc, but at least `floor`.

    The floor keeps devices away from the antenna itself, where no path loss is defined.
    """

    radius: float  # of the disc
    floor: float = 1.0  # shortest distance

    def __post_init__(self) -> None:
        faults = (
            _positive_faults("Disc", radius=self.radius),
            _nonnegative_faults("Disc", floor=self.floor),
        )
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
class Normal(_DrawnOnce):
    """Normal numbers with exactly this mean and this deviation, even where they are clipped.

    Both sides are clipped equally far from the mean, at the nearer of `low` and `high`, so that
    the deviation can be chosen without moving the mean. The number before clipping has a larger
    deviation, chosen such that `deviation` remains. Near the largest possible deviation most
    devices therefore sit at either end.
    """

    mean: float
    deviation: float
    low: float = -math.inf
    high: float = math.inf

    def __post_init__(self) -> None:
        faults = (
            _finite_faults("Normal", mean=self.mean),
            _nonnegative_faults("Normal", deviation=self.deviation),
        )
        refuse(chain(*faults))
        if not self.low <= self.mean <= self.high:
            raise ValueError(
                f"Normal.mean must lie between Normal.low and Normal.high, got {self.mean} "
                f"for [{self.low}, {self.high}]."
            )
        if 0 < self.deviation >= self._reach:
            raise ValueError(
                f"Normal.deviation must be below {self._reach:g}, the distance from the mean "
                f"to the nearer of low and high; got {self.deviation:g}. Widen the bounds, or "
                "choose a smaller deviation."
            )

    @property
    def _reach(self) -> float:
        """The distance from the mean at which both sides are clipped."""
        return min(self.mean - self.low, self.high - self.mean)

    def draw(self, keys: Tensor) -> Floats:
        if not self.deviation:
            return np.full(len(keys), self.mean)
        wide = self.mean + _before_clipping(self.deviation, self._reach) * _normal(keys)
        return np.clip(wide, *self.bounds())

    def bounds(self) -> tuple[float, float]:
        if not self.deviation:
            return self.mean, self.mean
        # The sums are rounded; the given bounds are exact.
        return max(self.low, self.mean - self._reach), min(self.high, self.mean + self._reach)


@lru_cache(maxsize=256)
def _before_clipping(deviation: float, reach: float) -> float:
    """Return the deviation before clipping at ± `reach` that leaves `deviation` after it."""
    if math.isinf(reach):
        return deviation
    # Search for reach ÷ result by halving: without widening it would be reach ÷ deviation.
    below, above = 0.0, reach / deviation
    for _ in range(100):
        middle = (below + above) / 2
        if _clipped_deviation(middle) / middle > deviation / reach:
            below = middle
        else:
            above = middle
    return reach / above


def _clipped_deviation(at: float) -> float:
    """Return the deviation of a standard normal number that is clipped at ± `at`."""
    inside = math.erf(at / math.sqrt(2))
    density = math.exp(-at * at / 2) / math.sqrt(2 * math.pi)
    outside = math.erfc(at / math.sqrt(2))
    return math.sqrt(max(0.0, inside - 2 * at * density + at * at * outside))


def _uniform(keys: Tensor) -> Floats:
    return _numpy(rng.uniforms(keys, 1)[:, 0])


def _normal(keys: Tensor) -> Floats:
    return _numpy(rng.normal(keys, 1)[:, 0])


def _numpy(numbers: Tensor) -> Floats:
    array: Floats = numbers.numpy()
    return array


def _finite_faults(owner: str, **numbers: float) -> Iterator[str]:
    for name, number in numbers.items():
        if not math.isfinite(number):
            yield f"{owner}.{name} must be a finite number, got {number}."


def _positive_faults(owner: str, **numbers: float) -> Iterator[str]:
    yield from _finite_faults(owner, **numbers)
    for name, number in numbers.items():
        if -math.inf < number <= 0:
            yield f"{owner}.{name} must be positive, got {number}."


def _nonnegative_faults(owner: str, **numbers: float) -> Iterator[str]:
    yield from _finite_faults(owner, **numbers)
    for name, number in numbers.items():
        if -math.inf < number < 0:
            yield f"{owner}.{name} must not be negative, got {number}."
