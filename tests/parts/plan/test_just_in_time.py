"""As slowly as is in time: the same work for less energy."""

from dataclasses import replace

import numpy as np
import pytest

from anyfleet.core.loop import Round
from anyfleet.core.method import Method
from anyfleet.methods import fedavg
from anyfleet.parts.choose import LargestInTime
from anyfleet.parts.codec import Hq
from anyfleet.parts.plan import JustInTime, SentFractionByLevel, WidthByLevel, WidthMenu
from anyfleet.parts.select import Everyone
from anyfleet.world import Fleet, Group, Redrawn, Steady, Uniform
from tests.helpers import small

# Of the small task, a round takes the fastest of them about half a second.
FLEET = Fleet(
    groups=tuple(
        Group(
            name=f"{speed:g}",
            speed=speed,
            load=Redrawn(Uniform(1.0, 1.3)),
            frequency=(2e8, 1e9),
            link=Steady(bit_rate_up=1e6, bit_rate_down=4e6),
        )
        for speed in (4e7, 2e7)
    )
)
PLAIN = replace(fedavg(lr=0.1, batch_size=8), select=Everyone())


def first(method: Method) -> Round:
    return small.steps(method, small.task(), 1, fleet=FLEET)[0]


def test_everybody_finishes_together_and_spends_less() -> None:
    fast = first(PLAIN).ledger
    seconds = 1.5 * float(fast.seconds.max())
    slow = first(replace(PLAIN, plan=JustInTime(seconds))).ledger
    assert slow.seconds == pytest.approx(np.full(8, seconds))
    assert (slow.frequency > 2e8).all()
    assert len(set(slow.frequency.tolist())) == 8  # each as slow as it can
    # Energy goes with the square of the frequency.
    expected = fast.compute_joules * (slow.frequency / 1e9) ** 2
    assert slow.compute_joules == pytest.approx(expected)
    assert small.identical(
        first(PLAIN).params, first(replace(PLAIN, plan=JustInTime(seconds))).params
    )


def test_whoever_is_late_anyway_hurries_and_nobody_is_slower_than_it_can_be() -> None:
    fast = first(PLAIN).ledger
    late = first(replace(PLAIN, plan=JustInTime(float(fast.seconds.min()) / 2))).ledger
    assert np.isnan(late.frequency).all()
    assert late.seconds == pytest.approx(fast.seconds)
    early = first(replace(PLAIN, plan=JustInTime(1e6))).ledger
    assert set(early.frequency.tolist()) == {2e8}


def test_sizes_rates_and_menus_of_the_inner_plan_count() -> None:
    seconds = 1.5 * float(first(PLAIN).ledger.seconds.max())
    whole = first(replace(PLAIN, plan=JustInTime(seconds))).ledger
    sized = first(replace(PLAIN, plan=JustInTime(seconds, WidthByLevel((1.0, 0.8))))).ledger
    assert sized.seconds == pytest.approx(np.full(8, seconds))
    narrow = sized.slice_width < 1
    assert 0 < narrow.sum() < 8
    assert (sized.frequency[narrow] < 0.9 * whole.frequency[narrow]).all()
    plan = JustInTime(seconds, SentFractionByLevel((0.05, 0.02)))
    squeezed = first(replace(PLAIN, plan=plan, uplink=Hq())).ledger
    # Messages are as long as planned, or somewhat shorter; some cannot be slow enough.
    assert (squeezed.seconds <= seconds * (1 + 1e-9)).all()
    assert ((squeezed.seconds > 0.98 * seconds) | (squeezed.frequency == 2e8)).all()
    assert (squeezed.frequency > 2e8).any()
    menu = replace(
        PLAIN, plan=JustInTime(seconds, WidthMenu((1.0, 0.5))), choose=LargestInTime(seconds)
    )
    offered = first(menu).ledger
    assert set(offered.slice_width.tolist()) <= {1.0, 0.5}
    # What it costs to offer a choice is not in the plan.
    assert (offered.seconds <= seconds * 1.01).all()


def test_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match=r"JustInTime\.seconds must be positive, got 0"):
        JustInTime(0.0)
