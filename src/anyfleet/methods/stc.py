"""STC: FedAvg whose devices upload the signs of the largest entries, and keep what they left out.

Sattler, Wiedemann, Müller, Samek: Robust and communication-efficient federated learning from
non-i.i.d. data. IEEE TNNLS 31(9), 2020. Specification §1.13; the documents give no share. Ours
leads to the fortieth of an update's bits that AnycostFL's table shows; shares of 1/400 to 1/25 are
usual (a fortieth of the entries is a 150th of the bits). The downlink is not compressed.
"""

from dataclasses import replace
from typing import Unpack

from anyfleet.arguments import checked
from anyfleet.core.method import Method
from anyfleet.methods.fedavg import Training, fedavg
from anyfleet.papers import STC
from anyfleet.parts.codec import ErrorFeedback, Stc

PAPER = STC


@checked
def stc(*, keep: float = 0.15, count: int = 10, **training: Unpack[Training]) -> Method:
    """Return STC, which sends the share `keep` of every tensor."""
    return replace(fedavg(count=count, **training), uplink=ErrorFeedback(Stc(keep)))
