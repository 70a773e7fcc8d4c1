"""FedAvg: a random cohort trains the whole model, the server takes the data-weighted mean.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-efficient learning of deep networks
from decentralized data. AISTATS 2017. Specification §1.1.
"""

import math
from collections.abc import Iterator
from typing import TypedDict, Unpack

from anyfleet.arguments import checked
from anyfleet.core.method import Method
from anyfleet.errors import refuse
from anyfleet.papers import FEDAVG
from anyfleet.parts.aggregate import Mean
from anyfleet.parts.choose import First
from anyfleet.parts.codec import Raw
from anyfleet.parts.extract import Leading
from anyfleet.parts.norm import BatchStatistics
from anyfleet.parts.plan import WholeModel
from anyfleet.parts.schedule import Synchronous
from anyfleet.parts.select import Uniform
from anyfleet.parts.train import Decaying, Gradient, Sgd

PAPER = FEDAVG


class Training(TypedDict, total=False):
    """The settings of local SGD that every method takes."""

    lr: float  # learning rate of local SGD
    decay: float  # factor of the learning rate, once a round
    epochs: int  # passes over a device's samples in each order
    batch_size: int  # samples of a minibatch
    momentum: float  # of local SGD
    nesterov: bool  # Nesterov's form of momentum
    weight_decay: float  # of local SGD


def sgd(
    *,
    lr: float = 0.01,
    decay: float = 1.0,
    epochs: int = 1,
    batch_size: int = 32,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
) -> Gradient:
    """Return a trainer by local SGD; `decay` multiplies `lr` once a round."""
    # Checked here by the names that a method has for them: the parts inside have others.
    refuse(_faults(lr, decay))
    optimiser = Sgd(momentum, nesterov, weight_decay)
    return Gradient(Decaying(lr, decay), optimiser, epochs=epochs, batch_size=batch_size)


def _faults(lr: float, decay: float) -> Iterator[str]:
    if not 0 < lr < math.inf:
        yield f"lr must be positive and finite, got {lr}."
    if not 0 < decay <= 1:
        yield (
            f"decay must lie in (0, 1], got {decay}. It multiplies the learning rate once a round; "
            "1 keeps it constant."
        )


@checked
def fedavg(
    *,
    count: int = 10,  # devices that are asked in each round
    **training: Unpack[Training],
) -> Method:
    """Return FedAvg: `count` devices a round, local SGD, the mean weighted by samples."""
    return Method(
        select=Uniform(count),
        schedule=Synchronous(),
        plan=WholeModel(),
        choose=First(),
        extract=Leading(),
        train=sgd(**training),
        norm=BatchStatistics(),
        uplink=Raw(),
        downlink=Raw(),
        aggregate=Mean("samples"),
    )
