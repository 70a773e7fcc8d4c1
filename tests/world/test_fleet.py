"""Fleets: who belongs to which group, and which link he has."""

from typing import Any

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
    links = tuple(Steady(bit_rate_up=1e6 * (i + 1), bit_rate_down=1e6) for i in range(3))
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


# --- groups that name their devices -------------------------------------------------------------


def test_groups_have_the_devices_that_they_name_and_the_others_are_dealt() -> None:
    groups = (Group(devices=(0, 3, 7)), Group(count=2), Group(devices=(19,)), Group())
    for seed in range(3):
        group = Fleet(groups=groups).build(SAMPLES, seed).group
        assert np.flatnonzero(group == 0).tolist() == [0, 3, 7]
        assert np.flatnonzero(group == 2).tolist() == [19]
        assert (group == 1).sum() == 2
        assert (group == 3).sum() == 14
    one, two = (Fleet(groups=groups).build(SAMPLES, seed).group for seed in (1, 2))
    assert (one != two).any()
    assert Fleet(groups=groups[::2]).size == 4
    everyone = Fleet(groups=(Group(devices=tuple(range(20))), Group()))
    assert (everyone.build(SAMPLES, 0).group == 0).all()


def test_numbers_out_of_an_array_name_devices_too() -> None:
    """One that nobody has was passed over, and its group stayed empty."""
    named = Group(devices=tuple(np.array([1, 7])))
    assert [type(each) for each in named.devices] == [int, int]
    assert named == Group(devices=(1, 7))
    with pytest.raises(ValueError, match=r"devices that the task does not have: 7\."):
        Fleet((named, Group())).build(np.ones(2, dtype=np.int64), 0)


def test_groups_may_name_the_owners_of_the_data() -> None:
    groups = (Group(devices=("zoe", "ada")), Group(devices=(1,)))
    fleet = Fleet(groups=groups)
    world = fleet.build(np.arange(4), 0, ("ada", "bob", "zoe", "zoe"))
    assert world.group.tolist() == [0, 1, 0, 0]
    assert fleet.owners == ("zoe", "ada")


def test_what_is_dealt_at_random_says_so() -> None:
    def told(*groups: Group, **rest: Any) -> str:
        return Fleet(groups=groups, **rest).build(np.arange(2), 7).assignment

    assert told(Group(), Group()) == (
        "Groups are assigned at random (seed 7), independently of the data."
    )
    assert told(Group(devices=(1,)), Group()).startswith(
        "Some groups name their devices. The other devices are assigned at random (seed 7)"
    )
    named = told(Group(devices=(1,)), Group(devices=(0,)))
    assert named == "Groups name their devices; none is drawn."
    assert told(Group()) == "All devices are of one group."
    links = (Steady(1e6, 1e6), Steady(2e6, 2e6))
    assert told(Group(), links=links).endswith("independently of the groups (seed 7).")


@pytest.mark.parametrize(
    ("groups", "owners", "told"),
    [
        (
            (Group(devices=(0, 20, 25)), Group(devices=("eve", 0))),
            ("ada", *[""] * 19),
            (
                "devices that the task does not have: 20, 25. It has 20, numbered from 0.",
                "owners who have no device: eve. Owners with a device: ada.",
                "devices in more than one group: 0.",
            ),
        ),
        ((Group(devices=("eve",)), Group()), (), ("owners (eve), but no device has the data of",)),
        ((Group(devices=("ada",)), Group(devices=(0,))), ("ada",), ("in more than one group: 0.",)),
        (
            (Group(devices=tuple(range(18))),),
            (),
            ("name 18 of 20 devices; no group has 18, 19. Name them too",),
        ),
        ((Group(devices=(0,)), Group(count=20)), (), ("have 21 devices but the task has 20",)),
        ((Group(devices=(0,)), Group(count=2)), (), ("have 3 devices but the task has 20",)),
    ],
)
def test_every_device_has_one_group(
    groups: tuple[Group, ...], owners: tuple[str, ...], told: tuple[str, ...]
) -> None:
    with pytest.raises(ValueError, match="Fleet") as error:
        Fleet(groups=groups).build(SAMPLES, 0, owners)
    problems = str(error.value).splitlines()
    assert len(problems) == len(told)
    for problem, part in zip(problems, told, strict=True):
        assert part in problem
