"""The contribution of a device's update: angles, subsets, selection probabilities, norms."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from anyfleet.arrays import Floats, Ints

Statistic = Literal["sum", "mean"]
Stopping = Literal["share", "thesis", "code"]
# Alignments closer than this, relative to what they are sums of, are equal: it is rounding.
_SAME = 1e-12


# --- FedAdp ---------------------------------------------------------------------------------------


def fedadp_angles(dots: Floats, lengths: Floats, reference: Floats | float) -> Floats:
    """Return the angle in radians between each device's vector and the mean (specification §1.17).

    `dots` are the inner products of both, `lengths` those of the devices' vectors, `reference`
    that of the mean (one per device if they are compared on different coordinates). A vector of
    length 0 has no direction and agrees with nothing: pi/2. With all angles equal, `fedadp_weights`
    are those of FedAvg, as they should be when the mean has no direction.
    """
    lengths, reference = np.broadcast_arrays(
        np.asarray(lengths, dtype=np.float64), np.asarray(reference, dtype=np.float64)
    )
    silent = (lengths == 0) | (reference == 0)
    safe = np.where(silent, 1.0, lengths), np.where(silent, 1.0, reference)
    # Divided one after the other: the product of two short lengths could vanish.
    cosines = np.clip(np.asarray(dots, dtype=np.float64) / safe[0] / safe[1], -1.0, 1.0)
    angle: Floats = np.where(silent, np.pi / 2, np.arccos(cosines))
    return angle


def fedadp_smoothed_angles(previous: Floats, visits: Ints, angles: Floats) -> Floats:
    """Return the running mean of each device's angles (FedAdp, specification §1.17).

    `visits` counts this angle too: at the first visit `previous` does not matter. A device
    without a direction keeps what it had: leave it out.
    """
    counts = np.asarray(visits, dtype=np.float64)
    past = np.where(counts > 1, previous, 0.0)
    mean: Floats = ((counts - 1) * past + angles) / counts
    return mean


def fedadp_contribution(angles: Floats, sharpness: float = 5.0) -> Floats:
    """Return the Gompertz map of angles in radians (FedAdp, specification §1.17).

    It is `sharpness` for a device that agrees with the mean and 0 for one against it. With
    sharpness 5, angles below about 0.5 are as good as 0.
    """
    with np.errstate(over="ignore"):  # exp(-infinity) is the limit that is meant
        steep = np.exp(-sharpness * (np.asarray(angles, dtype=np.float64) - 1))
    mapped: Floats = -sharpness * np.expm1(-steep)
    return mapped


def fedadp_weights(sizes: Floats | Ints, angles: Floats, sharpness: float = 5.0) -> Floats:
    """Return the shares of the devices in the mean (FedAdp, specification §1.17).

    They are proportional to `n_k exp(fedadp_contribution)`. They sum to 1, or are all 0 if nobody
    has data.
    """
    mapped = fedadp_contribution(angles, sharpness)
    raw = np.asarray(sizes, dtype=np.float64) * np.exp(mapped - mapped.max(initial=0.0))
    total = raw.sum()
    weights: Floats = raw / total if total > 0 else np.zeros_like(raw)
    return weights


def fedadp_expected_decrease(weights: Floats, angles: Floats) -> float:
    """Return `sum_k a_k cos(theta_k)` of instantaneous or smoothed angles (specification §F.4).

    With weights from the instantaneous angles it is not below FedAvg's; with smoothed ones that
    is not guaranteed.
    """
    return float(np.asarray(weights) @ np.cos(angles))


class FedadpDissimilarity(NamedTuple):
    """The constants A and B with `A ||g|| <= ||g_k|| <= B ||g||` for every device."""

    least: float
    most: float


def fedadp_dissimilarity(lengths: Floats, reference: float) -> FedadpDissimilarity:
    """Return A and B: gradient norms of the devices over that of their mean (specification §F.4).

    Both are infinite where the mean vanishes, and NaN without devices.
    """
    if not len(lengths):
        return FedadpDissimilarity(math.nan, math.nan)
    if reference == 0:
        return FedadpDissimilarity(math.inf, math.inf)
    return FedadpDissimilarity(
        float(np.min(lengths)) / reference, float(np.max(lengths)) / reference
    )


# --- Optimal Aggregation --------------------------------------------------------------------------


def update_alignment(gram: Floats, weights: Floats | Ints, statistic: Statistic = "sum") -> float:
    """Return how far the updates go together: `n ||m||²` of their mean m (specification §1.18).

    `gram` holds their inner products; the weights need not sum to 1. "mean" is `||m||²`, the
    thesis' own statistic, which labels some device in every round. Nobody, or nobody with data:
    0.
    """
    each = np.asarray(weights, dtype=np.float64)
    total = each.sum()
    if not total > 0:
        return 0.0
    square = max(0.0, float(each @ gram @ each) / float(total) ** 2)
    return square * len(each) if statistic == "sum" else square


def alignment_without_each(
    gram: Floats, weights: Floats | Ints, statistic: Statistic = "sum"
) -> Floats:
    """Return what `update_alignment` would be without each of the devices (specification §1.18)."""
    each = np.asarray(weights, dtype=np.float64)
    # Added up anew: taken out of a sum, a device that is most of it would leave mere rounding.
    others = each * (1 - np.eye(len(each)))
    left = others.sum(axis=1)
    some = left > 0
    sums = ((others @ gram) * others).sum(axis=1)
    squares = np.maximum(sums, 0.0) / np.where(some, left, 1.0) ** 2
    count = len(each) - 1 if statistic == "sum" else 1
    without: Floats = np.where(some, count * squares, 0.0)
    return without


def fewest_kept_updates(count: int, share: float = 0.7, rule: Stopping = "share") -> int:
    """Return how many updates must remain at least (Optimal Aggregation, specification §1.18).

    "share": this share of them, rounded up. "thesis": its loop goes on while so many are left,
    so one fewer may remain. "code": all but two, as the authors' program has it.
    """
    if rule == "code":
        return max(1, count - 2)
    kept = math.ceil(share * count - 1e-9)
    return max(1, kept - 1 if rule == "thesis" else kept)


@dataclass(frozen=True, eq=False)
class OptimalSubset:
    """The rows of the updates that remain, that were suspected, and that were left out.

    A row is labelled when the mean gains by its removal, whatever the loss says then. A row that
    is not finite is excluded without being labelled.
    """

    kept: Ints
    labelled: Ints
    excluded: Ints


def optimal_subset(
    gram: Floats,
    weights: Floats | Ints,
    worse: Callable[[Ints, Ints], bool],
    *,
    share: float = 0.7,
    statistic: Statistic = "sum",
    rule: Stopping = "share",
) -> OptimalSubset:
    """Drop one update after the other while alignment and loss agree (specification §1.18).

    `worse(rows, rows_without)` says whether the loss of the mean of the first is below that of
    the second: then the removal hurts, and everything stays as it is. Of equally good removals
    that of the lowest row is looked at. With the rule "thesis" a removal that leaves the alignment
    as it is counts as a gain, unless nobody moves at all.
    """
    each = np.asarray(weights, dtype=np.float64)
    finite = np.isfinite(np.diagonal(gram))
    rows, excluded = np.flatnonzero(finite), [int(row) for row in np.flatnonzero(~finite)]
    labelled: list[int] = []
    least = fewest_kept_updates(len(rows), share, rule)
    while len(rows) > least:
        best = _adverse(gram[np.ix_(rows, rows)], each[rows], statistic, ties=rule == "thesis")
        if best is None:
            break
        labelled.append(int(rows[best]))
        if worse(rows, np.delete(rows, best)):
            break
        excluded.append(int(rows[best]))
        rows = np.delete(rows, best)
    return OptimalSubset(
        rows, np.array(labelled, dtype=np.int64), np.array(excluded, dtype=np.int64)
    )


def _adverse(gram: Floats, weights: Floats, statistic: Statistic, *, ties: bool) -> int | None:
    """Return the row without which alignment gains most; None if it does not gain."""
    now, without = (
        update_alignment(gram, weights, statistic),
        alignment_without_each(gram, weights, statistic),
    )
    # Inner products of either sign cancel; how much they may be wrong goes by their absolutes.
    sizes = np.abs(gram)
    summed = update_alignment(sizes, weights, statistic) + alignment_without_each(
        sizes, weights, statistic
    )
    rounding = _SAME * summed
    best = int(np.flatnonzero(without + rounding >= (without - rounding).max())[0])
    if abs(without[best] - now) <= rounding[best]:
        return best if ties and summed[best] > 0 else None
    return best if without[best] > now else None


# --- FedPNS ---------------------------------------------------------------------------------------


def fedpns_lowered(
    probabilities: Floats,
    labelled: Ints,
    times_labelled: Ints,
    times_selected: Ints,
    *,
    alpha: float = 2.0,
    beta: float = 0.7,
) -> Floats:
    """Return the selection probabilities after a round (FedPNS, specification §1.19).

    `labelled` are devices; the counts are of all devices and include this round. A labelled device
    loses the share `min((x + beta)^alpha, 1)` of its probability, x being how often it was labelled
    when selected; all others gain equally. If everybody is labelled nothing changes. The result
    sums to 1.
    """
    before = np.asarray(probabilities, dtype=np.float64)
    rows = np.unique(np.asarray(labelled, dtype=np.int64))
    others = len(before) - len(rows)
    after = before.copy()
    if len(rows) and others:
        rate = times_labelled[rows] / times_selected[rows]
        loss = before[rows] * np.minimum((rate + beta) ** alpha, 1.0)
        after += loss.sum() / others
        after[rows] = before[rows] - loss
    normal: Floats = after / after.sum()
    return normal


def weighted_draw(probabilities: Floats, count: int, u: Floats) -> Ints:
    """Draw so many without replacement, one after the other in proportion (specification §1.19).

    `u` are uniforms in [0, 1), one per device: the device whose exponential clock rings first, at
    the speed of its probability, is drawn first. Where too few have a chance at all, all of them
    are drawn and the rest is filled evenly from the others.
    """
    chance = np.asarray(probabilities, dtype=np.float64)
    clock = -np.log1p(-np.asarray(u, dtype=np.float64))
    possible = chance > 0
    ring = np.where(possible, clock / np.where(possible, chance, 1.0), clock)
    if 0 < count < possible.sum():
        # Only the first few are put in order: the rest of a large fleet is merely later.
        first = np.argpartition(np.where(possible, ring, np.inf), count - 1)[:count]
        order: Ints = first[np.lexsort((first, ring[first]))]
        return order
    return np.lexsort((ring, ~possible))[:count]


def fedpns_label_distance(own: Floats, all: Floats) -> Floats:
    """Return how far a device's label shares are from everybody's, 0 to 2 (specification §F.5).

    The last axis are the classes.
    """
    distance: Floats = np.abs(np.asarray(own, dtype=np.float64) - all).sum(axis=-1)
    return distance


def selection_entropy(probabilities: Floats) -> float:
    """Return the entropy of selection probabilities in nats (FedPNS, specification §F.5).

    It is log K for K devices with equal probabilities.
    """
    chances = np.asarray(probabilities, dtype=np.float64)
    some = chances[chances > 0]
    return float(-(some * np.log(some)).sum())


# --- BN2 ------------------------------------------------------------------------------------------


def bn2_largest(norms: Floats, count: int) -> Ints:
    """Return the rows with the largest norms, largest first (BN2, specification §1.20).

    Equal norms go by index; NaN comes last.
    """
    order: Ints = np.argsort(-np.asarray(norms, dtype=np.float64), kind="stable")[:count]
    return order
