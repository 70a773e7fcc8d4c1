"""Failures: why an order brings no reply, and when. They are normal events, not exceptions."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from anyfleet.runtime.simulated.phases import MOST_CHANGES, Phase
from anyfleet.world import World
from anyfleet.world.quantities import When


class PossibleFailure(NamedTuple):
    """A failure that ends an order unless an earlier one does: seconds from its start, and why."""

    after: float
    reason: str


def earliest(failures: Iterable[PossibleFailure]) -> PossibleFailure | None:
    """Return the earliest failure, or None."""
    return min(failures, default=None)


def battery_failures(phases: Iterable[Phase], joules: float) -> Iterator[PossibleFailure]:
    """Yield the failure of a battery with `joules` left that does not last for these phases.

    A device with an empty battery still performs a phase that costs nothing.
    """
    passed = 0.0
    for phase in phases:
        if phase.joules > joules:
            yield PossibleFailure(passed + phase.seconds_for(joules), "battery empty")
            return
        passed, joules = passed + phase.seconds, joules - phase.joules


def offline_failures(
    world: World, device: int, when: When, seconds: float
) -> Iterator[PossibleFailure]:
    """Yield the failure of a device that goes offline within `seconds`, or is offline already."""
    only, moment = np.array([device]), when
    for _ in range(MOST_CHANGES):
        if not world.online(only, moment)[0]:
            yield PossibleFailure(moment.now - when.now, "went offline")
            return
        moment = When(float(world.online_until(only, moment)[0]), when.round_index)
        if not moment.now < when.now + seconds:
            return
