"""One band for many: who shares it, and that it is never given away twice."""

from dataclasses import replace

import numpy as np
import pytest

from anyfleet.methods import fedavg
from anyfleet.parts.schedule import Tiers
from anyfleet.parts.select import Everyone
from anyfleet.world import Fleet, Group, Shannon, Steady, When
from tests.helpers import small

BAND = Shannon(band=1e6, shared=True)
FEDAVG = replace(fedavg(lr=0.1), select=Everyone())


def alone(distance: float, sharing: int) -> float:
    """The rate of one of so many devices on the band."""
    world = Fleet((Group(link=BAND, distance=distance),)).build(np.ones(1, dtype=np.int64), 0)
    return float(world.bit_rates(np.zeros(1, dtype=np.int64), When(0.0, 0), sharing).up[0])


def test_a_cohort_divides_the_band() -> None:
    fleet = Fleet((Group(link=BAND, distance=300.0),))
    told = small.steps(FEDAVG, small.task(), 1, fleet=fleet)[0].ledger
    assert told.bits_up / told.upload_seconds == pytest.approx(np.full(8, alone(300.0, 8)))


def test_who_has_another_link_takes_nothing_of_the_band() -> None:
    fleet = Fleet((Group(count=2, link=BAND, distance=300.0), Group(link=Steady(1e6, 1e6))))
    told = small.steps(FEDAVG, small.task(), 1, fleet=fleet)[0].ledger
    on_band = told.level == 0
    rates = told.bits_up / told.upload_seconds
    assert rates[on_band] == pytest.approx(np.full(2, alone(300.0, 2)))
    assert rates[~on_band] == pytest.approx(np.full(6, 1e6))


def test_who_declines_takes_nothing_of_the_band() -> None:
    """At check-in all of them divided it: what was computed then does not hold for the orders."""
    groups = (Group(link=BAND, distance=300.0), Group(link=BAND, distance=300.0, memory=1.0))
    told = small.steps(FEDAVG, small.task(), 1, fleet=Fleet(groups))[0].ledger
    came = np.array([not why for why in told.failure])
    assert came.sum() == 4
    rates = told.bits_up[came] / told.upload_seconds[came]
    assert rates == pytest.approx(np.full(4, alone(300.0, 4)))


def test_equal_links_of_several_groups_are_one_band() -> None:
    fleet = Fleet((Group(link=BAND, distance=300.0), Group(link=BAND, distance=300.0, speed=1e8)))
    told = small.steps(FEDAVG, small.task(), 1, fleet=fleet)[0].ledger
    assert told.bits_up / told.upload_seconds == pytest.approx(np.full(8, alone(300.0, 8)))


def test_tiers_that_are_asked_at_one_moment_share_the_band() -> None:
    """Each tier is a request of its own; the first must not get the band of the later ones."""
    fleet = Fleet(tuple(Group(link=BAND, distance=300.0, speed=speed) for speed in (2e9, 1e9, 5e8)))
    steps = small.steps(replace(FEDAVG, schedule=Tiers()), small.task(), 4, fleet=fleet)
    first = [row for step in steps for row in small.rows(step) if row.issued_round == 0]
    assert {row.level for row in first} == {0, 1, 2}
    for row in first:
        assert row.bits_up / row.upload_seconds == pytest.approx(alone(300.0, 8))
