"""Links: how many columns of a model arrive, and how likely a fading link carries nothing."""

import math

import numpy as np

from anyfleet.arrays import Floats, Ints


def leading_columns(u: Floats, error: Floats | float) -> Ints:
    """Return how many leading columns arrive: the first `u < error` ends it (specification §1.9).

    The last axis of the uniforms are the columns; `error` is one number, or one per column.
    """
    arrives = np.asarray(u) >= error
    count: Ints = np.logical_and.accumulate(arrives, axis=-1).sum(axis=-1, dtype=np.int64)
    return count


def outage_probability(efficiency: float, mean_snr: Floats | float) -> Floats:
    """Return P(bit rate < minimum) under Rayleigh fading (specification §F.6).

    `efficiency` is the minimum bit rate per hertz of band.
    """
    lost: Floats = -np.expm1(-_least_snr(efficiency) / np.asarray(mean_snr, dtype=np.float64))
    return lost


def _least_snr(efficiency: float) -> float:
    """Return the signal-to-noise ratio that just carries so many bits per second and hertz."""
    with np.errstate(over="ignore"):  # Infinity is right: no signal carries that.
        return float(np.expm1(efficiency * math.log(2)))
