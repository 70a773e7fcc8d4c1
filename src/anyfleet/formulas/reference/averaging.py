"""A round of the papers in numbers: cohort, local step, and the mean of what comes back."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from anyfleet.arrays import Flags, Floats, Ints


def pseudo_gradient(update: Floats, lr: float, steps: int = 1) -> Floats:
    """Return `-Delta / (lr × steps)` of an update `Delta = after - before` (specification §0.1)."""
    gradient: Floats = -np.asarray(update, dtype=np.float64) / (lr * steps)
    return gradient


def fedavg_cohort_size(devices: int, share: float) -> int:
    """Return how many devices a share of them is, at least one (FedAvg, specification §1.1)."""
    return max(1, round(share * devices))


def fedavg_mean(old: Floats, values: Floats, weights: Floats | Ints) -> Floats:
    """Return the mean of the devices' models, one per row (FedAvg, specification §1.1).

    Without any weight the old model stays.
    """
    return overlap_mean(old, values, np.ones(np.shape(values), dtype=np.bool_), weights)


def overlap_mean(old: Floats, values: Floats, masks: Flags, weights: Floats | Ints) -> Floats:
    """Return the mean of every coordinate over the devices that have it (specification §0.2).

    One row per device, in the shape of the whole model; what stands outside of a mask does not
    matter. A coordinate that nobody has, or nobody with weight, keeps its old value. Weights are
    1 for HeteroFL, FedRolex, FedDrop, WHALE-FL and FedResCuE, data sizes for the others.
    """
    shape = (len(weights), *(1,) * np.ndim(old))
    each = np.asarray(weights, dtype=np.float64).reshape(shape)
    counted = np.asarray(masks, dtype=np.bool_) & (each > 0)
    total = np.where(counted, each, 0.0).sum(axis=0)
    parts = (each * np.where(counted, values, 0.0)).sum(axis=0)
    mean: Floats = np.where(total > 0, parts / np.where(total > 0, total, 1.0), old)
    return mean


def fedprox_step(
    weights: Floats, start: Floats, gradient: Floats, *, lr: float, mu: float = 0.01
) -> Floats:
    """Return the weights after a step, pulled to the received model (specification §1.2)."""
    after: Floats = weights - lr * (gradient + mu * (weights - start))
    return after


def fedpmt_quotas(count: int, widths: int) -> Ints:
    """Return how many devices train each number of layers, fewest first (specification §1.3).

    The remainder goes round from the most trained layers on.
    """
    whole, rest = divmod(count, widths)
    return np.full(widths, whole, dtype=np.int64) + (np.arange(widths) >= widths - rest)


def fedpmt_computing_seconds(
    cycles: Floats | float, samples: Floats | float, epochs: float, speed: Floats | float
) -> Floats:
    """Return the seconds of local training (FedPMT, specification §1.3).

    Cycles per sample × samples × epochs / speed.
    """
    seconds: Floats = np.asarray(cycles) * np.asarray(samples) * epochs / np.asarray(speed)
    return seconds


def fedpmt_layer_weights(masks: Flags | Ints) -> Floats:
    """Return `A_k[l]`: each device's share in each layer (FedPMT, specification §1.3).

    A row per device, a column per layer; a layer that nobody trained has no shares.
    """
    trained = np.asarray(masks, dtype=np.float64)
    weights: Floats = trained / np.maximum(trained.sum(axis=0), 1.0)
    return weights


def fedpmt_layer_mean(
    old: Sequence[Floats], losses: Sequence[Sequence[Floats | float]], masks: Flags | Ints
) -> list[Floats]:
    """Return the layers after a round: `w_l - sum_k A_k[l] (w_l - w_k,l)` (specification §1.3).

    `losses[k][l]` is what device k took away from layer l, `w_l - w_k,l`; it does not matter
    where the device did not train the layer.
    """
    shares = fedpmt_layer_weights(masks)
    after = [np.array(layer, dtype=np.float64) for layer in old]
    for device, row in enumerate(losses):
        for layer, loss in enumerate(row):
            if shares[device, layer] > 0:
                after[layer] -= shares[device, layer] * np.asarray(loss)
    return after


def fedpmt_layer_product(factors: Floats | Ints, layers: Sequence[Floats]) -> list[Floats]:
    """Return every layer times its own number (the layer-wise product, specification §1.3)."""
    return [
        np.asarray(factor * np.asarray(layer, dtype=np.float64))
        for factor, layer in zip(factors, layers, strict=True)
    ]


class HeteroflMoments(NamedTuple):
    """The mean and the variance of every channel."""

    mean: Floats
    variance: Floats


def heterofl_static_moments(batches: Sequence[Floats]) -> HeteroflMoments:
    """Return statistics for testing: plain means over batches (static BN, specification §1.5).

    A batch has a row per value and a column per channel; its variance is the unbiased one.
    """
    means = [np.mean(batch, axis=0) for batch in batches]
    variances = [np.var(batch, axis=0, ddof=1) for batch in batches]
    return HeteroflMoments(np.mean(means, axis=0), np.mean(variances, axis=0))


def anycost_mean(updates: Floats, masks: Flags, weights: Floats) -> Floats:
    """Return the mean update of every element over those who sent it (specification §1.12).

    To be subtracted: `w - u`, where `u` is before minus after. 0 where nobody sent the element.
    """
    return overlap_mean(np.zeros(np.shape(updates)[1:]), updates, masks, weights)
