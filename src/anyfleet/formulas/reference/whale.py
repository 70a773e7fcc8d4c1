"""WHALE-FL: Fisher information, unit seconds and regions as the paper writes them."""

import numpy as np

from anyfleet.arrays import Floats, Ints


def fisher_trace(gradients: Floats) -> float:
    """Fisher information of a model on a batch: the mean squared gradient norm (specification §1.10).

    One row per sample: the gradient of the log-probability of a label that was drawn from the
    model's own prediction. No samples: 0.
    """
    rows = np.asarray(gradients, dtype=np.float64)
    return float((rows**2).sum() / len(rows)) if len(rows) else 0.0


def cheap_fisher_trace(gradient: Floats, batch: int) -> float:
    """Batch size times the squared norm of the batch's mean gradient (specification §1.10).

    One backward pass instead of one per sample; biased, because samples cancel or add up.
    """
    return batch * float((np.asarray(gradient, dtype=np.float64) ** 2).sum())


def whale_unit_seconds(bits: float, rate: Floats, cycles: Floats | float, speed: Floats) -> Floats:
    """Seconds to send and compute a sub-network; no rate, no end (WHALE-FL, specification §1.10)."""
    rate, speed = np.asarray(rate, dtype=np.float64), np.asarray(speed, dtype=np.float64)
    able = (rate > 0) & (speed > 0)
    seconds = bits / np.where(able, rate, 1.0) + cycles / np.where(able, speed, 1.0)
    result: Floats = np.where(able, seconds, np.inf)
    return result


def whale_region_sizes(nested: Floats | Ints) -> Floats:
    """Sizes of the rings between nested networks, largest first (WHALE-FL, specification §1.11).

    `nested` are the sizes of `W^1 ... W^P`; the last ring is the smallest network itself.
    """
    sizes = np.asarray(nested, dtype=np.float64)
    rings: Floats = sizes - np.append(sizes[1:], 0.0)
    return rings


def whale_block_budget(level: Ints | int, blocks: int = 16, ratio: float = 0.5) -> Ints:
    """How many equal blocks of channels a level holds: 16, 8, 4, 2, 1 (specification §1.11)."""
    wanted = np.ceil(blocks * ratio ** (np.asarray(level, dtype=np.float64) - 1) - 1e-9)
    held: Ints = np.maximum(wanted, 1).astype(np.int64)
    return held
