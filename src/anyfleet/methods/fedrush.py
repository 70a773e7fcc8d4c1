"""FedRush: FedResCuE without freezing; a wider prefix overwrites what narrower ones learned.

Zhu, Hong, Drew, Zhou: Resilient and communication efficient learning for heterogeneous federated
systems. ICML 2022, Algorithm 6. Specification §1.7. By default only narrower prefixes learn from
the whole model, as in FedResCuE, so that the two differ in freezing alone; `gated=False` is as
printed.
"""

from dataclasses import replace
from typing import Unpack

from anyfleet.arguments import checked
from anyfleet.core.method import Method
from anyfleet.methods.fedavg import Training
from anyfleet.methods.fedrescue import WIDTHS, fedrescue, usual
from anyfleet.papers import FEDRESCUE
from anyfleet.parts.train import Rush
from anyfleet.parts.train.nested import NESTED_WIDTHS
from anyfleet.parts.train.progressive import MomentumRule

PAPER = FEDRESCUE


@checked
def fedrush(
    *,
    widths: tuple[float, ...] = WIDTHS,  # of each level, strongest first
    samples: int = 4,  # nested models that a minibatch trains
    nested_widths: tuple[float, ...] = NESTED_WIDTHS,  # of nested models, to draw from
    gated: bool = True,  # only narrower models learn from the sub-model: see `Rush`
    momentum_rule: MomentumRule = "final",  # which steps have momentum: see `Progressive`
    count: int = 5,
    **training: Unpack[Training],
) -> Method:
    """Return FedRush; arguments as in `fedrescue`, and those of `Rush`."""
    train = Rush(
        usual(**training), nested_widths, samples, gated=gated, momentum_rule=momentum_rule
    )
    return replace(fedrescue(widths=widths, count=count), train=train)
