"""AnycostFL's plans of whole cohorts, in closed form: no grid and no halving.

`planning` finds the same plans for one device at a time as the specification tells it, by search; this is
tested against it. Three facts replace the search, for the gain of a size is log-concave.

* For given work, faster computing leaves more time to send and less energy: best is the frequency
  at which both allow equally much, the one positive root of a cubic, or the bound next to it.
* For a given compression factor, the largest size is such a root, too.
* Where neither bound of the compression factor holds, the best size is known: `phi_1` of
  the specification where its frequency is allowed, else a quotient at the frequency's bound.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from anyfleet.arrays import Flags, Floats

# What is solved for meets constraints only up to rounding: by this share more is spent than there
# is, or else rounding would leave no energy at all for sending that needs next to none.
_ROUNDING = 1e-14
_SLACK = 1e-10  # the same for a factor that was given, maybe by another computation
_STEPS = 4  # of Newton: the first guess is off by 7 % at most, and each step squares the error


@dataclass(frozen=True, eq=False)
class Budgets:
    """What devices may spend and what costs it, in columns that broadcast against each other."""

    energy: Floats | float  # joules that may be spent; may be infinite
    seconds: Floats | float  # that may be spent
    power: Floats | float  # watts while sending
    rate: Floats | float  # bits per second
    bits: Floats | float  # of the uncompressed update
    epsilon: Floats | float  # joules per cycle and squared frequency
    cycles: Floats | float  # of the training
    slowest: Floats | float  # hertz, above 0
    fastest: Floats | float  # hertz


class Sending(NamedTuple):
    """A compression factor and a frequency for given work; not a number where nothing fits."""

    beta: Floats
    frequency: Floats


class AnycostPlans(NamedTuple):
    """What devices do in a round; not a number where nothing fits."""

    alpha: Floats
    beta: Floats
    frequency: Floats

    @property
    def gain(self) -> Floats:
        gain: Floats = self.alpha**4 * self.beta
        return gain


class _Columns(NamedTuple):
    """Budgets as arrays, in their order."""

    energy: Floats
    seconds: Floats
    power: Floats
    rate: Floats
    bits: Floats
    epsilon: Floats
    cycles: Floats
    slowest: Floats
    fastest: Floats

    @property
    def affordable(self) -> Floats:
        """The energy, or as much as is never used up: solvers need it finite."""
        enough = self.seconds * (self.power + self.epsilon * self.fastest**3)
        energy: Floats = np.fmin(self.energy, enough)
        return energy

    @property
    def airtime(self) -> Floats:
        """Seconds of sending the uncompressed update; not a number or infinite without a link."""
        return self.bits / self.rate

    def allowed(self, frequency: Floats) -> Floats:
        """The nearest frequency within bounds; of what is not a number the slowest."""
        near: Floats = np.fmin(np.fmax(frequency, self.slowest), self.fastest)
        return near


def best_sending(
    budgets: Budgets, beta_min: Floats | float = 0.0, beta_max: Floats | float = 1 / 15
) -> Sending:
    """The largest compression factor of given work, and the slowest frequency that is in time.

    Of all factors from `beta_min` to `beta_max` that time and energy allow; if both are the same,
    whether it fits. A factor of 0 fits only if it is the largest asked for (specification §3).
    """
    with np.errstate(all="ignore"):  # what is divided by 0 is sorted out
        return _best_sending(_columns(budgets), _floats(beta_min), _floats(beta_max))


def anycost_plans(
    budgets: Budgets,
    *,
    alpha_min: Floats | float = 0.25,
    beta_min: Floats | float = 0.0,
    beta_max: Floats | float = 1 / 15,
) -> AnycostPlans:
    """Size, compression factor and frequency with the largest gain for every row (specification §3).

    Budgets hold the cycles and bits of the whole model: both grow with the size alpha.
    """
    with np.errstate(all="ignore"):
        own, least, most = _columns(budgets), _floats(beta_min), _floats(beta_max)
        # The gain rises up to the last size that has the largest factor, and if still larger ones
        # are better it has one peak there. It ends where the factor is too small.
        best = np.fmax(_largest_size(own, most), _best_size(own))
        within = np.fmin(np.fmin(best, 1.0), _largest_size(own, least))
        alpha = np.fmax(within, alpha_min)
        part = own._replace(cycles=alpha * own.cycles, bits=alpha * own.bits)
        beta, frequency = _best_sending(part, least, most)
    return AnycostPlans(np.where(np.isnan(beta), np.nan, alpha), beta, frequency)


def _columns(budgets: Budgets) -> _Columns:
    return _Columns(*(_floats(getattr(budgets, name)) for name in _Columns._fields))


def _floats(column: Floats | float) -> Floats:
    """Of one number a scalar, not an array: much quicker, and it may be divided by 0."""
    floats: Floats = np.asarray(column, dtype=np.float64)[()]
    return floats


def _best_sending(own: _Columns, least: Floats, most: Floats) -> Sending:
    per_square = own.epsilon * own.cycles
    crossing = _crossing(
        per_square, own.power * own.seconds - own.affordable, own.power * own.cycles
    )
    frequency = own.allowed(crossing)
    computing, joules = own.cycles / frequency, per_square * frequency**2
    seconds, left = _time_to_send(own, computing, joules, frequency == crossing)
    beta = np.maximum(np.minimum(most, seconds / own.airtime), least)
    sending = beta * own.airtime
    fits = (computing + sending <= own.seconds * (1 + _SLACK)) & (beta <= most)
    fits &= joules + own.power * sending <= own.energy * (1 + _SLACK)
    fits &= (left | (least > 0) | (beta >= most)) & (own.slowest <= own.fastest)
    # Beyond the largest factor there is room: the slowest frequency that is in time with it.
    in_time = np.fmax(own.slowest, own.cycles / np.fmax(own.seconds - sending, 0.0))
    frequency = np.where(beta >= most, np.fmin(frequency, in_time), frequency)
    return Sending(np.where(fits, beta, np.nan), np.where(fits, frequency, np.nan))


def _time_to_send(
    own: _Columns, computing: Floats, joules: Floats, both: Flags
) -> tuple[Floats, Flags]:
    """How many seconds may be sent, and whether that is more than rounding.

    Where time and energy allow the same (`both`), it is computed from what rounds less.
    """
    by_time = own.seconds * (1 + _ROUNDING) - computing
    by_energy = (own.energy * (1 + _ROUNDING) - joules) / own.power
    poor = np.where(both, own.power * own.seconds > own.energy, by_energy < by_time)
    seconds: Floats = np.where(poor, by_energy, by_time)
    noise = 2 * _ROUNDING * np.where(poor, own.energy / own.power, own.seconds)
    return seconds, seconds > noise


def _crossing(cubic: Floats, linear: Floats, constant: Floats) -> Floats:
    """The one positive x with cubic x³ + linear x = constant, of which only linear may be below 0.

    Infinite if there is none.
    """
    slope, height = linear / cubic, constant / cubic
    square = np.cbrt(height) ** 2
    x = np.where(slope < 0, np.sqrt(square - slope), height / np.hypot(slope, square))
    slope, height = slope / 2, height / 2
    for _ in range(_STEPS):  # of Newton, in a form that never subtracts nearly equal numbers
        squared = x * x
        x = (squared * x + height) / (1.5 * squared + slope)
    straight = np.where(linear > 0, constant / linear, np.inf)
    found: Floats = np.where(cubic > 0, x, straight)
    return found


def _largest_size(own: _Columns, beta: Floats) -> Floats:
    """The largest size whose update can be sent with this factor; may be above 1."""
    energy, sent = own.affordable, beta * own.airtime
    per_square = own.epsilon * own.cycles
    frequency = own.allowed(
        _crossing(
            own.seconds * per_square,
            (own.power * own.seconds - energy) * sent,
            energy * own.cycles,
        )
    )
    in_time = own.seconds / (own.cycles / frequency + sent)
    affordable = own.energy / (per_square * frequency**2 + own.power * sent)
    size: Floats = np.fmin(in_time, affordable)
    return size


def _best_size(own: _Columns) -> Floats:
    """The size with the largest gain if any compression factor and any size were allowed."""
    energy, sent = own.affordable, own.power * own.seconds
    # phi_1 = upper / lower: the root that the specification gives, without a difference of large numbers.
    root = np.hypot(2 * sent - energy, np.sqrt(8) * energy)
    upper, lower = 2 * sent + energy + root, 2 * sent + 3 * energy + root
    cube = energy * (3 * energy + root) / (own.epsilon * own.seconds * upper)
    frequency = np.where(own.epsilon > 0, np.cbrt(cube), np.inf)
    allowed = own.allowed(frequency)
    tight = frequency * own.seconds * upper / (lower * own.cycles)
    size = np.where(frequency == allowed, tight, _best_size_at(own, allowed))
    found: Floats = np.where(own.cycles > 0, size, np.inf)
    return found


def _best_size_at(own: _Columns, frequency: Floats) -> Floats:
    """The same at a given frequency: three quarters of one budget, or where both are used up."""
    seconds, joules = own.cycles / frequency, own.epsilon * frequency**2 * own.cycles
    timed, fed = 0.75 * own.seconds / seconds, 0.75 * own.energy / joules

    def spent(size: Floats) -> Floats:
        """Joules if all seconds are used."""
        return own.power * (own.seconds - size * seconds) + size * joules

    both = (own.power * own.seconds - own.energy) / (own.power * seconds - joules)
    size: Floats = np.where(
        spent(timed) <= own.energy, timed, np.where(spent(fed) >= own.energy, fed, both)
    )
    return size
