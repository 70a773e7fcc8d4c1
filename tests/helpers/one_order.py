"""One order at a time, in plain numbers: the reference for phases and failures of whole cohorts."""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from anyfleet.core.messages import Conditions
from anyfleet.core.time_and_energy import Effort, transfer_joules, transfer_seconds
from anyfleet.runtime.simulated.phases import MOST_CHANGES, ROUNDING
from anyfleet.world import World
from anyfleet.world.links import Way
from anyfleet.world.quantities import When


class Progress(NamedTuple):
    """How far a phase is at one point in time."""

    seconds: float
    done: float
    joules: float


@dataclass(frozen=True)
class Phase:
    """One phase of an order from beginning to end, linear between its points."""

    points: tuple[Progress, ...]

    @property
    def end(self) -> Progress:
        """The last point."""
        return self.points[-1]

    def progress_at(self, seconds: float) -> Progress:
        """Return how far the phase is after `seconds`."""
        if seconds >= self.end.seconds:
            return self.end
        after = bisect_right(self.points, max(0.0, seconds), key=attrgetter("seconds"))
        one, two = self.points[after - 1], self.points[after]
        passed = (max(0.0, seconds) - one.seconds) / (two.seconds - one.seconds)
        done, joules = (a + passed * (b - a) for a, b in zip(one[1:], two[1:], strict=True))
        return Progress(seconds, done, joules)

    def seconds_for(self, joules: float) -> float:
        """Return after how many seconds `joules` are spent; they must not suffice for all of it."""
        after = bisect_right(self.points, joules, key=attrgetter("joules"))
        one, two = self.points[after - 1], self.points[after]
        passed = (joules - one.joules) / (two.joules - one.joules)
        return one.seconds + passed * (two.seconds - one.seconds)


Cost = Callable[[When], tuple[float, float]]  # seconds and joules of the whole, at one time


def follow(when: When, cost: Cost, until: Callable[[When], float]) -> Phase:
    """Return the phase that begins now; `cost` applies at each time, and changes at `until`."""
    points, moment = [Progress(0.0, 0.0, 0.0)], when
    for _ in range(MOST_CHANGES):
        (takes, spends), end = cost(moment), until(moment)
        seconds, done, joules = points[-1]
        left, room = 1.0 - done, end - moment.now
        if math.isinf(room) or left * takes <= room * (1 + ROUNDING):
            last = Progress(seconds + left * takes, 1.0, joules + left * spends)
            return Phase((*points, last))
        more = room / takes
        points.append(Progress(end - when.now, done + more, joules + more * spends))
        moment = When(end, when.round_index)
    seconds, done, joules = points[-1]
    ends = (seconds / done, 1.0, joules / done) if done > 0 else (math.inf, 1.0, joules)
    return Phase((*points, Progress(*ends)))


@dataclass(frozen=True, eq=False)
class OneOrder:
    """The world as one order meets it."""

    world: World
    device: int
    when: When  # the order was submitted
    own: Conditions  # of its device at that time
    active: int  # devices that use its band

    @property
    def _only(self) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        return np.array([self.device])

    def transfer(self, bits: float, way: Way, when: When) -> Phase:
        """Return a transfer that begins now."""
        (watts,) = self.own.receive_power if way == "down" else self.own.send_power

        def cost(moment: When) -> tuple[float, float]:
            (rate,) = self.world.bit_rates(self._only, moment, self.active).of(way)
            seconds = transfer_seconds(bits, float(rate))
            return float(seconds), float(transfer_joules(seconds, float(watts)))

        def until(moment: When) -> float:
            return float(self.world.bit_rates_until(self._only, moment)[0])

        return follow(when, cost, until)

    def compute(self, effort: Effort, frequency: float, when: When) -> Phase:
        """Return the training that begins now."""
        asked = np.array([frequency])

        def cost(moment: When) -> tuple[float, float]:
            own = replace(self.own, **self.world.compute_conditions(self._only, moment))
            (seconds,), (joules,) = effort.seconds(own, asked), effort.joules(own, asked)
            return float(seconds), float(joules)

        def until(moment: When) -> float:
            return float(self.world.compute_until(self._only, moment)[0])

        return follow(when, cost, until)

    def offline(self, when: When, seconds: float) -> float:
        """Return after how many of these seconds the device is offline; infinite if it stays."""
        moment = when
        for _ in range(MOST_CHANGES):
            if not self.world.online(self._only, moment)[0]:
                return moment.now - when.now
            end = float(self.world.online_until(self._only, moment)[0])
            moment = When(end, when.round_index)
            if not moment.now < when.now + seconds:
                break
        return math.inf


def battery_empty(phases: Iterable[Phase], joules: float) -> float:
    """Return after how many seconds a battery is empty; infinite if it lasts."""
    passed = 0.0
    for phase in phases:
        if phase.end.joules > joules:
            return passed + phase.seconds_for(joules)
        passed, joules = passed + phase.end.seconds, joules - phase.end.joules
    return math.inf


def earliest(failures: Iterable[tuple[float, str]]) -> tuple[float, str]:
    """Return the earliest failure, or an infinite time and ""."""
    return min(
        ((after, why) for after, why in failures if after < math.inf), default=(math.inf, "")
    )


def progress(phases: Iterable[Phase], elapsed: float) -> Iterator[Progress]:
    """Yield how far the phases of an order are, `elapsed` seconds after it began."""
    start = 0.0
    for phase in phases:
        if elapsed >= (start + phase.end.seconds) * (1 - ROUNDING):
            yield phase.end
        else:
            yield phase.progress_at(elapsed - start) if elapsed > start else phase.points[0]
        start += phase.end.seconds
