"""FedAdp: all devices take part, and those whose updates point where the mean points count more.

Wu, Wang: Fast-convergent federated learning with adaptive weighting. IEEE Transactions on Cognitive
Communications and Networking, 2021. Specification §1.17. Angles are averaged over a device's own
visits, which allows any other selection; a device whose update is zero keeps the angle it had.
"""

from dataclasses import replace
from typing import Unpack

from anyfleet.arguments import checked
from anyfleet.core.method import Method
from anyfleet.methods.fedavg import Training, fedavg
from anyfleet.papers import FEDADP
from anyfleet.parts.aggregate import AngleWeighted
from anyfleet.parts.select import Everyone

PAPER = FEDADP


@checked
def fedadp(*, sharpness: float = 5.0, **training: Unpack[Training]) -> Method:
    """Return FedAdp; the largest weight is at most e^`sharpness` times the smallest."""
    aggregate = AngleWeighted(sharpness)
    return replace(fedavg(**training), select=Everyone(), aggregate=aggregate)
