"""FedHQ: better links send more quantisation levels, and coarse updates have less weight.

Chen et al. 2021, see `PAPER`. Specification §1.16: quantisation levels by the state of the channel,
errors measured on every message. That the weights are 1 / (1 + error) is not verified; the
published abstract says that they minimise a bound by each client's quantisation error.
"""

from dataclasses import replace
from typing import Unpack

from anyfleet.arguments import checked
from anyfleet.core.method import Method
from anyfleet.methods.fedavg import Training, fedavg
from anyfleet.papers import FEDHQ
from anyfleet.parts.aggregate import ErrorWeighted
from anyfleet.parts.codec import Hq
from anyfleet.parts.plan import SentFractionByLink

PAPER = FEDHQ


@checked
def fedhq(
    *,
    sent_fraction: float = 1 / 33,  # mean of the devices, where `seconds` is none
    seconds: float | None = None,  # that an upload takes
    keep: float = 0.15,  # share of the entries that is sent
    count: int = 10,
    **training: Unpack[Training],
) -> Method:
    """Return FedHQ: uploads take `seconds`.

    Unless given, such that the mean sent fraction of the devices is `sent_fraction`.
    """
    return replace(
        fedavg(count=count, **training),
        plan=SentFractionByLink(sent_fraction, seconds),
        uplink=Hq(keep=keep),
        aggregate=ErrorWeighted(),
    )
