"""FedProx: FedAvg with a pull to the received model, and with unequal amounts of local work.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated optimization in heterogeneous networks.
MLSys 2020. Specification §1.2; the default of `mu` is ours, the documents give none.
"""

from dataclasses import replace
from typing import Unpack

from anyfleet.arguments import checked
from anyfleet.core.method import Method
from anyfleet.errors import refuse
from anyfleet.methods.fedavg import Training, fedavg, sgd
from anyfleet.papers import FEDPROX
from anyfleet.parts.plan import LocalStepsWithin, WholeModel

PAPER = FEDPROX


@checked
def fedprox(
    *,
    mu: float = 0.01,  # weight of the proximal term
    seconds: float | None = None,  # that an order may take; none: all local steps
    count: int = 10,
    **training: Unpack[Training],
) -> Method:
    """Return FedProx; with `seconds`, a device does only the local steps that fit into them."""
    refuse([] if mu >= 0 else [f"mu must not be negative, got {mu}."])
    plan = WholeModel() if seconds is None else LocalStepsWithin(seconds)
    train = replace(sgd(**training), proximal=mu)
    return replace(fedavg(count=count), plan=plan, train=train)
