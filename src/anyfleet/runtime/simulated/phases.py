"""The phases of an order (download, compute, upload), followed as bit rates and loads change."""

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import NamedTuple

from anyfleet.core.messages import Conditions
from anyfleet.core.orders import Cohort
from anyfleet.core.time_and_energy import Effort, transfer_joules, transfer_seconds
from anyfleet.world import World
from anyfleet.world.links import Way
from anyfleet.world.quantities import When
from anyfleet.world.world import Active

# A link or a device that changes all the time must not keep the simulation busy for ever.
MOST_CHANGES = 10_000
# Sums of seconds round: a phase that is complete but for this share is complete.
ROUNDING = 1e-12


class SteadyCost(NamedTuple):
    """What a whole phase would take if nothing changed; infinite seconds: it stands still."""

    seconds: float
    joules: float


class Progress(NamedTuple):
    """How far a phase is at one point in time."""

    seconds: float  # since the phase began
    done: float  # share of the work, 0 to 1
    joules: float  # spent so far


_START = Progress(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Phase:
    """One phase of an order from beginning to end, linear between its points."""

    points: tuple[Progress, ...]

    @property
    def seconds(self) -> float:
        """The length of the phase; infinite if it never ends."""
        return self.points[-1].seconds

    @property
    def joules(self) -> float:
        """The energy of the whole phase."""
        return self.points[-1].joules

    def progress_at(self, seconds: float) -> Progress:
        """Return how far the phase is after `seconds`."""
        if seconds >= self.seconds:
            return self.points[-1]
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


def follow(when: When, cost: Callable[[When], SteadyCost], until: Callable[[When], float]) -> Phase:
    """Return the phase that begins now; `cost` applies at each time, and changes at `until`."""
    points, moment = [_START], when
    for _ in range(MOST_CHANGES):
        now, end = cost(moment), until(moment)
        seconds, done, joules = points[-1]
        left, room = 1.0 - done, end - moment.now
        if math.isinf(room) or left * now.seconds <= room * (1 + ROUNDING):
            last = Progress(seconds + left * now.seconds, 1.0, joules + left * now.joules)
            return Phase((*points, last))
        more = room / now.seconds
        points.append(Progress(end - when.now, done + more, joules + more * now.joules))
        moment = When(end, when.round_index)
    return Phase((*points, _extrapolated(points[-1])))


def _extrapolated(sofar: Progress) -> Progress:
    """Return the end of a phase that goes on as it did on average so far."""
    if sofar.done <= 0:
        return Progress(math.inf, 1.0, sofar.joules)
    return Progress(sofar.seconds / sofar.done, 1.0, sofar.joules / sofar.done)


def transfer_cost(bits: float, bit_rate: float, watts: float) -> SteadyCost:
    """Return the cost of sending bits over a link; seconds are infinite without a link."""
    seconds = transfer_seconds(bits, bit_rate)
    return SteadyCost(float(seconds), float(transfer_joules(seconds, watts)))


@dataclass(frozen=True, eq=False)
class OrderTiming:
    """The world as one order meets it; computes the phases of the order."""

    world: World
    order: Cohort  # a single order
    when: When  # the order was submitted
    conditions: Conditions  # of its device at that time
    active: Active  # devices that use each band meanwhile

    def download(self) -> Phase:
        """Return the download phase."""
        known = float(self.conditions.bit_rate_down[0])
        return self._transfer(float(self.order.bits[0]), "down", self.when, known)

    def upload(self, bits: float, when: When) -> Phase:
        """Return the upload phase of a reply of `bits` that begins now."""
        (still,) = self.world.bit_rates_until(self.order.device, self.when)
        # Bit rates are computed again only if a round or time can have changed them meanwhile.
        same = when.round_index == self.when.round_index and when.now < still
        known = float(self.conditions.bit_rate_up[0]) if same else None
        return self._transfer(bits, "up", when, known)

    def compute(self, effort: Effort, after: float) -> Phase:
        """Return the compute phase, which begins `after` seconds.

        What only a new round changes stays as it was when the order was submitted.
        """
        device, frequency = self.order.device, self.order.hyperparameters.frequency
        (still,) = self.world.compute_until(device, self.when)

        def cost(moment: When) -> SteadyCost:
            own = self.conditions
            if moment.now >= still:
                own = replace(own, **self.world.compute_conditions(self.order.device, moment))
            (seconds,), (joules,) = effort.seconds(own, frequency), effort.joules(own, frequency)
            return SteadyCost(float(seconds), float(joules))

        # After a download that never ends, computing never begins: any finite start will do.
        start = self.when.now + (after if math.isfinite(after) else 0.0)
        begun = When(start, self.when.round_index)
        return follow(
            begun, cost, lambda moment: float(self.world.compute_until(device, moment)[0])
        )

    def _transfer(self, bits: float, way: Way, when: When, known: float | None) -> Phase:
        device = self.order.device
        own = self.conditions
        (watts,) = own.receive_power if way == "down" else own.send_power

        def cost(moment: When) -> SteadyCost:
            if known is not None and moment == when:
                return transfer_cost(bits, known, float(watts))
            (rate,) = self.world.bit_rates(self.order.device, moment, self.active).of(way)
            return transfer_cost(bits, float(rate), float(watts))

        return follow(
            when, cost, lambda moment: float(self.world.bit_rates_until(device, moment)[0])
        )
