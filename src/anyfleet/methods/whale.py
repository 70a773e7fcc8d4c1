"""WHALE-FL: a device picks its width every round, by Fisher information and the state of its link.

Li, Geng, Su et al., see `PAPER`. Specification §1.10 and §1.11. Deviations: the time that is
compared with the target has the download too. Fisher information is taken relative to the initial
model of the same width (`effectiveness="literal"` has the paper's scale, on which the published
thresholds do nothing). Algorithm 2 works on blocks of channels, as nested rings leave it nothing to
choose.
"""

from dataclasses import replace
from typing import Unpack

from anyfleet.arguments import checked
from anyfleet.core.method import Method
from anyfleet.measure import Fisher
from anyfleet.methods.heterofl import Parts, heterofl
from anyfleet.papers import WHALE
from anyfleet.parts.choose import FisherUtility
from anyfleet.parts.extract import FisherBlocks, Leading
from anyfleet.parts.plan import TargetSeconds, WidthMenu
from anyfleet.parts.select import Everyone

PAPER = WHALE


@checked
def whale(
    *,
    widths: tuple[float, ...] = (1, 1 / 2, 1 / 4, 1 / 8, 1 / 16),  # of each level, strongest first
    utility: FisherUtility | None = None,
    regions: int | None = None,
    fisher: Fisher | None = None,
    static_norm: bool = True,  # test with statistics of one pass over data (`Static`)
    **parts: Unpack[Parts],
) -> Method:
    """Return WHALE-FL, in which all devices take part.

    With `regions` (16 in the specification) Algorithm 2 picks the channels. There are as many
    levels as `widths`. `fisher` says how devices measure Fisher information. By the system alone:
    `utility=FisherUtility(effectiveness="constant")`; by training alone: `penalty=0`.
    """
    utility = utility or FisherUtility()
    fisher = fisher or utility.fisher
    return replace(
        heterofl(static_norm=static_norm, **parts),
        select=Everyone(),
        plan=TargetSeconds(WidthMenu(widths, capped=True)),
        choose=replace(utility, levels=len(widths), fisher=fisher),
        extract=Leading() if regions is None else FisherBlocks(regions, fisher=fisher),
    )
