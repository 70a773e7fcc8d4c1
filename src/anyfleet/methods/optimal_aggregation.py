"""Optimal Aggregation: updates without which the others agree more, and lose less, are left out.

Wu, Wang: Node selection toward faster convergence for federated learning on non-IID data. IEEE
Transactions on Network Science and Engineering, 2022. Specification §1.18. The statistic is that of
the authors' program: the printed one labels a device in every round (`statistic="mean"`). A device
is kept when its removal raises the loss, as their prose has it and not their pseudocode. The loss
is measured on the server's samples, never on test data.
"""

from dataclasses import replace
from typing import Unpack

from anyfleet.arguments import checked
from anyfleet.core.method import Method
from anyfleet.formulas.contribution import Statistic, Stopping
from anyfleet.methods.fedavg import Training, fedavg
from anyfleet.papers import FEDPNS
from anyfleet.parts.aggregate import Mean, Subset

PAPER = FEDPNS


class Leaving(Training, total=False):
    """The settings that say which updates are left out, and those of training."""

    share: float  # of the updates that remains at least
    statistic: Statistic  # by which updates are compared: see `Subset`
    left: Stopping  # what ends the search: see `Subset`


@checked
def optimal_aggregation(
    *,
    share: float = 0.7,  # of the updates that remains at least
    statistic: Statistic = "sum",  # by which updates are compared: see `Subset`
    left: Stopping = "share",  # what ends the search: see `Subset`
    count: int = 10,
    **training: Unpack[Training],
) -> Method:
    """Return Optimal Aggregation; at least `share` of the updates remain."""
    return replace(
        fedavg(count=count, **training), aggregate=Subset(Mean(), share, statistic, left)
    )
