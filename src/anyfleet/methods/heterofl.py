"""HeteroFL: a device of level p always trains the leading share of every hidden layer.

Diao, Ding, Tarokh: HeteroFL: Computation and communication efficient federated learning for
heterogeneous clients. ICLR 2021. METHODS §1.5. Our scaler acts only on cut layers that a
normalisation follows directly: without one it diverges.
"""

from dataclasses import replace
from typing import Unpack

from anyfleet.aggregate import Mean
from anyfleet.method import Method
from anyfleet.methods.fedavg import Training, fedavg, sgd
from anyfleet.plan import FixedLevel
from anyfleet.train import BatchStatistics, Static


def heterofl(
    *,
    shares: tuple[float, ...] = (1, 1 / 2, 1 / 4, 1 / 8, 1 / 16),
    label_rows: bool = True,
    masked: bool = True,
    scaler: bool = True,
    static_norm: bool = True,
    count: int = 10,
    **training: Unpack[Training],
) -> Method:
    """The share of each level, and a switch for each of HeteroFL's four parts."""
    base = sgd(**training)
    return replace(
        fedavg(count=count),
        plan=FixedLevel(shares),
        train=replace(base, label_rows=label_rows, masked=masked, scaler=scaler),
        norm=Static() if static_norm else BatchStatistics(),
        aggregate=Mean("equal"),
    )
