"""A fleet of unequal devices: its groups, and the world that is made of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import get_args

import numpy as np
import torch

from anyfleet import rng
from anyfleet.arguments import checked
from anyfleet.arrays import Ints
from anyfleet.core.messages import Devices
from anyfleet.elastic.cost.operations import Counting
from anyfleet.errors import refuse
from anyfleet.world.group import Group
from anyfleet.world.links import Link
from anyfleet.world.world import Reports, World

# FedPMT's: 1, 1/2, 1/3, 1/4 and 1/5 of the fastest (specification §A.1; one third, not 0.33, or the third
# level misses its deadline).
SPEEDS = (2e9, 1e9, 2e9 / 3, 5e8, 4e8)
_LISTED = 10  # of what is wrong, one by one


def _five_levels() -> tuple[Group, ...]:
    return tuple(Group(name=f"level {i}", speed=speed) for i, speed in enumerate(SPEEDS))


@checked
@dataclass(frozen=True)
class Fleet:
    """Groups of devices. Who belongs to which group is drawn, with the run's seed.

    Groups that name their `devices` have exactly these; the others share out the rest.
    Without `groups` there are the five of `levels`.
    `links`, where given, are dealt evenly over all devices, independently of the groups, and
    replace the groups' own. `reports` says what policies learn of the devices. `counting` is how
    the work of an order is counted: what the model really calculates ("flops"), or by one of
    FedPMT's rules; a group's speed is then in those operations per second.
    """

    groups: tuple[Group, ...] = field(default_factory=_five_levels)
    links: tuple[Link, ...] = ()
    reports: Reports = field(default_factory=Reports)
    counting: Counting = "flops"

    def __post_init__(self) -> None:
        refuse(self._faults())

    def _faults(self) -> Iterator[str]:
        if not self.groups:
            yield "Fleet.groups must have at least one group."
        yield from _unknown_counting(self.counting)

    @property
    def size(self) -> int | None:
        """How many devices there are; None when the task decides."""
        counts = [_counted(group) for group in self.groups]
        return sum(c for c in counts if c) if all(counts) else None

    @property
    def owners(self) -> tuple[str, ...]:
        """The owners of data whom the fleet names, in its own order."""
        named = (each for group in self.groups for each in group.devices)
        return tuple(each for each in named if isinstance(each, str))

    def build(self, samples: Ints, seed: int, owners: Sequence[str] = ()) -> World:
        """Make the world of these groups, with one device for each entry of `samples`.

        `owners` says whose data each device has, for fleets that name owners.
        """
        count = len(samples)
        group = _membership(self.groups, count, seed, owners)
        link = _dealt(np.arange(count) % max(1, len(self.links)), seed, "fleet links")
        levels = [i if g.level is None else g.level for i, g in enumerate(self.groups)]
        return World(
            groups=self.groups,
            links=self.links or tuple(g.link for g in self.groups),
            reports=self.reports,
            declared=declare(
                self.groups, group, np.array(levels, dtype=np.int64)[group], samples, self.counting
            ),
            group=group.astype(np.int32),
            link=(link if self.links else group).astype(np.int32),
            seed=seed,
            dealt=self._told(seed),
        )

    def _told(self, seed: int) -> str:
        """How devices come to their groups, in words."""
        links = f" Links are drawn too, independently of the groups (seed {seed})."
        after = links if len(self.links) > 1 else ""
        named = [bool(group.devices) for group in self.groups]
        if len(self.groups) == 1:
            return f"All devices are of one group.{after}"
        if all(named):
            return f"Groups name their devices; none is drawn.{after}"
        rest = "Which of the others belong" if any(named) else "Which devices belong"
        first = "Some groups name their devices. " if any(named) else ""
        return (
            f"{first}{rest} to which group is drawn with seed {seed}, whatever their data.{after}"
        )


def declare(
    groups: Sequence[Group], group: Ints, level: Ints, samples: Ints, counting: Counting
) -> Devices:
    """Return what a fleet declares of its devices, once."""
    columns = np.array([g.loss.width if g.loss.fails else 1.0 for g in groups])
    return Devices(
        level=level, samples=samples, group=group, column_width=columns[group], counting=counting
    )


def listed(names: Sequence[object]) -> str:
    """Join names by commas; of many, the first and how many more there are."""
    told = ", ".join(map(str, names[:_LISTED]))
    more = len(names) - _LISTED
    return told if more <= 0 else f"{told} and {more} more"


def _unknown_counting(counting: str) -> Iterator[str]:
    if counting not in get_args(Counting):
        yield f"Fleet.counting must be one of {', '.join(get_args(Counting))}, got {counting!r}."


def _counted(group: Group) -> int | None:
    return len(group.devices) or group.count


def _membership(groups: Sequence[Group], count: int, seed: int, owners: Sequence[str]) -> Ints:
    """The group of every device: as the groups name them, and the rest dealt."""
    if not any(group.devices for group in groups):
        return _dealt(_members(groups, count), seed, "fleet")
    found = _named(groups, count, owners)
    rest = np.flatnonzero(found < 0)
    takers = [number for number, group in enumerate(groups) if not group.devices]
    if not takers:
        if len(rest):
            raise ValueError(
                f"Fleet.groups name {count - len(rest)} of {count} devices; nobody takes "
                f"{listed(rest.tolist())}. Name them too, or add a group that does not name its "
                "devices: it takes the rest."
            )
        return found
    members = _members([groups[number] for number in takers], len(rest), named=count - len(rest))
    found[rest] = np.array(takers)[_dealt(members, seed, "fleet")]
    return found


def _named(groups: Sequence[Group], count: int, owners: Sequence[str]) -> Ints:
    """The group of each device that a group names, -1 for the others; all faults at once."""
    found = np.full(count, -1, dtype=np.int64)
    twice: dict[object, None] = {}
    absent: dict[object, None] = {}
    places: dict[str, list[int]] = {}
    for device, owner in enumerate(owners):
        if owner:
            places.setdefault(owner, []).append(device)
    for number, group in enumerate(groups):
        for each in group.devices:
            if isinstance(each, str):
                there = places.get(each, [])
            else:
                there = [each] if each < count else []
            if not there:
                absent[each] = None
            elif (found[there] >= 0).any():
                twice[each] = None
            else:
                found[there] = number
    refuse(_misnamed(list(absent), list(twice), count, list(places)))
    return found


def _misnamed(
    absent: Sequence[object], twice: Sequence[object], count: int, owners: Sequence[str]
) -> Iterator[str]:
    numbers = [each for each in absent if isinstance(each, int)]
    names = [each for each in absent if isinstance(each, str)]
    if numbers:
        yield (
            f"Fleet.groups name devices that the task does not have: {listed(numbers)}. It has "
            f"{count}, numbered from 0."
        )
    if names and owners:
        yield (
            f"Fleet.groups name owners who have no device: {listed(names)}. Those who have one: "
            f"{listed(owners)}."
        )
    elif names:
        yield (
            f"Fleet.groups name owners ({listed(names)}), but no device has the data of one owner: "
            "that takes data with owners, and the partition ByOwner."
        )
    if twice:
        yield f"Fleet.groups name devices that have a group already: {listed(twice)}."


def _members(groups: Sequence[Group], count: int, named: int = 0) -> Ints:
    """The group of every device, not yet shuffled; `named` devices are not among them."""
    counted = sum(group.count or 0 for group in groups)
    open_ = [i for i, group in enumerate(groups) if group.count is None]
    if counted > count or (counted < count and not open_):
        raise ValueError(
            f"Fleet.groups have {counted + named} devices but the task has {count + named}. Change "
            "the counts, the task's devices, or leave the count of a group out: it then takes the "
            "rest."
        )
    rest = np.array(open_, dtype=np.int64)[np.arange(count - counted) % max(1, len(open_))]
    given = [np.full(group.count or 0, i, dtype=np.int64) for i, group in enumerate(groups)]
    return np.concatenate([rest, *given])


def _dealt(members: Ints, seed: int, purpose: str) -> Ints:
    """Shuffled, so that neither the order of the data nor another deal goes along with it."""
    everybody = torch.ones(len(members), dtype=torch.bool)
    dealt = np.empty_like(members)
    dealt[rng.permutation(rng.root(seed, purpose), everybody).numpy()] = members
    return dealt
