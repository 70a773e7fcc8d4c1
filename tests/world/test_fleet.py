"""Fleets: who belongs to which group, and which link he has."""

import numpy as np
import pytest

from anyfleet.world import Fleet, Group, Steady, levels

SAMPLES = np.arange(20) + 5


def counts(fleet: Fleet, devices: int = 20, seed: int = 0) -> list[int]:
    group = fleet.build(np.arange(devices), seed).group.tolist()
    return [group.count(number) for number in range(len(fleet.groups))]


def test_counted_groups_have_their_counts_and_the_others_even_parts_of_the_rest() -> None:
    fleet = Fleet(groups=(Group(count=4), Group(), Group(count=3), Group()))
    assert counts(fleet) == [4, 7, 3, 6]
    assert counts(fleet, 7) == [4, 0, 3, 0]
    assert fleet.size is None
    assert Fleet(groups=(Group(count=4), Group(count=3))).size == 7


@pytest.mark.parametrize(
    "groups", [(Group(count=21),), (Group(count=4), Group(count=3)), (Group(count=21), Group())]
)
def test_counts_must_agree_with_the_task(groups: tuple[Group, ...]) -> None:
    with pytest.raises(ValueError, match=r"Fleet\.groups have .* devices but the task has 20"):
        Fleet(groups=groups).build(SAMPLES, 0)


def test_a_fleet_about_which_nothing_is_said_is_the_simplest() -> None:
    assert Fleet() == levels()


def test_a_fleet_without_groups_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Fleet\.groups"):
        Fleet(groups=())


def test_a_rule_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Fleet\.counting .*'guess'"):
        Fleet(counting="guess")  # type: ignore[arg-type]


def test_groups_are_dealt_with_the_seed() -> None:
    fleet = Fleet(groups=(Group(), Group()))
    one, same, other = (fleet.build(SAMPLES, seed) for seed in (1, 1, 2))
    assert (one.group == same.group).all()
    assert (one.group != other.group).any()
    assert one.group.tolist() != sorted(one.group.tolist())  # not in the order of the data


def test_levels_are_positions_unless_given() -> None:
    fleet = Fleet(groups=(Group(), Group(level=0), Group(level=7)))
    world = fleet.build(SAMPLES, 0)
    assert [{0: 0, 1: 0, 2: 7}[g] for g in world.group.tolist()] == world.declared.level.tolist()
    assert (world.declared.samples == SAMPLES).all()


def test_links_of_the_fleet_are_dealt_evenly_and_apart_from_the_groups() -> None:
    links = tuple(Steady(up=1e6 * (i + 1), down=1e6) for i in range(3))
    fleet = Fleet(groups=(Group(), Group()), links=links)
    world = fleet.build(np.arange(600), 0)
    assert np.bincount(world.link).tolist() == [200, 200, 200]
    both = np.array(
        [[((world.link == k) & (world.group == g)).sum() for k in range(3)] for g in (0, 1)]
    )
    # Independent deals: 100 of each pair, within five standard errors of the hypergeometric law.
    assert (np.abs(both - 100) < 5 * np.sqrt(600 * (1 / 6) * (5 / 6))).all()
    own = Fleet(groups=(Group(link=links[0]), Group(link=links[2])))
    assert (own.build(SAMPLES, 0).link == own.build(SAMPLES, 0).group).all()


def test_the_levels_that_have_devices_are_found_once() -> None:
    groups = (Group(count=18, level=4), Group(count=2, level=1), Group(level=7))
    declared = Fleet(groups=groups).build(SAMPLES, 0).declared
    assert declared.levels == (1, 4)
    assert declared.levels is declared.levels
    assert declared.take(np.flatnonzero(declared.level == 4)).levels == (4,)
