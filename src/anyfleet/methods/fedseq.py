"""FedSeq: FedResCuE without distillation; prefixes learn from labels only.

Zhu, Hong, Drew, Zhou: Resilient and communication efficient learning for heterogeneous federated
systems. ICML 2022, Algorithm 5. Specification §1.7.
"""

from dataclasses import replace
from typing import Unpack

from anyfleet.arguments import checked
from anyfleet.core.method import Method
from anyfleet.methods.fedavg import Training
from anyfleet.methods.fedrescue import WIDTHS, fedrescue, usual
from anyfleet.papers import FEDRESCUE
from anyfleet.parts.train import Progressive
from anyfleet.parts.train.nested import NESTED_WIDTHS
from anyfleet.parts.train.progressive import MomentumRule

PAPER = FEDRESCUE


@checked
def fedseq(
    *,
    widths: tuple[float, ...] = WIDTHS,  # of each level, strongest first
    samples: int = 4,  # nested models that a minibatch trains
    nested_widths: tuple[float, ...] = NESTED_WIDTHS,  # of nested models, to draw from
    momentum_rule: MomentumRule = "final",  # which steps have momentum: see `Progressive`
    count: int = 5,
    **training: Unpack[Training],
) -> Method:
    """Return FedSeq; arguments as in `fedrescue`."""
    base = usual(**training)
    train = Progressive(base, nested_widths, samples, distil=False, momentum_rule=momentum_rule)
    return replace(fedrescue(widths=widths, count=count), train=train)
