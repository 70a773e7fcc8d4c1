"""FedPNS: devices that Optimal Aggregation suspects are asked less often.

Wu, Wang: Node selection toward faster convergence for federated learning on non-IID data. IEEE
Transactions on Network Science and Engineering, 2022. Specification §1.19. A device counts as
selected whenever it was asked. The authors' program draws its first cohort half from i.i.d. devices
(`select.Quota(by="group", counts=(5, 5))`); ours, as their text, from all alike.
"""

from dataclasses import replace
from typing import Unpack

from anyfleet.arguments import checked
from anyfleet.core.method import Method
from anyfleet.methods.optimal_aggregation import Leaving, optimal_aggregation
from anyfleet.papers import FEDPNS
from anyfleet.parts.select import Learned

PAPER = FEDPNS


@checked
def fedpns(
    *, count: int = 10, alpha: float = 2.0, beta: float = 0.7, **settings: Unpack[Leaving]
) -> Method:
    """Return FedPNS: high `beta` and low `alpha` soon stop asking a labelled device."""
    return replace(optimal_aggregation(**settings), select=Learned(count, alpha, beta))
