"""WHALE-FL: how large a sub-model a device takes, and which of its regions."""

import math
from typing import Literal, NamedTuple

import numpy as np

from anyfleet.arrays import Flags, Floats, Ints

WhaleScore = Literal["recommended", "literal", "maxmin"]
# Bounds closer than this say nothing about how important a region is.
_AGREE = 1e-12


def whale_effectiveness(fisher: Floats, batch: int) -> float:
    """Return the training efficiency of a device as WHALE-FL's Eq. 3 has it (specification §1.10).

    `fisher` has a row per stored round and an entry in it per local step. No rounds: 0.
    """
    window = np.asarray(fisher, dtype=np.float64)
    return batch * math.sqrt((window**2).sum() / len(window)) if len(window) else 0.0


def whale_relative_effectiveness(squares: Floats, counts: Ints | Floats) -> Floats:
    """Return the training efficiency on the scale of published thresholds (specification §1.10).

    The thresholds are 10 to 50. `squares` are sums of `(f / f0)²` over the local steps of each
    stored round, with f0 the Fisher information of the initial model at the level that was trained;
    `counts` are the local steps. The last axis is the window: what comes back has one number per
    device, 10 for a device whose model is as informative as at the start, 0 for one that stored
    nothing.
    """
    iterations = np.asarray(counts, dtype=np.float64).sum(axis=-1)
    total = np.asarray(squares, dtype=np.float64).sum(axis=-1)
    known = iterations > 0
    efficiency: Floats = 10 * np.sqrt(np.where(known, total / np.where(known, iterations, 1), 0.0))
    return efficiency


def whale_target_seconds(seconds: Floats) -> float:
    """Return our target of a round: the median of the devices' unit seconds (specification §1.10).

    Devices that never finish are left out; with no others there is no target (infinity).
    """
    finite = seconds[np.isfinite(seconds)]
    return float(np.median(finite)) if len(finite) else math.inf


def whale_utility(
    effectiveness: Floats | float, seconds: Floats | float, target: float, penalty: float = 2.0
) -> Floats:
    """Return the effectiveness, cut by `(target / seconds)^penalty` if late (specification §1.10).

    A device that just meets the target is not late; one that never finishes has utility 0.
    """
    took = np.asarray(seconds, dtype=np.float64)
    late, ends = took > target, np.isfinite(took)
    delay = np.where(late & ends, target / np.where(late & ends, took, 1.0), 1.0)
    useful: Floats = np.where(ends, np.asarray(effectiveness) * delay**penalty, 0.0)
    return useful


def whale_threshold_utility(utility: Floats | float, threshold: float = 20.0) -> Floats:
    """Return U: the utility as a share of the threshold, at most 1 (specification §1.10)."""
    share: Floats = np.minimum(np.asarray(utility, dtype=np.float64) / threshold, 1.0)
    return share


def whale_level(u: Floats | float, levels: int = 5, cap: Ints | int = 1) -> Ints:
    """Return the level of each device, 1 the whole network (WHALE-FL, specification §1.10).

    It is the smallest p with `U >= (levels - p) / levels`, but no larger network than the device's
    `cap` allows. A utility of NaN says nothing: the smallest network.
    """
    known = np.nan_to_num(np.asarray(u, dtype=np.float64), nan=0.0)
    steps = np.floor(known * levels + 1e-12)
    wanted = np.clip(levels - steps, 1, levels).astype(np.int64)
    chosen: Ints = np.maximum(wanted, cap)
    return chosen


def whale_extreme_share(u: Floats) -> float:
    """Return the share of a run's U that are 0 or 1 (WHALE-FL, specification §1.10).

    Near 1 the threshold does not fit the run. Without any U: 0.
    """
    values = np.asarray(u, dtype=np.float64)
    return float(((values <= 0) | (values >= 1)).mean()) if values.size else 0.0


class WhaleRegionFisher(NamedTuple):
    """The Fisher information of each region: mean, least and most over those who trained it."""

    mean: Floats
    low: Floats
    high: Floats


def whale_region_fisher(
    previous: WhaleRegionFisher, values: Floats, trained: Flags
) -> WhaleRegionFisher:
    """Return what this round's devices (rows) say about the regions (specification §1.11).

    A column of `values` and `trained` is a region. One that nobody trained keeps what was known of
    it.
    """
    known = trained.any(axis=0)
    count = np.maximum(trained.sum(axis=0), 1)
    return WhaleRegionFisher(
        np.where(known, np.where(trained, values, 0.0).sum(axis=0) / count, previous.mean),
        np.where(
            known, np.where(trained, values, np.inf).min(axis=0, initial=np.inf), previous.low
        ),
        np.where(
            known, np.where(trained, values, -np.inf).max(axis=0, initial=-np.inf), previous.high
        ),
    )


def whale_importance(
    fisher: Floats, low: Floats | float, high: Floats | float, epsilon: float = 1e-3
) -> Floats:
    """Return F: the Fisher information of each region between its bounds (specification §1.11).

    Where the bounds agree every region is as important as another: 1.
    """
    values = np.asarray(fisher, dtype=np.float64)
    spread = np.asarray(high, dtype=np.float64) - low
    apart = spread >= _AGREE
    within: Floats = np.where(apart, (values - low + epsilon) / np.where(apart, spread, 1.0), 1.0)
    return within


def whale_scores(importance: Floats, counts: Ints, score: WhaleScore = "recommended") -> Floats:
    """Return how much each region is wanted, given how often it was trained (specification §1.11).

    "recommended" favours what is important and was rarely trained. "literal" is the paper's line
    6, which favours what was trained most. "maxmin" raises the least product first, which is the
    paper's objective.
    """
    if score == "recommended":
        wanted: Floats = importance / (1 + np.asarray(counts))
    else:
        product = importance * np.asarray(counts)
        wanted = product if score == "literal" else -product
    return wanted


def whale_blocks(scores: Floats, counts: Ints, sizes: Floats | Ints, budget: float) -> Ints:
    """Return the regions a device trains, ascending (WHALE-FL's Algorithm 2, specification §1.11).

    From the highest score down (ties: trained less often, then lower index), whatever still fits
    is taken and the rest is skipped. If nothing fits, the smallest region.
    """
    order = np.lexsort((np.arange(len(scores)), counts, -np.asarray(scores)))
    # Sizes may be shares of a whole, which do not add up exactly.
    room = budget * (1 + 1e-9)
    taken: list[int] = []
    for region in order:
        if sizes[region] <= room:
            taken.append(int(region))
            room -= float(sizes[region])
    return np.array(sorted(taken) or [int(np.argmin(sizes))], dtype=np.int64)
