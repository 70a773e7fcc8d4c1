"""Numbers over several seeds: means with 95 % confidence intervals, and paired differences.

Seeds are taken for independent draws of a roughly normal number, as Student's t asks for. A
difference between two runs is taken seed by seed: what a seed does to both of them cancels out.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

CONFIDENCE = 0.95
_HALVINGS = 60  # of an interval of angles: more than the digits of a float


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, and its 95 % confidence interval: from `low` to `high`.

    There is no interval (`margin` is NaN) of fewer than two numbers, and none if numbers are
    missing for some of the seeds that were asked for: those that are there were then selected, for
    instance by having reached a target, and an interval would claim too much.
    """

    mean: float  # of the numbers that are there; NaN if there is none, or if one is NaN
    margin: float  # half of the width of the interval, or NaN
    deviation: float  # sample deviation, NaN for fewer than two numbers
    count: int  # of numbers
    of: int  # seeds that were asked for

    @property
    def low(self) -> float:
        """The lower end of the interval, or NaN."""
        return self.mean - self.margin

    @property
    def high(self) -> float:
        """The upper end of the interval, or NaN."""
        return self.mean + self.margin

    @property
    def selected(self) -> bool:
        """True if some of the seeds that were asked for have no number."""
        return self.count < self.of


def estimate(values: Sequence[float], of: int | None = None) -> Estimate:
    """Return the mean of some numbers with its interval; `of` seeds were asked for."""
    count = len(values)
    of = count if of is None else of
    if not 0 <= count <= of:
        raise ValueError(f"{count} numbers cannot be of {of} seeds.")
    if not count or not np.isfinite(values).all():
        mean = float(np.sum(values)) if count else math.nan  # infinite, or NaN
        return Estimate(mean, math.nan, math.nan, count, of)
    mean = float(np.mean(values))
    deviation = float(np.std(values, ddof=1)) if count > 1 else math.nan
    whole = count > 1 and count == of
    margin = t_quantile(count - 1) * deviation / math.sqrt(count) if whole else math.nan
    return Estimate(mean, margin, deviation, count, of)


def paired_difference(
    values: Mapping[int, float], reference: Mapping[int, float], seeds: Collection[int]
) -> Estimate:
    """Return the mean of `values` − `reference` over `seeds`, those that both runs have.

    A seed without a number on either side counts as missing.
    """
    both = [seed for seed in seeds if seed in values and seed in reference]
    return estimate([values[seed] - reference[seed] for seed in both], len(seeds))


@cache
def t_quantile(degrees: int, confidence: float = CONFIDENCE) -> float:
    """Return the t that a Student variable exceeds in size with probability 1 − `confidence`."""
    if degrees < 1:
        raise ValueError(f"degrees of freedom must be at least 1, got {degrees}.")
    if not 0 < confidence < 1:
        raise ValueError(f"a confidence must lie between 0 and 1, got {confidence}.")
    low, high = 0.0, math.pi / 2
    for _ in range(_HALVINGS):
        angle = (low + high) / 2
        low, high = (angle, high) if _within(angle, degrees) < confidence else (low, angle)
    return math.sqrt(degrees) * math.tan((low + high) / 2)


def _within(angle: float, degrees: int) -> float:
    """Return P(|T| ≤ √degrees · tan angle) for a Student variable T.

    The series (Abramowitz and Stegun, 26.7.3 and 26.7.4) is finite and exact. Its terms are powers
    of the cosine: even ones for even degrees, odd ones for odd degrees.
    """
    cosine = math.cos(angle)
    odd = degrees % 2
    term = cosine if odd else 1.0
    total = 0.0
    for power in range(odd, degrees - 1, 2):
        total += term
        term *= cosine * cosine * (power + 1) / (power + 2)
    if not odd:
        return math.sin(angle) * total
    return 2 / math.pi * (angle + math.sin(angle) * total)
