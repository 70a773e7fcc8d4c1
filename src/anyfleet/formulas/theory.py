"""What the papers' theory says about a run: indices, bounds and conditions."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from anyfleet.arrays import Flags, Floats, Ints

# --- FedPMT -----------------------------------------------------------------------------------


def psi(shares: Floats) -> float:
    """FedPMT's index of how often layers are left out (specification §F.1).

    `shares` of the cohort at each width, smallest width first: the sum over widths of one over
    the share that trains at least so much. Infinite if nobody trains everything.
    """
    reached = np.cumsum(np.asarray(shares, dtype=np.float64)[::-1])
    return float((1 / reached).sum()) if (reached > 0).all() else math.inf


def psi_layer(variance: Floats, trained: Floats) -> float:
    """A sharper index, 1 for FedAvg: the sum of `variance / trained` over layers (specification §F.1).

    `variance` is each layer's share of the gradient variance, `trained` the share of devices
    that update it.
    """
    weights, updated = np.asarray(variance, dtype=np.float64), np.asarray(trained)
    needed = weights > 0
    if (updated[needed] <= 0).any():
        return math.inf
    return float((weights[needed] / updated[needed]).sum())


@dataclass(frozen=True)
class PartialTraining:
    """The constants of FedPMT's bound, under the names of its theorem."""

    smoothness: float  # L
    convexity: float  # mu
    epsilon: float  # of Proposition 1, an assumed constant
    offset: float  # lambda of the learning rate 2 / (mu epsilon (t + lambda))
    start: float  # Gamma_1, the squared distance at the start
    steps: int  # tau
    gradient: float  # G, a bound of the gradient norms
    heterogeneity: float  # Lambda
    variance: float  # delta², of stochastic gradients
    widths: int  # |I|
    devices: int  # |S|


def partial_training_noise(case: PartialTraining, psi: float) -> float:
    """Delta of FedPMT's bound, with the lost factor L and `2 delta² psi` (specification §F.1)."""
    drift = 8 * (case.steps - 1) ** 2 * case.gradient**2
    spread = case.widths * psi + case.devices + case.epsilon
    return (
        drift + 2 * case.smoothness * spread * case.heterogeneity + 2 * case.variance * psi
        if math.isfinite(psi)
        else math.inf
    )


def partial_training_bound(case: PartialTraining, psi: float, rounds: int) -> float:
    """FedPMT's bound of the expected loss above the best one (specification §F.1)."""
    noise = 4 * partial_training_noise(case, psi) / (case.convexity * case.epsilon) ** 2
    distance = (case.offset + 1) * case.start + noise
    return case.smoothness / 2 * distance / (rounds + case.offset)


def partial_training_rate(step: int, *, convexity: float, ratio: float, offset: float) -> float:
    """The learning rate of FedPMT's bound, `2 / (mu eps (t + lambda))` (specification §F.1)."""
    return 2 / (convexity * ratio * (step + offset))


# --- WHALE-FL ---------------------------------------------------------------------------------


def fewest_trainers(trained: Flags) -> int:
    """|M*|: the fewest devices that trained a region which was trained at all (specification §F.2).

    `trained` has the axes rounds, devices and regions. Nobody ever trained: 0.
    """
    counts = np.asarray(trained, dtype=np.int64).sum(axis=1)
    return int(counts[counts > 0].min()) if (counts > 0).any() else 0


def regions_trained(trained: Flags) -> Ints:
    """|S_r|: how many regions somebody trained in each round (specification §F.2)."""
    count: Ints = np.asarray(trained, dtype=np.bool_).any(axis=1).sum(axis=1, dtype=np.int64)
    return count


def step_size_cap(devices: int, fewest: int, iterations: int, smoothness: float) -> float:
    """The largest learning rate that WHALE-FL's theorem allows (specification §F.2).

    `fewest` is |M*|; this is the form that the appendix derives.
    """
    covered, scale = fewest / devices, iterations * smoothness
    return min(1 / 12, math.sqrt(covered) / 16, math.cbrt(covered / 768)) / scale


def omega_squared(theta: Floats, masks: Flags) -> float:
    """The largest share of the model that a device leaves out, in squared norm (specification §F.2).

    One mask per device, in the shape of the model. A model of zeros loses nothing.
    """
    squares = np.asarray(theta, dtype=np.float64) ** 2
    total = squares.sum()
    if not len(masks) or total == 0:
        return 0.0
    return max(float(np.where(mask, 0.0, squares).sum() / total) for mask in masks)


