"""Failures: why orders bring no reply, and when. They are normal events, not exceptions."""

from collections.abc import Mapping, Sequence

import numpy as np

from anyfleet.arrays import Flags, Floats, Ints, every
from anyfleet.runtime.simulated.phases import AHEAD, MOST_CHANGES, Phases, pieces
from anyfleet.world import World
from anyfleet.world.quantities import Moments

# In the order of the alphabet: of failures at the same time, the first here counts.
REASONS: tuple[str, ...] = (
    "battery empty",
    "died",
    "no link",
    "nothing came through",
    "out of memory",
    "refused",
    "went offline",
)
OUT_OF_MEMORY, REFUSED = map(REASONS.index, ("out of memory", "refused"))
DETAILED = (OUT_OF_MEMORY, REFUSED)  # reasons of which a sentence says more


def earliest(failures: Mapping[str, Floats]) -> tuple[Floats, Ints]:
    """Return when each order first fails, and the place of its reason among `REASONS`; or -1."""
    reasons = sorted(failures)
    times = np.array([failures[reason] for reason in reasons])
    after = times.min(axis=0)
    if every(after == np.inf):
        return after, np.full(len(after), -1)
    places = np.array([REASONS.index(reason) for reason in reasons])
    return after, np.where(np.isfinite(after), places[times.argmin(axis=0)], -1)


def when(happens: Flags, after: Floats | float) -> Floats:
    """Return the seconds after which orders fail: those to which it happens."""
    return np.where(happens, after, np.inf)


def battery_empty(phases: Sequence[Phases], joules: Floats) -> Floats:
    """Return after how many seconds of these phases batteries are empty; infinite if they last.

    A device with an empty battery still performs a phase that costs nothing.
    """
    found, passed = np.full(len(joules), np.inf), np.zeros(len(joules))
    if every(np.isinf(joules)):
        return found
    for phase in phases:
        rows = np.flatnonzero(np.isinf(found) & (phase.joules > joules))
        if len(rows):
            found[rows] = passed[rows] + phase.take(rows).seconds_for(joules[rows])
        passed, joules = passed + phase.seconds, joules - phase.joules
    return found


def offline(world: World, devices: Ints, start: Moments, seconds: Floats) -> Floats:
    """Return after how many of these seconds devices are offline; infinite if they stay."""
    found = np.full(len(devices), np.inf)
    if world.always_online:
        return found
    end, going, moments, seen = start.now + seconds, np.arange(len(devices)), start, 0

    def until(rows: Ints, then: Moments) -> Floats:
        return world.online_until(devices[rows], then)

    while len(going) and seen < MOST_CHANGES:
        most = np.full(len(going), AHEAD)
        ahead = pieces(going, moments, until, end[going], most)
        rows = going[ahead.row]
        gone = np.flatnonzero(~world.online(devices[rows], ahead.start))
        np.minimum.at(found, rows[gone], ahead.start.now[gone] - start.now[rows[gone]])
        reached = ahead.end[np.cumsum(np.bincount(ahead.row)) - 1]
        more = (reached < end[going]) & np.isinf(found[going])
        going, seen = going[more], seen + AHEAD
        moments = Moments(reached[more], start.round_index[going])
    return found
