"""The coordinates that a sub-model holds: layers, channels and columns as masks and indices."""

import math
from collections.abc import Sequence

import numpy as np

from anyfleet.arrays import Flags, Floats, Ints
from anyfleet.formulas.anycost import anycost_channel_order
from anyfleet.formulas.sub_models import kept_channels


def fedpmt_layer_mask(layers: int, trained: int) -> Flags:
    """Return which layers are trained: the last ones (FedPMT, specification §1.3)."""
    return np.arange(layers) >= layers - trained


def feddrop_channels(size: int, count: int, u: Floats) -> Ints:
    """Draw so many channels evenly without replacement, ascending (FedDrop, specification §1.4).

    `u` has a uniform number for every channel.
    """
    kept: Ints = np.sort(np.argsort(np.asarray(u)[:size], kind="stable")[:count])
    return kept


def heterofl_width(level: Ints | int, ratio: float = 0.5) -> Floats:
    """Return the width of a level, 1 for level 1 (HeteroFL, specification §1.5).

    The share of parameters is about its square; exact counts are the blueprint's.
    """
    share: Floats = ratio ** (np.asarray(level, dtype=np.float64) - 1)
    return share


def prefix_mask(shape: Sequence[int], counts: Sequence[int]) -> Flags:
    """Return which coordinates of a tensor lie in its leading block (specification §1.5).

    The new coordinates of a wider block are those of its mask that are not in the smaller one's: an
    L in a matrix.
    """
    mask = np.zeros(tuple(shape), dtype=np.bool_)
    mask[tuple(slice(count) for count in counts)] = True
    return mask


def heterofl_masked_logits(logits: Floats, present: Flags) -> Floats:
    """Return training logits with those of absent classes at 0, not -infinity (specification §1.5).

    They stay in the denominator of the softmax and get no gradient.
    """
    masked: Floats = np.where(present, logits, 0.0)
    return masked


def fedrescue_column_mask(width: float, columns: int) -> Flags:
    """Return which of the model's equal columns lie in a prefix of a width (specification §1.8).

    A column counts when the width reaches its end: FedResCuE's Eq. 4 with `>=`, because with the
    printed `>` nobody would ever update the last one. A width that ends within a column has all of
    it, as `kept_channels` rounds; no width has none.
    """
    whole = kept_channels(width, columns) if width > 0 else 0
    return np.arange(columns) < whole


def fedrescue_padded(received: Floats, cached: Floats, arrived: Flags) -> Floats:
    """Return what a device trains after a lossy download (FedResCuE, specification §1.8).

    Coordinates that arrived are the server's, all others the device's own of its last visit.
    """
    model: Floats = np.where(arrived, received, cached)
    return model


def anycost_channels(norms: Floats, alpha: float) -> Ints:
    """Return the channels of a sub-model of size alpha, ascending (specification §1.12).

    So many that the width is `sqrt(alpha)`; in natural order, so that alpha 1 is the whole model.
    """
    kept: Ints = np.sort(anycost_channel_order(norms)[: anycost_channel_count(alpha, len(norms))])
    return kept


def anycost_channel_count(alpha: float, size: int) -> int:
    """Return how many channels a sub-model of size alpha keeps (AnycostFL, specification §1.12)."""
    return kept_channels(math.sqrt(alpha), size, "round")