# --- AnycostFL --------------------------------------------------------------------------------


def local_gain(alpha: Floats | float, beta: Floats | float) -> Floats:
    """What a device contributes to learning, `alpha⁴ beta` (AnycostFL, specification §F.3)."""
    gain: Floats = np.asarray(alpha, dtype=np.float64) ** 4 * beta
    return gain


def global_gain(alpha: Floats, beta: Floats | float) -> float:
    """The mean of the local gains, 0 without devices (AnycostFL, specification §F.3)."""
    gains = np.broadcast_to(local_gain(alpha, beta), np.shape(alpha))
    return float(gains.mean()) if gains.size else 0.0


def contraction(least_gain: float, *, convexity: float, smoothness: float, ratio: float) -> float:
    """Z: what a round leaves of the distance to the best loss (AnycostFL, specification §F.3).

    `1 - (nu / lambda)(1 - ratio (1 - g_min))`, with `ratio` the gradient-ratio constant. It means
    something only below 1, that is for ratios under `largest_gradient_ratio`.
    """
    return 1 - convexity / smoothness * (1 - ratio * (1 - least_gain))


def contraction_bound(contraction: float, rounds: int) -> float:
    """What is left of the first round's distance after so many: `Z^(T-1)` (specification §F.3)."""
    return float(contraction ** (rounds - 1))


def largest_gradient_ratio(least_gain: float) -> float:
    """The gradient-ratio constant from which on nothing is proved (specification §F.3)."""
    return 1 / (1 - least_gain) if least_gain < 1 else math.inf


def divergence_index(alpha: Floats | float, beta: Floats | float) -> Floats:
    """How far an update is from the uncompressed one, in squared norm (specification §F.3)."""
    kept = np.asarray(alpha, dtype=np.float64)
    index: Floats = (1 - kept * (2 - kept) * np.sqrt(beta)) ** 2
    return index


# --- FedAdp -----------------------------------------------------------------------------------


def expected_decrease(weights: Floats, angles: Floats) -> float:
    """`sum_k a_k cos(theta_k)`, to be given instantaneous or smoothed angles (specification §F.4).

    With weights from the instantaneous angles it is not below FedAvg's; with smoothed ones that
    is not guaranteed.
    """
    return float(np.asarray(weights) @ np.cos(angles))


def decrease_is_proved(
    angles: Floats, *, dissimilarity: float, smoothness: float, rate: float
) -> bool:
    """Whether FedAdp's bound holds: every cosine at least `B L eta / 2` (specification §F.4)."""
    return bool((np.cos(angles) >= dissimilarity * smoothness * rate / 2).all())


def mean_divergence(gradients: Floats, mean: Floats) -> float:
    """The mean distance of the devices' gradients, one per row, from theirs (specification §F.4)."""
    rows = np.asarray(gradients, dtype=np.float64)
    return float(np.linalg.norm(rows - mean, axis=1).mean()) if len(rows) else 0.0


class Dissimilarity(NamedTuple):
    """`A ||g|| <= ||g_k|| <= B ||g||` for every device."""

    least: float
    most: float


def dissimilarity(lengths: Floats, reference: float) -> Dissimilarity:
    """A and B: gradient norms of the devices over that of their mean (specification §F.4).

    Infinite where the mean vanishes; without devices there is no such number.
    """
    if not len(lengths):
        return Dissimilarity(math.nan, math.nan)
    if reference == 0:
        return Dissimilarity(math.inf, math.inf)
    return Dissimilarity(float(np.min(lengths)) / reference, float(np.max(lengths)) / reference)


# --- FedPNS -----------------------------------------------------------------------------------


def label_distance(own: Floats, all: Floats) -> Floats:
    """How far a device's label shares are from everybody's: 0 to 2 (specification §F.5).

    The last axis are the classes.
    """
    distance: Floats = np.abs(np.asarray(own, dtype=np.float64) - all).sum(axis=-1)
    return distance


def weighted_gradient_bound(probabilities: Floats, bounds: Floats) -> float:
    """`sum_k p_k G_k`, to compare with the plain mean of the bounds (specification §F.5).

    The theorem behind it is a heuristic: its proof uses an inequality that is false.
    """
    return float(np.asarray(probabilities) @ bounds)


def probability_entropy(probabilities: Floats) -> float:
    """Entropy of the selection probabilities in nats; log K for even ones (specification §F.5)."""
    chances = np.asarray(probabilities, dtype=np.float64)
    some = chances[chances > 0]
    return float(-(some * np.log(some)).sum())
