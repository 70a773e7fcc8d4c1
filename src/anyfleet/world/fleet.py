"""Fleets of unequal devices: groups, and the world that is built from them."""

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

# FedPMT's speeds: 1, 1/2, 1/3, 1/4 and 1/5 of the fastest (specification §A.1). One third is not
# rounded to 0.33, or the third level would miss its deadline.
SPEEDS = (2e9, 1e9, 2e9 / 3, 5e8, 4e8)
_LISTED = 10  # names that an error lists one by one


def _five_levels() -> tuple[Group, ...]:
    return tuple(Group(name=f"level {i}", speed=speed) for i, speed in enumerate(SPEEDS))


@checked
@dataclass(frozen=True)
class Fleet:
    """Groups of devices. Which device belongs to which group is drawn with the run's seed.

    A group that names its `devices` has exactly these; the other groups share the rest. Without
    `groups` the fleet has the five of the preset `levels`.
    `links`, where given, are dealt evenly over all devices, independently of the groups, and
    replace the groups' own links. `reports` says how old and how exact the conditions are that
    devices report. `counting` says how the work of an order is counted: the FLOP of the model
    ("flops"), or the operations of one of FedPMT's rules. A group's speed is in the same unit.
    """

    groups: tuple[Group, ...] = field(default_factory=_five_levels)  # one for each kind of device
    links: tuple[Link, ...] = ()  # dealt over all devices, in place of the groups' own
    reports: Reports = field(default_factory=Reports)  # age and error of what devices report
    counting: Counting = "flops"  # how the work of an order is counted

    def __post_init__(self) -> None:
        refuse(self._faults())

    def _faults(self) -> Iterator[str]:
        if not self.groups:
            yield "Fleet.groups must have at least one group."
        yield from _counting_faults(self.counting)

    @property
    def size(self) -> int | None:
        """The number of devices, or None where the task decides."""
        counts = [_group_size(group) for group in self.groups]
        return sum(c for c in counts if c) if all(counts) else None

    @property
    def owners(self) -> tuple[str, ...]:
        """The owners of data that the fleet names, in the order of its groups."""
        named = (each for group in self.groups for each in group.devices)
        return tuple(each for each in named if isinstance(each, str))

    def build(self, samples: Ints, seed: int, owners: Sequence[str] = ()) -> World:
        """Return the world of these groups, with one device for each entry of `samples`.

        `owners` says whose data each device has; fleets that name owners need it.
        """
        count = len(samples)
        group = _membership(self.groups, count, seed, owners)
        link = _shuffled(np.arange(count) % max(1, len(self.links)), seed, "fleet links")
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
            assignment=self._assignment(seed),
        )

    def _assignment(self, seed: int) -> str:
        """Return a sentence that says how devices come to their groups."""
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
    """Return what a fleet declares about its devices once, before the first round."""
    losses = [each.column_loss for each in groups]
    widths = np.array([loss.column_width if loss.lossy else 1.0 for loss in losses])
    return Devices(
        level=level, samples=samples, group=group, column_width=widths[group], counting=counting
    )


def listed(names: Sequence[object]) -> str:
    """Return names joined by commas; of many, the first few and the number of the others."""
    first = ", ".join(map(str, names[:_LISTED]))
    more = len(names) - _LISTED
    return first if more <= 0 else f"{first} and {more} more"


def _counting_faults(counting: str) -> Iterator[str]:
    if counting not in get_args(Counting):
        yield f"Fleet.counting must be one of {', '.join(get_args(Counting))}, got {counting!r}."


def _group_size(group: Group) -> int | None:
    return len(group.devices) or group.count


def _membership(groups: Sequence[Group], count: int, seed: int, owners: Sequence[str]) -> Ints:
    """Return the group of every device: as the groups name them, and the rest at random."""
    if not any(group.devices for group in groups):
        return _shuffled(_members(groups, count), seed, "fleet")
    found = _named(groups, count, owners)
    rest = np.flatnonzero(found < 0)
    takers = [number for number, group in enumerate(groups) if not group.devices]
    if not takers:
        if len(rest):
            raise ValueError(
                f"Fleet.groups name {count - len(rest)} of {count} devices; no group has "
                f"{listed(rest.tolist())}. Name them too, or add a group that does not name its "
                "devices: it takes the rest."
            )
        return found
    members = _members([groups[number] for number in takers], len(rest), named=count - len(rest))
    found[rest] = np.array(takers)[_shuffled(members, seed, "fleet")]
    return found


def _named(groups: Sequence[Group], count: int, owners: Sequence[str]) -> Ints:
    """Return the group of each named device, -1 for the others; raise all faults at once."""
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
    refuse(_naming_faults(list(absent), list(twice), count, list(places)))
    return found


def _naming_faults(
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
            f"Fleet.groups name owners who have no device: {listed(names)}. Owners with a device: "
            f"{listed(owners)}."
        )
    elif names:
        yield (
            f"Fleet.groups name owners ({listed(names)}), but no device has the data of one owner. "
            "Use data with owners and the partition ByOwner."
        )
    if twice:
        yield f"Fleet.groups name devices in more than one group: {listed(twice)}. Name each once."


def _members(groups: Sequence[Group], count: int, named: int = 0) -> Ints:
    """Return the group of every device before shuffling; `named` devices are not among them."""
    counted = sum(group.count or 0 for group in groups)
    open_ = [i for i, group in enumerate(groups) if group.count is None]
    if counted > count or (counted < count and not open_):
        raise ValueError(
            f"Fleet.groups have {counted + named} devices but the task has {count + named}. Change "
            "the counts or the task's devices, or leave the count of a group out: it then takes "
            "the rest."
        )
    rest = np.array(open_, dtype=np.int64)[np.arange(count - counted) % max(1, len(open_))]
    given = [np.full(group.count or 0, i, dtype=np.int64) for i, group in enumerate(groups)]
    return np.concatenate([rest, *given])


def _shuffled(members: Ints, seed: int, purpose: str) -> Ints:
    """Return a random permutation, independent of the order of the data and of other draws."""
    everybody = torch.ones(len(members), dtype=torch.bool)
    shuffled = np.empty_like(members)
    shuffled[rng.permutation(rng.root(seed, purpose), everybody).numpy()] = members
    return shuffled
