"""The benchmarks run, and ask of the fleet what they say; how fast they are is not asserted."""

import numpy as np
import pytest
from benchmarks import fleet

from anyfleet import plan, select
from anyfleet.world.quantities import When, bounds


def test_every_selector_and_every_planner_is_measured() -> None:
    selectors = {type(make(1_000)).__name__ for make in fleet.SELECTORS.values()}
    assert selectors == set(select.__all__)
    planners = {type(part).__name__ for pair in fleet.PLANNERS.values() for part in pair}
    assert planners == set(plan.__all__)


# What a planner costs does not depend on who named the devices: each once, not all pairs.
PAIRS = {("Everyone", planner) for planner in fleet.PLANNERS}
PAIRS |= {(selector, "FixedLevel") for selector in fleet.SELECTORS}


@pytest.mark.parametrize(("selector", "planner"), sorted(PAIRS))
def test_a_round_of_a_thousand_devices(selector: str, planner: str) -> None:
    task, world, built = fleet.build(1_000)
    measured = fleet.measure(task, world, selector, planner, fleet.Rounds(1, warm=0))
    assert built.devices == task.devices == len(world) == 1_000
    # Few devices report less memory than a narrow slice needs, and are not asked.
    assert 0.9 * fleet.COHORT < measured.orders <= fleet.COHORT
    assert measured.clock > 0
    assert measured.ask > 0
    assert measured.rest > 0


def test_everything_that_can_change_does() -> None:
    _, world, _ = fleet.build(1_000)
    everybody, early, late = np.arange(1_000), When(0.0, 0), When(7_200.0, 5)
    before, after = (world.conditions(everybody, when, 100) for when in (early, late))
    for name in ("up", "down", "load", "memory", "speed"):
        assert (getattr(before, name) != getattr(after, name)).mean() > 0.9, name
    assert (world.online(everybody, early) != world.online(everybody, late)).mean() > 0.1
    assert all(bounds(group.battery)[1] < np.inf for group in world.groups)
    assert all(bounds(group.recharge)[0] > 0 for group in world.groups)


def test_the_command_shows_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    fleet.main(["--devices", "1000", "--select", "Everyone", "--rounds", "1", "--warm", "0"])
    shown = capsys.readouterr().out
    assert "1,000 devices, Everyone" in shown
    assert all(planner in shown for planner in fleet.PLANNERS)
