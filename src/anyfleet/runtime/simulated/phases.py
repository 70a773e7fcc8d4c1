"""How the parts of an order go on: piece by piece, as rates and loads change with time."""

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import NamedTuple, Self

from anyfleet.core.messages import Conditions
from anyfleet.core.orders import Cohort
from anyfleet.core.time_and_energy import Effort
from anyfleet.world import World
from anyfleet.world.links import Way
from anyfleet.world.quantities import When
from anyfleet.world.world import Active

# A link or a device that changes every moment must not hold the simulation for ever.
MOST_CHANGES = 10_000
# Seconds of a transmission that nobody lives to see: there is no link. So no sum becomes infinite.
LONGEST = 1e15
# Sums of seconds round: a hair less than the whole is the whole.
ROUNDING = 1e-12


class Pace(NamedTuple):
    """What all of a part takes and costs while nothing changes; infinite: it stands still."""

    seconds: float
    joules: float


class Knot(NamedTuple):
    """How far a part is at some moment."""

    seconds: float  # since it began
    share: float  # of it is done
    joules: float  # are spent on it


_ORIGIN = Knot(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Phase:
    """A part of an order from its beginning to its end, straight from knot to knot."""

    knots: tuple[Knot, ...]

    @classmethod
    def steady(cls, pace: Pace) -> Self:
        """Nothing changes on the way."""
        return cls((_ORIGIN, Knot(pace.seconds, 1.0, pace.joules)))

    @property
    def seconds(self) -> float:
        """Until its end; infinite: it has none."""
        return self.knots[-1].seconds

    @property
    def joules(self) -> float:
        return self.knots[-1].joules

    def at(self, seconds: float) -> Knot:
        """How far it is after so many seconds."""
        if seconds >= self.seconds:
            return self.knots[-1]
        after = bisect_right(self.knots, max(0.0, seconds), key=attrgetter("seconds"))
        one, two = self.knots[after - 1], self.knots[after]
        passed = (max(0.0, seconds) - one.seconds) / (two.seconds - one.seconds)
        share, joules = (a + passed * (b - a) for a, b in zip(one[1:], two[1:], strict=True))
        return Knot(seconds, share, joules)

    def lasts(self, charge: float) -> float:
        """Seconds for which a charge lasts that is too small for all of it."""
        after = bisect_right(self.knots, charge, key=attrgetter("joules"))
        one, two = self.knots[after - 1], self.knots[after]
        passed = (charge - one.joules) / (two.joules - one.joules)
        return one.seconds + passed * (two.seconds - one.seconds)


def follow(when: When, pace: Callable[[When], Pace], until: Callable[[When], float]) -> Phase:
    """The course of what begins now and goes on at the pace in force, which may change."""
    knots, moment = [_ORIGIN], when
    for _ in range(MOST_CHANGES):
        now, end = pace(moment), until(moment)
        seconds, share, joules = knots[-1]
        left, room = 1.0 - share, end - moment.now
        if math.isinf(room) or left * now.seconds <= room * (1 + ROUNDING):
            last = Knot(seconds + left * now.seconds, 1.0, joules + left * now.joules)
            return Phase((*knots, last))
        done = room / now.seconds
        knots.append(Knot(end - when.now, share + done, joules + done * now.joules))
        moment = When(end, when.round_index)
    return Phase((*knots, _as_on_average(knots[-1])))


def _as_on_average(sofar: Knot) -> Knot:
    """The end of what is not looked at in detail any more."""
    if sofar.share <= 0:
        return Knot(math.inf, 1.0, sofar.joules)
    return Knot(sofar.seconds / sofar.share, 1.0, sofar.joules / sofar.share)


def transfer_pace(bits: float, rate: float, watts: float) -> Pace:
    """Of bits over a link. A radio draws power while they cross: waiting for a link is free."""
    if bits <= 0:
        return Pace(0.0, 0.0)  # not even waits for a link that is down
    seconds = bits / rate if rate * LONGEST > bits else math.inf
    return Pace(seconds, watts * seconds if math.isfinite(seconds) else 0.0)


@dataclass(frozen=True, eq=False)
class Phases:
    """The courses that the world gives to the parts of one order."""

    world: World
    order: Cohort  # a batch of one
    when: When  # it was submitted
    own: Conditions  # of its device, then
    active: Active  # devices that use the air meanwhile

    def download(self) -> Phase:
        known = float(self.own.bit_rate_down[0])
        return self._transfer(float(self.order.bits[0]), "down", self.when, known)

    def upload(self, bits: float, when: When) -> Phase:
        still = self.world.bit_rates_until(int(self.order.device[0]), self.when)
        # Rates are looked up again only if a step or time can have changed them meanwhile.
        same = when.round_index == self.when.round_index and when.now < still
        return self._transfer(bits, "up", when, float(self.own.bit_rate_up[0]) if same else None)

    def compute(self, effort: Effort, after: float) -> Phase:
        """From so many seconds on; what only a new server step changes stays as it was."""
        device, frequency = int(self.order.device[0]), self.order.hyperparameters.frequency
        still = self.world.compute_until(device, self.when)

        def pace(moment: When) -> Pace:
            own = self.own
            if moment.now >= still:
                own = replace(own, **self.world.compute_conditions(self.order.device, moment))
            (seconds,), (joules,) = effort.seconds(own, frequency), effort.joules(own, frequency)
            return Pace(float(seconds), float(joules))

        # What follows a download without an end never begins, whenever that is.
        start = self.when.now + (after if math.isfinite(after) else 0.0)
        begun = When(start, self.when.round_index)
        return follow(begun, pace, lambda moment: self.world.compute_until(device, moment))

    def _transfer(self, bits: float, way: Way, when: When, known: float | None) -> Phase:
        device = int(self.order.device[0])
        (watts,) = self.own.receive_power if way == "down" else self.own.send_power

        def pace(moment: When) -> Pace:
            if known is not None and moment == when:
                return transfer_pace(bits, known, float(watts))
            (rate,) = self.world.bit_rates(self.order.device, moment, self.active).of(way)
            return transfer_pace(bits, float(rate), float(watts))

        return follow(when, pace, lambda moment: self.world.bit_rates_until(device, moment))
