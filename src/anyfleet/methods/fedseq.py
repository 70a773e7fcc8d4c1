"""FedSeq: FedResCuE without distillation; parts learn from labels only.

Zhu, Hong, Drew, Zhou: Resilient and communication efficient learning for heterogeneous federated
systems. ICML 2022, Algorithm 5. METHODS §1.7.
"""

from dataclasses import replace
from typing import Unpack

from anyfleet.arguments import checked
from anyfleet.core.method import Method
from anyfleet.methods.fedavg import Training
from anyfleet.methods.fedrescue import SHARES, fedrescue, usual
from anyfleet.papers import FEDRESCUE
from anyfleet.parts.train import Progressive
from anyfleet.parts.train.nested import RATIOS
from anyfleet.parts.train.progressive import MomentumRule

PAPER = FEDRESCUE


@checked
def fedseq(
    *,
    shares: tuple[float, ...] = SHARES,
    samples: int = 4,
    ratios: tuple[float, ...] = RATIOS,
    momentum_rule: MomentumRule = "final",
    count: int = 5,
    **training: Unpack[Training],
) -> Method:
    """As `fedrescue`."""
    base = usual(**training)
    train = Progressive(base, ratios, samples, distil=False, momentum_rule=momentum_rule)
    return replace(fedrescue(shares=shares, count=count), train=train)
