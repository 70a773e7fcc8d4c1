"""FedResCuE: every prefix of a model is trained, so that links may cut it anywhere.

Zhu, Hong, Drew, Zhou: Resilient and communication efficient learning for heterogeneous federated
systems. ICML 2022. Specification §1.7, §1.8. The paper leaves open how momentum acts while prefixes
are trained: by default only in the last step of each minibatch. For a device of less than full
width, "the whole model" is what it holds.
"""

from dataclasses import replace
from typing import Unpack

from anyfleet.arguments import checked
from anyfleet.core.method import Method
from anyfleet.methods.fedavg import Training, fedavg, sgd
from anyfleet.papers import FEDRESCUE
from anyfleet.parts.aggregate import Mean
from anyfleet.parts.plan import WidthByLevel
from anyfleet.parts.train import Gradient, Progressive
from anyfleet.parts.train.nested import NESTED_WIDTHS
from anyfleet.parts.train.progressive import MomentumRule

PAPER = FEDRESCUE
WIDTHS = (1, 3 / 4, 1 / 2, 1 / 4)


def usual(**training: Unpack[Training]) -> Gradient:
    """Return local SGD with the settings of the paper, which it used for all that it compared."""
    momentum = training.get("momentum", 0.9)
    settings: Training = {
        "lr": 0.1,
        "momentum": momentum,
        "nesterov": momentum > 0,
        "weight_decay": 1e-4,
        **training,
    }
    return sgd(**settings)


@checked
def fedrescue(
    *,
    widths: tuple[float, ...] = WIDTHS,  # of each level, strongest first
    samples: int = 4,  # nested models that a minibatch trains
    nested_widths: tuple[float, ...] = NESTED_WIDTHS,  # of nested models, to draw from
    momentum_rule: MomentumRule = "final",  # which steps have momentum: see `Progressive`
    count: int = 5,
    **training: Unpack[Training],
) -> Method:
    """Return FedResCuE with the width of each level.

    Every minibatch trains `samples` prefixes, of widths out of `nested_widths`.
    """
    return replace(
        fedavg(count=count),
        plan=WidthByLevel(widths),
        train=Progressive(usual(**training), nested_widths, samples, momentum_rule=momentum_rule),
        aggregate=Mean("equal"),
        # Links may lose columns: a device fills them from its own last model.
        send="weights",
        cache=True,
    )
