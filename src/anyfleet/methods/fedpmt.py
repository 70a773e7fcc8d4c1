"""FedPMT: all devices run the whole model, and weak devices train its last layers only.

Wu, Wang, Narayana: Straggler-resilient federated learning: Tackling computation heterogeneity with
layer-wise partial model training in mobile edge network. IEEE TNSE 2025. Specification §1.3. A
layer is averaged over the devices that trained it, here by their samples (the paper's are equal),
and keeps its value when no device delivers it. Layers that are not trained run in training mode,
dropout and batch norm included, but keep their running statistics. As many devices of each level
are asked; what is left over goes to the strongest. Times, and the choice by them, count the trained
layers.
"""

from dataclasses import replace
from typing import Unpack

from anyfleet.arguments import checked
from anyfleet.core.method import Method
from anyfleet.methods.fedavg import Training, fedavg
from anyfleet.papers import FEDPMT
from anyfleet.parts.choose import LargestInTime
from anyfleet.parts.plan import TrainedLayersByLevel, TrainedLayersMenu
from anyfleet.parts.select import Quota

PAPER = FEDPMT


@checked
def fedpmt(
    *,
    depths: int | None = 4,
    seconds: float | None = None,
    count: int = 8,
    **training: Unpack[Training],
) -> Method:
    """Return FedPMT: each level has its own of so many `depths`, the paper's option I.

    With `seconds` it is option II: a device chooses the deepest that it finishes in time.
    """
    base = replace(fedavg(**training), select=Quota(count))
    if seconds is None:
        return replace(base, plan=TrainedLayersByLevel(depths))
    return replace(base, plan=TrainedLayersMenu(depths), choose=LargestInTime(seconds))
