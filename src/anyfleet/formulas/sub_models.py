"""Parts of a model: how many channels, which, and the mean of what comes back."""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from anyfleet.arrays import Flags, Floats, Ints

# --- rounds -----------------------------------------------------------------------------------


def pseudo_gradient(update: Floats, rate: float, steps: int = 1) -> Floats:
    """`-Delta / (rate × steps)` of an update `Delta = after - before` (specification §0.1)."""
    gradient: Floats = -np.asarray(update, dtype=np.float64) / (rate * steps)
    return gradient


def cohort_size(devices: int, share: float) -> int:
    """How many devices a share of them is, at least one (FedAvg, specification §1.1)."""
    return max(1, round(share * devices))


def weighted_mean(old: Floats, values: Floats, weights: Floats | Ints) -> Floats:
    """The mean of the devices' models, one per row (FedAvg, specification §1.1).

    Without any weight the old model stays.
    """
    return overlap_mean(old, values, np.ones(np.shape(values), dtype=np.bool_), weights)


def overlap_mean(old: Floats, values: Floats, masks: Flags, weights: Floats | Ints) -> Floats:
    """Of every coordinate, the mean over the devices that have it (specification §0.2).

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


def proximal_step(
    weights: Floats, start: Floats, gradient: Floats, *, rate: float, mu: float = 0.01
) -> Floats:
    """A gradient step with a pull towards the received model (FedProx, specification §1.2)."""
    after: Floats = weights - rate * (gradient + mu * (weights - start))
    return after


# --- layers -----------------------------------------------------------------------------------


def suffix_mask(layers: int, trained: int) -> Flags:
    """Which layers a width trains: the last ones (FedPMT, specification §1.3)."""
    return np.arange(layers) >= layers - trained


def quotas(count: int, widths: int) -> Ints:
    """How many devices each width gets, smallest width first (FedPMT, specification §1.3).

    The remainder goes round from the largest width on.
    """
    whole, rest = divmod(count, widths)
    return np.full(widths, whole, dtype=np.int64) + (np.arange(widths) >= widths - rest)


def computing_seconds(
    cycles: Floats | float, samples: Floats | float, epochs: float, speed: Floats | float
) -> Floats:
    """Seconds of local training: cycles per sample × samples × epochs / speed (specification §1.3)."""
    seconds: Floats = np.asarray(cycles) * np.asarray(samples) * epochs / np.asarray(speed)
    return seconds


def layer_weights(masks: Flags | Ints) -> Floats:
    """`A_k[l]`: each device's share in each layer (FedPMT, specification §1.3).

    A row per device, a column per layer; a layer that nobody trained has no shares.
    """
    trained = np.asarray(masks, dtype=np.float64)
    weights: Floats = trained / np.maximum(trained.sum(axis=0), 1.0)
    return weights


def layer_mean(
    old: Sequence[Floats], losses: Sequence[Sequence[Floats | float]], masks: Flags | Ints
) -> list[Floats]:
    """The layers after a round: `w_l - sum_k A_k[l] (w_l - w_k,l)` (FedPMT, specification §1.3).

    `losses[k][l]` is what device k took away from layer l, `w_l - w_k,l`; it does not matter
    where the device did not train the layer.
    """
    shares = layer_weights(masks)
    after = [np.array(layer, dtype=np.float64) for layer in old]
    for device, row in enumerate(losses):
        for layer, loss in enumerate(row):
            if shares[device, layer] > 0:
                after[layer] -= shares[device, layer] * np.asarray(loss)
    return after


def layer_product(factors: Floats | Ints, layers: Sequence[Floats]) -> list[Floats]:
    """Every layer times its own number (FedPMT's layer-wise product, specification §1.3)."""
    return [
        np.asarray(factor * np.asarray(layer, dtype=np.float64))
        for factor, layer in zip(factors, layers, strict=True)
    ]


# --- channels ---------------------------------------------------------------------------------


def kept_channels(share: float, size: int, rounding: Literal["ceil", "round"] = "ceil") -> int:
    """How many channels a share of them keeps, at least one (specification §0.2).

    Rounded up, so that every layer stays alive; AnycostFL rounds `sqrt(alpha) × size` to the
    nearest.
    """
    number = share * size
    return max(1, round(number) if rounding == "round" else math.ceil(number - 1e-9))


def random_channels(size: int, count: int, u: Floats) -> Ints:
    """So many channels drawn evenly without replacement, ascending (FedDrop, specification §1.4).

    `u` has a uniform number for every channel.
    """
    kept: Ints = np.sort(np.argsort(np.asarray(u)[:size], kind="stable")[:count])
    return kept


def level_share(level: Ints | int, ratio: float = 0.5) -> Floats:
    """The share of channels of a level, 1 for level 1 (HeteroFL, specification §1.5).

    The share of parameters is about its square; exact counts are the blueprint's.
    """
    share: Floats = ratio ** (np.asarray(level, dtype=np.float64) - 1)
    return share


def prefix_mask(shape: Sequence[int], counts: Sequence[int]) -> Flags:
    """Which coordinates of a tensor lie in its leading block (HeteroFL, specification §1.5).

    The new coordinates of a wider block are those of its mask that are not in the smaller one's:
    an L in a matrix.
    """
    mask = np.zeros(tuple(shape), dtype=np.bool_)
    mask[tuple(slice(count) for count in counts)] = True
    return mask


def masked_logits(logits: Floats, present: Flags) -> Floats:
    """Training logits with those of absent classes at 0, not -infinity (specification §1.5).

    They stay in the denominator of the softmax and get no gradient.
    """
    masked: Floats = np.where(present, logits, 0.0)
    return masked


class Moments(NamedTuple):
    """Mean and variance of every channel."""

    mean: Floats
    variance: Floats


def static_moments(batches: Sequence[Floats]) -> Moments:
    """Statistics for testing: plain means over batches (HeteroFL's static BN, specification §1.5).

    A batch has a row per value and a column per channel; its variance is the unbiased one.
    """
    means = [np.mean(batch, axis=0) for batch in batches]
    variances = [np.var(batch, axis=0, ddof=1) for batch in batches]
    return Moments(np.mean(means, axis=0), np.mean(variances, axis=0))


def rolling_window(size: int, count: int, round: int, step: int = 1) -> Ints:
    """The channels of a round, in the order of the window (FedRolex, specification §1.6).

    Rounds count from 0; the window moves by `step` channels each. Everything is kept in its
    natural order, so that share 1 is FedAvg.
    """
    if count >= size:
        return np.arange(size)
    return (round * step + np.arange(count)) % size


def column_mask(width: float, columns: int) -> Flags:
    """Which of the model's equal columns lie in a prefix of this width (specification §1.8).

    A column counts when the width reaches its end: FedResCuE's Eq. 4 with `>=`, because with the
    printed `>` nobody would ever update the last one. A width that ends within a column has all of
    it, as `kept_channels` rounds; no width has none.
    """
    whole = kept_channels(width, columns) if width > 0 else 0
    return np.arange(columns) < whole


def padded(received: Floats, cached: Floats, arrived: Flags) -> Floats:
    """What a device trains after a lossy download (FedResCuE, specification §1.8).

    Coordinates that arrived are the server's, all others the device's own of its last visit.
    """
    model: Floats = np.where(arrived, received, cached)
    return model
