"""How an order may end before it is answered. A normal event, not an exception."""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from anyfleet.world import World
from anyfleet.world.quantities import When

# A link or a device that changes every moment must not hold the simulation for ever.
_MOST_CHANGES = 10_000


class Fate(NamedTuple):
    """When an order ends without an answer, in seconds from its start, and why."""

    after: float
    reason: str


class Phase(NamedTuple):
    """A part of an order's course: so long, at so much energy."""

    seconds: float
    joules: float


def first(fates: Iterable[Fate]) -> Fate | None:
    """The one that comes to pass."""
    return min(fates, default=None)


def runs_dry(phases: tuple[Phase, ...], charge: float) -> Iterator[Fate]:
    """A battery that does not last."""
    passed = 0.0
    for phase in phases:
        if phase.joules > charge:
            yield Fate(passed + phase.seconds * charge / phase.joules, "battery empty")
            return
        passed, charge = passed + phase.seconds, charge - phase.joules


def goes_offline(world: World, device: int, when: When, seconds: float) -> Iterator[Fate]:
    """A device that leaves before it is done, or is away from the first."""
    only, moment = np.array([device]), when
    for _ in range(_MOST_CHANGES):
        if not world.online(only, moment)[0]:
            yield Fate(moment.now - when.now, "went offline")
            return
        moment = When(world.online_until(device, moment), when.step)
        if not moment.now < when.now + seconds:
            return


def transfer(
    bits: float, when: When, rate: Callable[[When], float], until: Callable[[When], float]
) -> float:
    """Seconds in which a link carries so many bits, whose rate may change; infinite: never."""
    left, moment = bits, when
    for _ in range(_MOST_CHANGES if bits > 0 else 0):
        now, end = rate(moment), until(moment)
        carried = now * (end - moment.now) if now else 0.0
        if carried >= left:
            return moment.now - when.now + left / now
        if math.isinf(end):
            return math.inf
        left, moment = left - carried, When(end, when.step)
    if bits <= 0:
        return 0.0
    # Beyond what is looked at in detail, it goes on as on average so far.
    return (moment.now - when.now) * bits / (bits - left) if left < bits else math.inf
