"""The papers' fleets: who is in them, and that nothing goes along with anything else."""

from typing import Any

import numpy as np
import pytest

from anyfleet import config, world
from anyfleet.arrays import Ints
from anyfleet.errors import BadCall
from anyfleet.tasks.partition import BalancedClasses
from anyfleet.world import Fleet, Group, Normal, Redrawn, Uniform, When

NOW = When(0.0, 0)
FIVE = (1.0, 1 / 2, 1 / 3, 1 / 4, 1 / 5)


def made(fleet: Fleet, devices: int, seed: int = 0) -> world.World:
    return fleet.build(np.full(devices, 10), seed)


def everybody(of: world.World) -> Ints:
    return np.arange(len(of))


def test_levels_are_fedpmts_five_speeds_one_third_included() -> None:
    built = made(world.levels(), 10)
    speed = built.conditions(everybody(built), NOW, 1).speed
    found = np.unique(speed / speed.max())[::-1]
    assert found == pytest.approx(FIVE, rel=1e-12)
    assert np.bincount(built.declared.level).tolist() == [2] * 5
    assert np.all(np.diff(speed[np.argsort(built.declared.level, kind="stable")]) <= 0)


def test_levels_take_one_link_for_all_or_one_for_each() -> None:
    built = made(world.levels(speeds=(2e9, 1e9), bit_rate_up=(1e6, 2e6), bit_rate_down=3e6), 4)
    own = built.conditions(everybody(built), NOW, 1)
    assert own.bit_rate_up.tolist() == [1e6 if s == 2e9 else 2e6 for s in own.speed]
    assert set(own.bit_rate_down) == {3e6}
    with pytest.raises(
        ValueError, match=r"levels\.bit_rate_up needs one number, or one for each of the 2"
    ):
        world.levels(speeds=(2e9, 1e9), bit_rate_up=(1e6, 2e6, 3e6))


def test_levels_may_lose_columns_and_limit_energy() -> None:
    built = made(world.levels(error=0.25, budget=2.0), 5)
    assert built.lossy
    assert set(built.conditions(everybody(built), NOW, 1).budget) == {2.0}
    assert not made(world.levels(), 5).lossy
    with pytest.raises(ValueError, match=r"levels\.error must be a probability"):
        world.levels(error=1.5)
    with pytest.raises(ValueError, match=r"levels\.budget"):
        world.levels(budget=-1.0)


@pytest.mark.parametrize(
    ("fleet", "relative"),
    [(world.testbed(), (1, 0.2, 0.18, 0.17, 0.16)), (world.steep(), (1, 0.8, 0.4, 0.15, 0.05))],
)
def test_twenty_devices_of_five_boards_and_three_radios(
    fleet: Fleet, relative: tuple[float, ...]
) -> None:
    assert fleet.size == 20
    built = made(fleet, 20)
    assert np.bincount(built.group).tolist() == [4] * 5
    assert sorted(np.bincount(built.link).tolist()) == [6, 7, 7]
    # Without the load, which is drawn anew in every round.
    own = built.conditions(everybody(built), NOW, 1)
    nominal = own.speed * own.load
    for number, part in enumerate(relative):
        assert nominal[built.group == number] == pytest.approx(5e10 * part)
    assert built.declared.level.tolist() == [(0, 0, 1, 2, 2)[g] for g in built.group]


def test_the_testbeds_time_is_a_fixed_part_and_a_power_of_the_width() -> None:
    """T = T_full (.05 + .95 width^e); e is 1 for the laptop, else 1.7 (specification §A.1)."""
    laptop, *others = world.testbed().groups
    for group, e in [(laptop, 1.0), *((other, 1.7) for other in others)]:
        assert group.fixed == 0.05
        assert group.exponent == e


def test_the_testbeds_load_has_median_one_and_a_deviation_of_a_fifth() -> None:
    built = made(world.testbed(), 20)
    draws = [built.values("load", everybody(built), When(0.0, step)) for step in range(400)]
    logs = np.log(np.concatenate(draws))
    assert logs.mean() == pytest.approx(0, abs=5 * 0.2 / np.sqrt(len(logs)))
    assert logs.std() == pytest.approx(0.2, abs=0.01)
    assert len(np.unique(draws[0])) == 20  # every device its own, every round anew
    assert not np.any(draws[0] == draws[1])


@pytest.mark.parametrize("seed", range(10))
def test_no_class_lives_on_one_kind_of_board_only(seed: int) -> None:
    labels = np.repeat(np.arange(10), 40)
    shares = BalancedClasses(sigma=2)(labels, 20, key=seed)
    group = made(world.testbed(), 20, seed).group
    for label in range(10):
        owners = [d for d, rows in enumerate(shares) if label in labels[rows]]
        assert len(set(group[owners])) > 1, f"class {label} lives on {set(group[owners])}"


def test_boards_radios_and_labels_are_dealt_independently() -> None:
    """Over many seeds every pair of board and radio is as frequent as chance has it."""
    pairs = np.zeros((5, 3))
    same = 0
    for seed in range(300):
        built = made(world.testbed(), 20, seed)
        np.add.at(pairs, (built.group, built.link), 1)
        same += int(built.group[0] == seed % 5)
    expected = np.outer(np.full(5, 1 / 5), np.array([7, 7, 6]) / 20) * 20 * 300
    chi = ((pairs - expected) ** 2 / expected).sum()
    assert chi < 26  # 8 degrees of freedom: once in a thousand
    assert same == pytest.approx(60, abs=4 * np.sqrt(300 * 0.2 * 0.8))


