"""FedDrop: every device trains a random part of each hidden layer, another one in every round.

Wen, Jeon, Huang: Federated dropout – A simple approach for enabling federated learning on resource
constrained devices. IEEE Wireless Communications Letters 11(5), 2022. Specification §1.4. A width
is what is kept, not what is dropped. Scaling (`inverted`) is off unless asked for, and goes by the
channels that are left after rounding.
"""

from dataclasses import replace
from typing import Literal, Unpack

from anyfleet.arguments import checked
from anyfleet.core.method import Method
from anyfleet.methods.fedavg import fedavg
from anyfleet.methods.heterofl import Parts, partial_sgd
from anyfleet.papers import FEDDROP
from anyfleet.parts.aggregate import Mean
from anyfleet.parts.extract import Random
from anyfleet.parts.norm import BatchStatistics, Static
from anyfleet.parts.plan import WidthByLevel

PAPER = FEDDROP


@checked
def feddrop(
    *,
    widths: tuple[float, ...] = (1, 1 / 2, 1 / 4, 1 / 8, 1 / 16),  # of each level, strongest first
    layers: Literal["all", "linear"] = "all",  # which layers are cut
    inverted: bool = False,  # inputs from cut layers are divided by their width
    static_norm: bool = False,  # test with statistics of one pass over data (`Static`)
    count: int = 10,
    **parts: Unpack[Parts],
) -> Method:
    """Return FedDrop with the width of each level, and which layers are cut.

    HeteroFL's switches are off unless asked for.
    """
    return replace(
        fedavg(count=count),
        plan=WidthByLevel(widths, layers),
        extract=Random(),
        train=partial_sgd(inverted=inverted, **parts),
        norm=Static() if static_norm else BatchStatistics(),
        aggregate=Mean("equal"),
    )
