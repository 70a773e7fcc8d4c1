"""AnycostFL: every device picks width, compression and frequency within its time and energy.

Li et al., see `PAPER`. Specification §1.12 and §3. Deviations: widths come from a grid, and a
device plans with what each of them really costs, download included. The stored model is not
permuted: the strongest channels are an index set. Weights go by measured sent fractions and by
samples. Variants:

    replace(m, plan=WidthMenu((1.0,)))       without shrinking (EMS)
    replace(m, uplink=Hq())                  without its own compression (FGC)
    replace(m, aggregate=Mean("equal"))      without its aggregation (AIO)
"""

from dataclasses import replace
from typing import Unpack

from anyfleet.arguments import checked
from anyfleet.core.method import Method
from anyfleet.errors import refuse
from anyfleet.methods.fedavg import fedavg
from anyfleet.methods.heterofl import Parts, partial_sgd
from anyfleet.papers import ANYCOST
from anyfleet.parts.aggregate import Aio
from anyfleet.parts.choose import MostGain
from anyfleet.parts.codec import Fgc
from anyfleet.parts.extract import Strongest
from anyfleet.parts.plan import WidthMenu
from anyfleet.parts.schedule import Synchronous

PAPER = ANYCOST
WIDTHS = tuple(sixteenths / 16 for sixteenths in range(16, 7, -1))  # alpha from 1 to 1/4


@checked
def anycost(
    *,
    seconds: float = 10.0,  # that an order may take
    widths: tuple[float, ...] = WIDTHS,  # menu of every device
    sent_fraction: float = 1 / 15,  # largest that a device may choose
    count: int = 15,
    **parts: Unpack[Parts],
) -> Method:
    """Return AnycostFL: no order takes longer than `seconds`, or more joules than its device has.

    `sent_fraction` is the largest; the devices choose smaller ones. HeteroFL's switches of training
    are off unless asked for.
    """
    lowest = MostGain.least_fraction
    allowed = lowest <= sent_fraction <= 1
    refuse([] if allowed else [f"sent_fraction must lie in [{lowest}, 1], got {sent_fraction}."])
    return replace(
        fedavg(count=count),
        plan=WidthMenu(widths, rounding="round"),
        choose=MostGain(seconds, most_fraction=sent_fraction),
        extract=Strongest(),
        train=partial_sgd(**parts),
        uplink=Fgc(),
        aggregate=Aio(),
        schedule=Synchronous(patience=seconds),  # an empty round lasts as long as another
    )
