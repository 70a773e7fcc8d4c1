"""A fleet of unequal devices: its groups, and the world that is made of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import get_args

import numpy as np
import torch

from anyfleet import rng
from anyfleet.columns import Ints
from anyfleet.elastic.counting import Counting
from anyfleet.errors import refuse
from anyfleet.types import Devices
from anyfleet.world.group import Group
from anyfleet.world.radio import Link
from anyfleet.world.world import Reports, World

# FedPMT's: 1, 1/2, 1/3, 1/4 and 1/5 of the fastest (METHODS §A.1; one third, not 0.33, or the third
# level misses its deadline).
SPEEDS = (2e9, 1e9, 2e9 / 3, 5e8, 4e8)


def _five_levels() -> tuple[Group, ...]:
    return tuple(Group(name=f"level {i}", speed=speed) for i, speed in enumerate(SPEEDS))


@dataclass(frozen=True)
class Fleet:
    """Groups of devices. Who belongs to which group is drawn, with the run's seed.

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
        if self.counting not in get_args(Counting):
            yield (
                f"Fleet.counting must be one of {', '.join(get_args(Counting))}, "
                f"got {self.counting!r}."
            )

    @property
    def size(self) -> int | None:
        """How many devices there are; None when the task decides."""
        counts = [group.count for group in self.groups]
        return sum(c for c in counts if c) if all(counts) else None

    def build(self, samples: Ints, seed: int) -> World:
        """The world of these groups, with one device for each entry of `samples`."""
        count = len(samples)
        group = _dealt(_members(self.groups, count), seed, "fleet")
        levels = [i if g.level is None else g.level for i, g in enumerate(self.groups)]
        link = _dealt(np.arange(count) % max(1, len(self.links)), seed, "fleet links")
        return World(
            groups=self.groups,
            links=self.links or tuple(g.link for g in self.groups),
            reports=self.reports,
            declared=Devices(
                level=np.array(levels, dtype=np.int64)[group],
                samples=samples,
                group=group,
                column=np.array([g.loss.width if g.loss.fails else 1.0 for g in self.groups])[
                    group
                ],
                counting=self.counting,
            ),
            group=group.astype(np.int32),
            link=(link if self.links else group).astype(np.int32),
            seed=seed,
        )


def _members(groups: Sequence[Group], count: int) -> Ints:
    """The group of every device, not yet shuffled."""
    counted = sum(group.count or 0 for group in groups)
    open_ = [i for i, group in enumerate(groups) if group.count is None]
    if counted > count or (counted < count and not open_):
        raise ValueError(
            f"Fleet.groups have {counted} devices but the task has {count}. Change the counts, the "
            "task's devices, or leave the count of a group out: it then takes the rest."
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
