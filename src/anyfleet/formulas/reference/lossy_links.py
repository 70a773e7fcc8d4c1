"""Lossy links: what to expect of a model that crosses one column by column."""

import numpy as np

from anyfleet.arrays import Floats, Ints
from anyfleet.formulas.links import _least_snr


def delivered_chances(error: float, columns: int) -> Floats:
    """Return the probabilities that 0, 1, ... columns arrive (specification §1.9).

    `(1 - error)^j error`, and `(1 - error)^columns` for all of them. Where `error` is drawn for
    every column, insert its mean.
    """
    arrived = (1 - error) ** np.arange(columns + 1, dtype=np.float64)
    chances: Floats = arrived * np.append(np.full(columns, error), 1.0)
    return chances


def mean_delivered(error: float, columns: int) -> float:
    """Return the expected number of columns that arrive (specification §1.9).

    Where `error` is drawn for every column, insert its mean.
    """
    return float(expected_column_coverage(error, columns).sum())


def all_delivered(error: float, columns: int) -> float:
    """Return the probability that every column arrives (specification §1.9)."""
    return float((1 - error) ** columns)


def none_delivered(error: float, columns: int) -> float:
    """Return the probability that the first column is lost, and all others (specification §1.9)."""
    return error if columns > 0 else 0.0


def delivered_width(columns: Ints | int, share: Floats | float, width: float = 0.125) -> Floats:
    """Return the width of what arrived, never more than the device's own (specification §1.9).

    `share` is the width of the device's sub-model, `width` that of one column.
    """
    reached: Floats = np.minimum(np.asarray(columns) * width, share)
    return reached


def expected_column_coverage(error: float, columns: int) -> Floats:
    """Return how likely each column arrives, `(1 - error)^j` (specification §F.6)."""
    coverage: Floats = (1 - error) ** np.arange(1, columns + 1, dtype=np.float64)
    return coverage


def expected_delivered_share(error: float, columns: int) -> float:
    """Return the expected share of the columns that arrives (specification §F.6).

    It is 1 without columns.
    """
    return mean_delivered(error, columns) / columns if columns else 1.0


def column_coverage(delivered: Ints, columns: int) -> Floats:
    """Return the share of a round's transmissions that brought each column (specification §F.6).

    `delivered` are leading columns per transmission; without any, nothing is covered.
    """
    counts = np.asarray(delivered)
    if not len(counts):
        return np.zeros(columns)
    coverage: Floats = (counts[:, np.newaxis] > np.arange(columns)).mean(axis=0)
    return coverage


def outage_range(
    efficiency: float, power: float, *, noise: float, exponent: float, ref_loss_db: float = 0.0
) -> float:
    """Return how far a link without fading reaches, in metres (specification §F.6).

    `noise` is that of the band and of interference, in watts.
    """
    sent = power * 10 ** (-ref_loss_db / 10)
    return float((sent / (noise * _least_snr(efficiency))) ** (1 / exponent))
