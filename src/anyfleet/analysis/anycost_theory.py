"""AnycostFL's theory, applied to the ledger of any run (specification §F.3)."""

from dataclasses import dataclass

import numpy as np

from anyfleet.arrays import Arrays, Floats
from anyfleet.core.ledger import Ledger
from anyfleet.formulas.anycost import (
    anycost_alpha,
    anycost_contraction,
    anycost_divergence,
    anycost_gain,
)


@dataclass(frozen=True, eq=False)
class AnycostTheory(Arrays):
    """What AnycostFL's theory says of orders, one row each, in the order of a ledger's rows."""

    gain: Floats  # alpha⁴ × sent fraction: what a round learns from the update, at most 1
    divergence: Floats  # how far the update is from that of the whole model, uncompressed
    contraction: Floats  # Z of the round, for the smallest constants: 1 − the least gain in it


def anycost_theory(ledger: Ledger) -> AnycostTheory:
    """Return gain and divergence of every training result, and the contraction of its round.

    Gain and divergence are NaN where no result came; the contraction is that of a round for each of
    its rows, and NaN for a round in which no result counted.
    """
    facts = zip(ledger.channel_share.tolist(), ledger.trained_share.tolist(), strict=True)
    alpha = np.array([anycost_alpha(*shares) for shares in facts], dtype=np.float64)
    gain = anycost_gain(alpha, ledger.measured_sent_fraction)
    return AnycostTheory(
        gain=gain,
        divergence=anycost_divergence(alpha, ledger.measured_sent_fraction),
        contraction=_contractions(ledger, gain),
    )


def _contractions(ledger: Ledger, gain: Floats) -> Floats:
    """Return Z for each row, with a condition number and a gradient ratio of 1."""
    found = np.full(len(ledger), np.nan)
    useful = ledger.counted & ~np.isnan(gain)
    for round_index in np.unique(ledger.round_index[useful]):
        rows = ledger.round_index == round_index
        least = float(gain[rows & useful].min())
        found[rows] = anycost_contraction(least, convexity=1.0, smoothness=1.0, ratio=1.0)
    return found
