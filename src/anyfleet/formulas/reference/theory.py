"""The theory of the papers about a run: indices, bounds and conditions."""

import math
from dataclasses import dataclass

import numpy as np

from anyfleet.arrays import Flags, Floats, Ints
from anyfleet.formulas.anycost import anycost_gain

# --- FedPMT ---------------------------------------------------------------------------------------


def fedpmt_psi_layer(variance: Floats, trained: Floats) -> float:
    """Return a sharper index than psi: the sum of `variance / trained` (specification §F.1).

    The sum is over layers, and 1 for FedAvg. `variance` is each layer's share of the gradient
    variance, `trained` the share of devices that update it.
    """
    weights, updated = np.asarray(variance, dtype=np.float64), np.asarray(trained)
    needed = weights > 0
    if (updated[needed] <= 0).any():
        return math.inf
    return float((weights[needed] / updated[needed]).sum())


@dataclass(frozen=True)
class FedpmtConstants:
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


def fedpmt_noise(case: FedpmtConstants, psi: float) -> float:
    """Return Delta of FedPMT's bound, with the lost factor L (specification §F.1).

    Its last term is `2 delta² psi`.
    """
    drift = 8 * (case.steps - 1) ** 2 * case.gradient**2
    spread = case.widths * psi + case.devices + case.epsilon
    return (
        drift + 2 * case.smoothness * spread * case.heterogeneity + 2 * case.variance * psi
        if math.isfinite(psi)
        else math.inf
    )


def fedpmt_bound(case: FedpmtConstants, psi: float, rounds: int) -> float:
    """Return FedPMT's bound of the expected loss above the best one (specification §F.1)."""
    noise = 4 * fedpmt_noise(case, psi) / (case.convexity * case.epsilon) ** 2
    distance = (case.offset + 1) * case.start + noise
    return case.smoothness / 2 * distance / (rounds + case.offset)


# --- WHALE-FL -------------------------------------------------------------------------------------


def whale_fewest_trainers(trained: Flags) -> int:
    """Return |M*|: the fewest devices that trained a region which was trained (specification §F.2).

    `trained` has the axes rounds, devices and regions. Nobody ever trained: 0.
    """
    counts = np.asarray(trained, dtype=np.int64).sum(axis=1)
    return int(counts[counts > 0].min()) if (counts > 0).any() else 0


def whale_regions_trained(trained: Flags) -> Ints:
    """Return |S_r|: how many regions somebody trained in each round (specification §F.2)."""
    count: Ints = np.asarray(trained, dtype=np.bool_).any(axis=1).sum(axis=1, dtype=np.int64)
    return count


def whale_step_size_cap(devices: int, fewest: int, iterations: int, smoothness: float) -> float:
    """Return the largest learning rate that WHALE-FL's theorem allows (specification §F.2).

    `fewest` is |M*|; this is the form that the appendix derives.
    """
    covered, scale = fewest / devices, iterations * smoothness
    return min(1 / 12, math.sqrt(covered) / 16, math.cbrt(covered / 768)) / scale


def whale_omega_squared(theta: Floats, masks: Flags) -> float:
    """Return the largest share of the model that a device leaves out (specification §F.2).

    The share is one of the squared norm. One mask per device, in the shape of the model. A model of
    zeros loses nothing.
    """
    squares = np.asarray(theta, dtype=np.float64) ** 2
    total = squares.sum()
    if not len(masks) or total == 0:
        return 0.0
    return max(float(np.where(mask, 0.0, squares).sum() / total) for mask in masks)


# --- AnycostFL ------------------------------------------------------------------------------------


def anycost_global_gain(alpha: Floats, beta: Floats | float) -> float:
    """Return the mean of the devices' gains, 0 without devices (AnycostFL, specification §F.3)."""
    gains = np.broadcast_to(anycost_gain(alpha, beta), np.shape(alpha))
    return float(gains.mean()) if gains.size else 0.0


def anycost_contraction_bound(contraction: float, rounds: int) -> float:
    """Return what is left of the first round's distance, `Z^(T-1)` (specification §F.3)."""
    return float(contraction ** (rounds - 1))


def anycost_largest_gradient_ratio(least_gain: float) -> float:
    """Return the gradient-ratio constant from which on nothing is proved (specification §F.3)."""
    return 1 / (1 - least_gain) if least_gain < 1 else math.inf


# --- FedAdp ---------------------------------------------------------------------------------------


def fedadp_decrease_is_proved(
    angles: Floats, *, dissimilarity: float, smoothness: float, lr: float
) -> bool:
    """Return whether FedAdp's bound holds: cosines at least `B L eta / 2` (specification §F.4)."""
    return bool((np.cos(angles) >= dissimilarity * smoothness * lr / 2).all())


def fedadp_mean_divergence(gradients: Floats, mean: Floats) -> float:
    """Return the mean distance of the devices' gradients from their mean (specification §F.4).

    One gradient per row; 0 without any.
    """
    rows = np.asarray(gradients, dtype=np.float64)
    return float(np.linalg.norm(rows - mean, axis=1).mean()) if len(rows) else 0.0


# --- FedPNS ---------------------------------------------------------------------------------------


def fedpns_gradient_bound(probabilities: Floats, bounds: Floats) -> float:
    """Return `sum_k p_k G_k`, to compare with the plain mean of the bounds (specification §F.5).

    The theorem behind it is a heuristic: its proof uses an inequality that is false.
    """
    return float(np.asarray(probabilities) @ bounds)
