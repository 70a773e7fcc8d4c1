"""What a fleet looks like over a day."""

import math

import numpy as np
import pytest

from anyfleet.analysis.fleet_portrait import HOURS, portray, varies
from anyfleet.world import Fleet, Group, Intermittent, Redrawn, Steady, Uniform


def test_a_portrait_has_what_the_groups_say() -> None:
    strong = Group(
        name="strong", count=2, speed=4e9, link=Steady(bit_rate_up=1e6, bit_rate_down=2e6)
    )
    weak = Group(
        count=3,
        level=4,
        speed=1e9,
        load=Redrawn(Uniform(2.0, 4.0)),
        frequency=(1e8, 2e9),
        energy=1e-27,
        availability=Intermittent(0.5),
    )
    seen = portray(Fleet((strong, weak)).build(np.ones(5, dtype=np.int64), 0))
    assert (seen.names, seen.counts) == (("strong", "group 1"), (2, 3))
    first, other = seen.group == 0, seen.group == 1
    assert seen.speed.shape == (HOURS, 5)
    assert np.all(seen.speed[:, first] == 4e9)
    assert np.all((seen.speed[:, other] >= 2.5e8) & (seen.speed[:, other] <= 5e8))
    assert all(varies(seen.speed[:, device]) for device in np.flatnonzero(other))
    assert set(seen.level[other]) == {4}
    assert np.all(seen.bit_rate_down[:, first] == 2e6)
    assert np.all(seen.bit_rate_up[:, first] == 1e6)
    # specification §A.2: coefficient f² for each cycle, and one GFLOP is f / speed · 1e9 cycles of
    # its own, whatever else the device does.
    assert seen.energy[:, other] == pytest.approx(1e-27 * 4e18 * 2e9)
    assert seen.online[:, first].all()
    assert 0 < seen.online[:, other].mean() < 1


def test_a_large_fleet_is_looked_at_in_part() -> None:
    fleet = Fleet((Group(count=3), Group(count=4997)))
    seen = portray(fleet.build(np.ones(5000, dtype=np.int64), 0))
    assert seen.counts == (3, 4997)
    assert (seen.group == 0).sum() == 3
    assert (seen.group == 1).sum() == 500


def test_rounding_is_no_difference() -> None:
    assert not varies(np.array([0.3, 0.1 + 0.2]))
    assert varies(np.array([0.3, 0.3001]))
    assert not varies(np.array([math.inf, math.inf]))
    assert varies(np.array([1.0, math.inf]))
