"""FedRolex: the widths of HeteroFL, with a window of channels that rolls on with every round.

Alam, Liu, Yan, Zhang: FedRolex: Model-heterogeneous federated learning with rolling sub-model
extraction. NeurIPS 2022. Specification §1.6. The authors' program rolls the other way (`shift=-1`)
and their paper rounds widths down; a layer that is kept whole has its natural order here.
"""

from dataclasses import replace
from typing import Unpack

from anyfleet.arguments import checked
from anyfleet.core.method import Method
from anyfleet.methods.heterofl import Parts, heterofl
from anyfleet.papers import FEDROLEX
from anyfleet.parts.extract import Rolling

PAPER = FEDROLEX


@checked
def fedrolex(
    *,
    widths: tuple[float, ...] = (1, 1 / 2, 1 / 4, 1 / 8, 1 / 16),  # of each level, strongest first
    shift: int = 1,  # channels that the window moves in a round
    static_norm: bool = True,  # test with statistics of one pass over data (`Static`)
    count: int = 10,
    **parts: Unpack[Parts],
) -> Method:
    """Return FedRolex with the width of each level, and how far the window rolls in a round.

    HeteroFL's switches are on.
    """
    base = heterofl(widths=widths, static_norm=static_norm, count=count, **parts)
    return replace(base, extract=Rolling(shift))
