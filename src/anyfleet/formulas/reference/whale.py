"""WHALE-FL: Fisher information, unit seconds and regions as the paper writes them."""

import numpy as np

from anyfleet.arrays import Floats, Ints


def fisher_trace(gradients: Floats) -> float:
    """Return the Fisher information of a model on a batch (specification §1.10).

    It is the mean squared gradient norm. One row per sample: the gradient of the log-probability of
    a label that was drawn from the model's own prediction. No samples: 0.
    """
    rows = np.asarray(gradients, dtype=np.float64)
    return float((rows**2).sum() / len(rows)) if len(rows) else 0.0


def cheap_fisher_trace(gradient: Floats, batch: int) -> float:
    """Return batch size times the squared norm of the batch's mean gradient (specification §1.10).

    One backward pass instead of one per sample; biased, because samples cancel or add up.
    """
    return batch * float((np.asarray(gradient, dtype=np.float64) ** 2).sum())


def whale_unit_seconds(
    bits: float, bit_rate: Floats, cycles: Floats | float, speed: Floats
) -> Floats:
    """Return the seconds to send and compute a sub-model (WHALE-FL, specification §1.10).

    Infinite without a link or without speed.
    """
    bit_rate, speed = np.asarray(bit_rate, dtype=np.float64), np.asarray(speed, dtype=np.float64)
    able = (bit_rate > 0) & (speed > 0)
    seconds = bits / np.where(able, bit_rate, 1.0) + cycles / np.where(able, speed, 1.0)
    result: Floats = np.where(able, seconds, np.inf)
    return result


def whale_region_sizes(nested: Floats | Ints) -> Floats:
    """Return the sizes of the rings between nested networks (WHALE-FL, specification §1.11).

    `nested` are the sizes of `W^1 ... W^P`, largest first; the last ring is the smallest network
    itself.
    """
    sizes = np.asarray(nested, dtype=np.float64)
    rings: Floats = sizes - np.append(sizes[1:], 0.0)
    return rings


def whale_block_budget(level: Ints | int, blocks: int = 16, ratio: float = 0.5) -> Ints:
    """Return how many equal blocks of channels a level holds (specification §1.11).

    With 16 blocks and ratio 0.5: 16, 8, 4, 2, 1.
    """
    wanted = np.ceil(blocks * ratio ** (np.asarray(level, dtype=np.float64) - 1) - 1e-9)
    held: Ints = np.maximum(wanted, 1).astype(np.int64)
    return held
