"""FedHQ: upload time and weights of updates that are quantised differently."""

import numpy as np

from anyfleet.arrays import Floats, Ints


def fedhq_upload_seconds(links: Floats, bits: float, sent_fraction: float) -> float:
    """Return the seconds in which devices send a fraction of `bits` (FedHQ, specification §1.16).

    `links` are bit rates, one per device. The fraction is met on average, where a device sends all
    of `bits` at most. Infinite where too many links carry nothing.
    """
    whole = np.sort(bits / np.asarray(links, dtype=np.float64)[np.asarray(links) > 0])
    wanted = sent_fraction * len(links)
    # Up to the k-th moment, k devices are through; the others send on, each at its own bit rate.
    for through, moment in enumerate(whole):
        speed = (1 / whole[through:]).sum()
        seconds = (wanted - through) / speed
        if seconds <= moment * (1 + 1e-12):
            return float(seconds)
    return float("inf")


def fedhq_weights(errors: Floats, sizes: Floats | Ints | float = 1.0) -> Floats:
    """Return the shares `n / (1 + q)` of devices with these errors (FedHQ, specification §1.16).

    `errors` are quantisation errors. The published work weighs by the error of each device; that
    the weights have this very form is not verified. All 0 without data.
    """
    raw = np.asarray(sizes, dtype=np.float64) / (1 + np.asarray(errors, dtype=np.float64))
    total = raw.sum()
    weights: Floats = raw / total if total > 0 else np.zeros_like(raw)
    return weights
