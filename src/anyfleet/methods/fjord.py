"""FjORD: the whole model and randomly drawn prefixes of it are trained in one step.

Horváth, Laskaridis, Almeida, Leontiadis, Venieris, Lane: FjORD: Fair and accurate federated
learning under heterogeneous targets with ordered dropout. NeurIPS 2021. Specification §1.7, §1.8,
as FedResCuE's paper compares with it (Algorithm 4): the whole model is trained in every local step,
the gradients are summed and the learning rate stays. With several `samples` a high learning rate
can diverge; sweep them.
"""

from dataclasses import replace
from typing import Unpack

from anyfleet.arguments import checked
from anyfleet.core.method import Method
from anyfleet.methods.fedavg import Training
from anyfleet.methods.fedrescue import WIDTHS, fedrescue, usual
from anyfleet.papers import FJORD
from anyfleet.parts.aggregate import Mean
from anyfleet.parts.train import Fjord
from anyfleet.parts.train.nested import NESTED_WIDTHS

PAPER = FJORD


@checked
def fjord(
    *,
    widths: tuple[float, ...] = WIDTHS,  # of each level, strongest first
    samples: int = 1,  # nested models that a minibatch trains
    nested_widths: tuple[float, ...] = NESTED_WIDTHS,  # of nested models, to draw from
    count: int = 5,
    **training: Unpack[Training],
) -> Method:
    """Return FjORD with the width of each level.

    Every minibatch trains `samples` prefixes beside the whole model, of widths out of
    `nested_widths`.
    """
    train = Fjord(usual(**training), nested_widths, samples)
    return replace(fedrescue(widths=widths, count=count), train=train, aggregate=Mean("samples"))
