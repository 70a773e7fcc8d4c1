"""How an order may end before it is answered. A normal event, not an exception."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from anyfleet.runtime.simulated.phases import MOST_CHANGES, Phase
from anyfleet.world import World
from anyfleet.world.quantities import When


class PossibleFailure(NamedTuple):
    """When an order ends without an answer, in seconds from its start, and why."""

    after: float
    reason: str


def first(fates: Iterable[PossibleFailure]) -> PossibleFailure | None:
    """The one that comes to pass."""
    return min(fates, default=None)


def runs_dry(parts: Iterable[Phase], charge: float) -> Iterator[PossibleFailure]:
    """A battery that does not last. An empty one still does what costs nothing."""
    passed = 0.0
    for part in parts:
        if part.joules > charge:
            yield PossibleFailure(passed + part.lasts(charge), "battery empty")
            return
        passed, charge = passed + part.seconds, charge - part.joules


def goes_offline(
    world: World, device: int, when: When, seconds: float
) -> Iterator[PossibleFailure]:
    """A device that leaves before it is done, or is away from the first."""
    only, moment = np.array([device]), when
    for _ in range(MOST_CHANGES):
        if not world.online(only, moment)[0]:
            yield PossibleFailure(moment.now - when.now, "went offline")
            return
        moment = When(world.online_until(device, moment), when.round_index)
        if not moment.now < when.now + seconds:
            return
