"""Sub-models: how many channels a width keeps, which ones, and which widths a batch trains."""

import math
from typing import Literal

import numpy as np

from anyfleet.arrays import Floats, Ints


def kept_channels(share: float, size: int, rounding: Literal["ceil", "round"] = "ceil") -> int:
    """Return how many channels a width keeps, at least one (specification §0.2).

    Rounded up, so that every layer stays alive; AnycostFL rounds `sqrt(alpha) × size` to the
    nearest.
    """
    number = share * size
    return max(1, round(number) if rounding == "round" else math.ceil(number - 1e-9))


def fedrolex_window(size: int, count: int, round: int, step: int = 1) -> Ints:
    """Return the channels of a round, in the order of the window (FedRolex, specification §1.6).

    Rounds count from 0; the window moves by `step` channels each. Everything is kept in its
    natural order, so that width 1 is FedAvg.
    """
    if count >= size:
        return np.arange(size)
    return (round * step + np.arange(count)) % size


def sampled_widths(grid: Floats, capacity: float, u: Floats) -> Floats:
    """Return the widths of a batch for FedSlim and FjORD (specification §1.7).

    There is one per uniform number, drawn with replacement from those of the grid within the
    device's capacity, or that capacity itself if there are none.
    """
    within = grid[grid <= capacity + 1e-9] if (grid <= capacity + 1e-9).any() else [capacity]
    ratios: Floats = np.asarray(within)[(np.asarray(u) * len(within)).astype(np.int64)]
    return ratios


def progressive_widths(grid: Floats, capacity: float, count: int, u: Floats) -> Floats:
    """Return the widths of a batch for FedResCuE, FedSeq and FedRush (specification §1.7).

    They ascend. The last of the `count` is the device's capacity; the others are drawn without
    replacement from those below it, fewer if there are not so many. `u` has a number for each of
    the grid.
    """
    if count < 1:
        return np.zeros(0)
    below = np.flatnonzero(grid < capacity - 1e-9)
    drawn = below[np.argsort(np.asarray(u)[below], kind="stable")[: count - 1]]
    return np.append(np.sort(grid[drawn]), capacity)
