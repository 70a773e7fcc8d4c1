"""BN2: of a larger cohort that trains, those upload whose updates are longest.

Amiri, Gündüz, Kulkarni, Poor: Convergence of update aware device scheduling for federated learning
at the wireless edge. IEEE Transactions on Wireless Communications, 2021. Specification §1.20: the
baseline of FedPNS. All `draw` devices compute and send one number, `keep` of them upload.
"""

from dataclasses import replace
from typing import Unpack

from anyfleet.arguments import checked
from anyfleet.core.method import Method
from anyfleet.methods.fedavg import Training, fedavg
from anyfleet.papers import BN2
from anyfleet.parts.schedule import HoldAndFetch
from anyfleet.parts.select import Largest

PAPER = BN2


@checked
def bn2(*, draw: int = 20, keep: int = 10, **training: Unpack[Training]) -> Method:
    """Return BN2: `draw` devices train, and the `keep` longest updates are averaged by samples."""
    return replace(fedavg(**training), select=Largest(draw, keep), schedule=HoldAndFetch())
