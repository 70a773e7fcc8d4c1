"""FedPMT's tables: shares of the full complexity, and deadlines."""

import math
from collections.abc import Sequence

from anyfleet.formulas.fedpmt import CountedLayer, Rule, fedpmt_complexity


def fedpmt_complexity_shares(
    layers: Sequence[CountedLayer], batch: int, rule: Rule
) -> tuple[float, ...]:
    """Return the share of the full complexity by first trained layer (FedPMT, specification §2).

    It is 1 for layer 0 and falls from layer to layer.
    """
    full = fedpmt_complexity(layers, batch, rule)
    return tuple(
        fedpmt_complexity(layers, batch, rule, first=first) / full for first in range(len(layers))
    )


def fedpmt_deadline_seconds(
    shares: Sequence[float],
    levels: Sequence[float],
    full_seconds: float,
    *,
    digits: int | None = None,
) -> tuple[float, ...]:
    """Return the seconds of each device for its share of the complexity (specification §2).

    The whole model takes `full_seconds` on a device of speed 1; `levels` are the speeds. `digits`
    rounds shares up to so many decimals first, as FedPMT does (2) to get its deadline.
    """
    if len(shares) != len(levels) or not all(level > 0 for level in levels):
        raise ValueError(
            f"fedpmt_deadline_seconds() needs one positive level for each of {len(shares)} shares, "
            f"got {tuple(levels)}."
        )
    rounded = shares if digits is None else [_rounded_up(share, digits) for share in shares]
    return tuple(share * full_seconds / level for share, level in zip(rounded, levels, strict=True))


def _rounded_up(number: float, digits: int) -> float:
    # A number that has so many digits already, but for binary rounding, stays.
    scale = 10.0**digits
    return math.ceil(number * scale - 1e-9) / scale
