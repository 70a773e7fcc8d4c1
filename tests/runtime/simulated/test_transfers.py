"""Failing links through the simulator: how many columns a model has, and how many come through."""

from dataclasses import replace

import numpy as np
import pytest

from anyfleet.formulas.reference.lossy_links import mean_delivered
from anyfleet.methods import fedavg, heterofl
from anyfleet.parts.choose import LargestInTime
from anyfleet.parts.plan import WidthMenu
from anyfleet.world import lossy
from tests.helpers import small

ALL_IN_TIME = LargestInTime(1e9)


@pytest.mark.parametrize(
    ("share", "columns"), [(1.0, 8), (0.75, 6), (0.4, 4), (0.35, 3), (0.05, 1)]
)
@pytest.mark.parametrize("offered", [False, True])
def test_1_9_columns_go_by_the_planned_share(share: float, columns: int, offered: bool) -> None:
    """C = ceil(p / 0.125) also where a net has so few channels that rounding up hides p."""
    method = replace(heterofl(widths=(share,), lr=0.1), send="weights", cache=True)
    if offered:
        method = replace(method, plan=WidthMenu((share,)), choose=ALL_IN_TIME)
    steps = small.steps(method, small.task(), 6, fleet=lossy(errors=(0.3,)))
    for name in ("delivered_down", "delivered_up"):
        shares = np.concatenate([getattr(step.ledger, name) for step in steps])
        counts = shares * columns
        assert counts == pytest.approx(np.round(counts), abs=1e-9)
        assert len(np.unique(counts)) > min(columns, 3)
    assert all((step.ledger.width == share).all() for step in steps)


def test_1_9_the_mean_share_that_arrives_is_the_papers() -> None:
    """0.515319 of eight columns at an error of 0.15, in a net with axes of 6, 8 and 16."""
    method = replace(fedavg(lr=0.1, batch_size=64), send="weights", cache=True)
    fleet = lossy(errors=(0.15,))
    steps = [
        s for seed in range(6) for s in small.steps(method, small.task(), 8, fleet=fleet, seed=seed)
    ]
    arrived = np.concatenate([[*s.ledger.delivered_down, *s.ledger.delivered_up] for s in steps])
    share = mean_delivered(0.15, 8) / 8
    assert share == pytest.approx(0.515319, abs=1e-6)
    assert arrived.mean() == pytest.approx(share, abs=4 * 0.36 / np.sqrt(len(arrived)))
    assert (arrived == 1).mean() == pytest.approx(0.272491, abs=4 * 0.45 / np.sqrt(len(arrived)))
