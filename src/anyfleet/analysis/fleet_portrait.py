"""A portrait of a fleet: what its devices are like over a day."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from anyfleet.analysis.breakdown import named
from anyfleet.arrays import Flags, Floats, Ints
from anyfleet.core.messages import Conditions
from anyfleet.core.time_and_energy import Counts, effort_of
from anyfleet.world import When, World

HOURS = 24
_MOST = 500  # devices of each group in the portrait; a fleet may have millions
_GFLOP = 1e9


@dataclass(frozen=True, eq=False)
class Portrait:
    """Some devices of every group, at every hour of a day. Arrays are [hours, devices].

    A round begins with every hour, so that changes by the hour and by the round are seen.
    """

    names: tuple[str, ...]  # of the groups
    counts: tuple[int, ...]  # of all their devices
    device: Ints  # those in the portrait
    group: Ints  # of each of these
    level: Ints
    speed: Floats  # FLOP per second, after other work
    bit_rate_up: Floats  # bits per second, for a device alone on its link
    bit_rate_down: Floats
    energy: Floats  # joules for one GFLOP at the highest frequency
    memory: Floats  # bytes
    overhead: Floats  # seconds for each local step
    battery: Floats  # joules when full
    budget: Floats  # joules for one order
    distance: Floats  # metres
    mortality: Floats  # share of orders during which the device dies
    online: Flags


def varies(values: Floats) -> bool:
    """Return whether numbers differ by more than rounding; infinities are equal."""
    return not math.isclose(float(values.min()), float(values.max()))


def portray(world: World) -> Portrait:
    """Return the portrait of a fleet."""
    device = _examined(world.group)
    groups = named([group.name for group in world.groups], world.group)
    moments = [When(3600.0 * hour, hour) for hour in range(HOURS)]
    seen = [world.conditions(device, when, active=1) for when in moments]

    def over_day(look: Callable[[When], Floats]) -> Floats:
        return np.stack([look(when) for when in moments])

    return Portrait(
        names=groups.names,
        counts=tuple(np.bincount(groups.of, minlength=len(groups.names)).tolist()),
        device=device,
        group=groups.of[device],
        level=world.declared.level[device],
        energy=np.stack([_energy(own) for own in seen]),
        distance=over_day(lambda when: world.values("distance", device, when)),
        mortality=over_day(lambda when: world.values("mortality", device, when)),
        online=np.stack([world.online(device, when) for when in moments]),
        **{
            name: np.stack([getattr(own, name) for own in seen])
            for name in (
                "speed",
                "bit_rate_up",
                "bit_rate_down",
                "memory",
                "overhead",
                "battery",
                "budget",
            )
        },
    )


def _examined(group: Ints) -> Ints:
    """Return the first devices of each group, which are as random as any others."""
    firsts = [np.flatnonzero(group == number)[:_MOST] for number in np.unique(group)]
    return np.sort(np.concatenate(firsts))


def _energy(own: Conditions) -> Floats:
    count = len(own.speed)
    one = effort_of(Counts(*(_GFLOP,) * 3), 1.0, local_steps=0, calls=0, moved=0)
    return one.take([0] * count).joules(own, np.full(count, np.nan))
