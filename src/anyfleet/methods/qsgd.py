"""QSGD: FedAvg whose devices upload the largest entries on few quantisation levels, unbiased.

Alistarh, Grubic, Li, Tomioka, Vojnović: QSGD: Communication-efficient SGD via gradient quantization
and encoding. NeurIPS 2017. Specification §1.14; the largest entries first, as AnycostFL's
comparison has it, and no error feedback.
"""

from dataclasses import replace
from typing import Unpack

from anyfleet.arguments import checked
from anyfleet.core.method import Method
from anyfleet.methods.fedavg import Training, fedavg
from anyfleet.papers import QSGD
from anyfleet.parts.codec import Qsgd, TopK

PAPER = QSGD


@checked
def qsgd(
    *,
    quantisation_levels: int = 16,
    keep: float = 0.15,  # share of the entries that is sent
    count: int = 10,
    **training: Unpack[Training],
) -> Method:
    """Return QSGD, which sends the share `keep` of every tensor on `quantisation_levels`."""
    return replace(fedavg(count=count, **training), uplink=TopK(keep, Qsgd(quantisation_levels)))
