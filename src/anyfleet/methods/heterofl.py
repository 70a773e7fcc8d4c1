"""HeteroFL: a device always trains the leading channels of every hidden layer, by its level.

Diao, Ding, Tarokh: HeteroFL: Computation and communication efficient federated learning for
heterogeneous clients. ICLR 2021. Specification §1.5. Our scaler acts only on cut layers that a
normalisation follows directly: without one it diverges.
"""

from dataclasses import replace
from typing import Unpack

from anyfleet.arguments import checked
from anyfleet.core.method import Method
from anyfleet.methods.fedavg import Training, fedavg, sgd
from anyfleet.papers import HETEROFL
from anyfleet.parts.aggregate import Mean
from anyfleet.parts.norm import BatchStatistics, Static
from anyfleet.parts.plan import WidthByLevel
from anyfleet.parts.train import Gradient

PAPER = HETEROFL


class Parts(Training, total=False):
    """The settings that every method with sub-models takes: local SGD, and HeteroFL's switches."""

    label_rows: bool  # only classifier rows of a device's own classes count
    masked: bool  # logits of classes that a device lacks are 0 in training
    scaler: bool  # cut layers before a norm are divided by their width


def partial_sgd(
    *,
    label_rows: bool = False,
    masked: bool = False,
    scaler: bool = False,
    inverted: bool = False,
    **training: Unpack[Training],
) -> Gradient:
    """Return local SGD on a sub-model; the switches are those of `Gradient`."""
    base = sgd(**training)
    return replace(base, label_rows=label_rows, masked=masked, scaler=scaler, inverted=inverted)


@checked
def heterofl(
    *,
    widths: tuple[float, ...] = (1, 1 / 2, 1 / 4, 1 / 8, 1 / 16),  # of each level, strongest first
    label_rows: bool = True,  # only classifier rows of a device's own classes count
    masked: bool = True,  # logits of classes that a device lacks are 0 in training
    scaler: bool = True,  # cut layers before a norm are divided by their width
    static_norm: bool = True,  # test with statistics of one pass over data (`Static`)
    count: int = 10,
    **training: Unpack[Training],
) -> Method:
    """Return HeteroFL with the width of each level, and a switch for each of its four ideas."""
    return replace(
        fedavg(count=count),
        plan=WidthByLevel(widths),
        train=partial_sgd(label_rows=label_rows, masked=masked, scaler=scaler, **training),
        norm=Static() if static_norm else BatchStatistics(),
        aggregate=Mean("equal"),
    )