def test_the_cell_is_anycostfls() -> None:
    fleet = world.cell()
    assert fleet.size == 60
    built = made(fleet, 60)
    rounds = [built.values("distance", everybody(built), When(0.0, step)) for step in range(200)]
    distance = np.concatenate(rounds)
    assert distance.max() <= 550
    assert distance.min() >= 1
    # Uniform in a disc: mean 2/3 of the radius, deviation radius / sqrt(18).
    deviation = 550 / np.sqrt(18)
    assert distance.mean() == pytest.approx(550 * 2 / 3, abs=5 * deviation / np.sqrt(12000))
    assert not np.any(rounds[0] == rounds[1])
    own = built.conditions(everybody(built), NOW, 60)
    assert own.coefficient.min() >= 5e-27
    assert own.coefficient.max() <= 1e-26
    assert own.budget.min() >= 3
    assert own.budget.max() <= 9
    assert not np.any(own.budget == built.conditions(everybody(built), When(0.0, 1), 60).budget)
    assert set(own.slowest) == {1e8}
    assert set(own.fastest) == {3e9}
    assert set(own.send_power) == {0.1}
    # 5.7e6 cycles a sample are 976 MFLOP (specification §3).
    assert 976e6 / own.speed * own.fastest == pytest.approx(np.full(60, 5.7e6), rel=2e-3)


@pytest.mark.parametrize("deviation", [0.0, 50.0, 150.0, 300.0])
def test_distances_vary_as_told_about_a_mean_that_stays(deviation: float) -> None:
    built = made(world.cell(distance=world.unequal_distance(deviation), devices=4000), 4000)
    rounds = [built.values("distance", everybody(built), When(0.0, step)) for step in range(5)]
    found = np.concatenate(rounds)
    assert found.mean() == pytest.approx(400, abs=5 * deviation / np.sqrt(len(found)) + 1e-9)
    assert found.std() == pytest.approx(deviation, rel=0.03)


@pytest.mark.parametrize("deviation", [0.0, 1e-27, 4e-27])
def test_coefficients_vary_as_told_about_a_mean_that_stays(deviation: float) -> None:
    fleet = world.cell(coefficient=world.unequal_coefficient(deviation), devices=20_000)
    built = made(fleet, 20_000)
    found = built.values("energy", everybody(built), NOW)
    assert found.mean() == pytest.approx(7.5e-27, abs=5 * deviation / np.sqrt(20_000) + 1e-33)
    assert found.std() == pytest.approx(deviation, rel=0.03, abs=1e-33)
    assert np.array_equal(found, built.values("energy", everybody(built), When(9.0, 3)))


def test_lossy_links_by_error_and_level() -> None:
    fleet = world.lossy(errors=(0.05, Uniform(0.1, 0.2)), levels=2)
    assert [g.level for g in fleet.groups] == [0, 1, 0, 1]
    assert [g.column_loss.error for g in fleet.groups] == [0.05, 0.05, *(Uniform(0.1, 0.2),) * 2]
    assert {g.column_loss.column_width for g in fleet.groups} == {0.125}
    assert made(fleet, 8).lossy
    assert not made(world.levels(), 8).lossy
    with pytest.raises(ValueError, match="levels must be at least 1"):
        world.lossy(levels=0)


def test_a_fleet_file_may_use_them_and_change_them() -> None:
    fleet = config.load(
        {
            "use": "anyfleet.world:cell",
            "devices": 5,
            "link": {"ref_loss_db": 0.0},
            "reports": {"rounds": 2},
        },
        Fleet,
    )
    (group,) = fleet.groups
    assert isinstance(group, Group)
    assert group.count == 5
    assert isinstance(group.link, world.Shannon)
    assert group.link.ref_loss_db == 0.0
    assert fleet.reports.rounds == 2
    assert isinstance(group.distance, Redrawn)
    assert isinstance(world.unequal_coefficient(1e-27), Normal)


@pytest.mark.parametrize(
    ("preset", "options", "because"),
    [
        ("levels", {"up": 1e6}, r"levels\(\) has no argument 'up'.*\"bit_rate_up\""),
        ("levels", {"down": 1e6}, r"levels\(\) has no argument 'down'.*\"bit_rate_down\""),
        ("levels", {"speeds": 1e9}, r"levels\.speeds must be a tuple of numbers, got 1"),
        ("testbed", {"speeds": 1e9}, r"testbed\(\) has no argument 'speeds'.*\"speed\""),
        ("steep", {"speed": "1e9"}, r"steep\.speed must be a number.*quotation marks"),
        ("cell", {"device": 9}, r"cell\(\) has no argument 'device'.*\"devices\""),
        ("lossy", {"error": 0.1}, r"lossy\(\) has no argument 'error'.*\"errors\""),
        ("unequal_coefficient", {"deviation": "1"}, r"coefficient\.deviation must be a number"),
        ("unequal_distance", {"deviation": "1"}, r"distance\.deviation must be a number"),
    ],
)
def test_arguments_of_presets_are_checked_as_those_of_methods(
    preset: str, options: dict[str, Any], because: str
) -> None:
    with pytest.raises(BadCall, match=because):
        getattr(world, preset)(**options)
