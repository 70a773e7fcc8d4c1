"""AnycostFL: channels by norm, weight and gain of an update, and the best way to send it.

How to send is solved for whole cohorts in closed form. For given work, faster computing leaves
more time to send and less energy: best is the frequency at which both allow equally much, the one
positive root of a cubic, or the bound next to it.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from anyfleet.arrays import Flags, Floats, Ints

# What is solved for meets constraints only up to rounding: by this share more is spent than there
# is, or else rounding would leave no energy at all for sending that needs next to none.
_ROUNDING = 1e-14
_SLACK = 1e-10  # the same for a factor that was given, maybe by another computation
_STEPS = 4  # of Newton: the first guess is off by 7 % at most, and each step squares that


# --- channels -------------------------------------------------------------------------------------


def anycost_channel_norms(producers: list[Floats]) -> Floats:
    """Return the norms of a group's output channels (AnycostFL, specification §1.12).

    The first axis of every tensor in `producers` is that of the channels; the squared norms of all
    tensors add up. Biases do not count.
    """
    squares = [(np.asarray(each, dtype=np.float64) ** 2) for each in producers]
    norms: Floats = np.sqrt(sum(square.reshape(len(square), -1).sum(axis=1) for square in squares))
    return norms


def anycost_channel_order(norms: Floats) -> Ints:
    """Return the channels by descending norm, ties by index (AnycostFL, specification §1.12)."""
    order: Ints = np.argsort(-np.asarray(norms, dtype=np.float64), kind="stable")
    return order


# --- weights and gains ----------------------------------------------------------------------------


def anycost_alpha(channel_share: float, trained_share: float = 1.0) -> float:
    """Return alpha, the measure of a sub-model: 1 for the whole model (specification §1.12).

    It is the squared share of all channels that the sub-model keeps, times the share of its
    parameters that it trains.
    """
    # Python's power: numpy's square rounds differently in the last digit now and then.
    return float(channel_share**2 * trained_share)


def anycost_weights(
    alpha: Floats | float,
    beta: Floats | float,
    sizes: Floats | Ints | float = 1.0,
    floor: float = 1e-3,
) -> Floats:
    """Return the shares `p ∝ n / (1 - alpha (2 - alpha) sqrt(beta))²` (specification §1.12).

    They are the weights of the devices' updates. A complete update would have infinite weight, so
    the bracket is at least `floor`. Data sizes are our addition; leave them out for the paper's own
    weights. All 0 without data.
    """
    part = np.asarray(alpha, dtype=np.float64)
    bracket = np.maximum(1 - part * (2 - part) * np.sqrt(beta), floor)
    raw = np.asarray(sizes, dtype=np.float64) / bracket**2
    total = raw.sum()
    weights: Floats = raw / total if total > 0 else np.zeros_like(raw)
    return weights


def anycost_gain(alpha: Floats | float, beta: Floats | float) -> Floats:
    """Return what a device contributes to learning, `alpha⁴ beta` (specification §F.3)."""
    gain: Floats = np.asarray(alpha, dtype=np.float64) ** 4 * beta
    return gain


def anycost_divergence(alpha: Floats | float, beta: Floats | float) -> Floats:
    """Return the squared distance of an update from the uncompressed one (specification §F.3).

    It is relative to the squared norm of the uncompressed update, 0 to 1.
    """
    kept = np.asarray(alpha, dtype=np.float64)
    index: Floats = (1 - kept * (2 - kept) * np.sqrt(beta)) ** 2
    return index


def anycost_contraction(
    least_gain: float, *, convexity: float, smoothness: float, ratio: float
) -> float:
    """Return Z: what a round leaves of the distance to the best loss (specification §F.3).

    `1 - (nu / lambda)(1 - ratio (1 - g_min))`, with `ratio` the gradient-ratio constant. It means
    something only below 1, that is for ratios under `reference.anycost_largest_gradient_ratio`.
    """
    return 1 - convexity / smoothness * (1 - ratio * (1 - least_gain))


# --- sending, in closed form ----------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class AnycostBudgets:
    """The budgets of devices and what costs them, in arrays that broadcast against each other."""

    energy: Floats | float  # joules that may be spent; may be infinite
    seconds: Floats | float  # that may be spent
    power: Floats | float  # watts while sending
    bit_rate: Floats | float  # bits per second
    bits: Floats | float  # of the uncompressed update
    epsilon: Floats | float  # joules per cycle and squared frequency
    cycles: Floats | float  # of the training
    slowest: Floats | float  # hertz, above 0
    fastest: Floats | float  # hertz


class AnycostSending(NamedTuple):
    """A compression factor and a frequency for given work; NaN where nothing fits."""

    beta: Floats
    frequency: Floats


def anycost_best_sending(
    budgets: AnycostBudgets, beta_min: Floats | float = 0.0, beta_max: Floats | float = 1 / 15
) -> AnycostSending:
    """Return the largest compression factor, and the slowest frequency in time (specification §3).

    Of all factors from `beta_min` to `beta_max` that time and energy allow, for given work. Where
    both bounds are equal, the result says whether that factor fits. A factor of 0 fits only if it
    is the largest one asked for.
    """
    with np.errstate(all="ignore"):  # what is divided by 0 is sorted out
        return _best_sending(_columns(budgets), _floats(beta_min), _floats(beta_max))


class _Columns(NamedTuple):
    """The arrays of `AnycostBudgets`, in their order."""

    energy: Floats
    seconds: Floats
    power: Floats
    bit_rate: Floats
    bits: Floats
    epsilon: Floats
    cycles: Floats
    slowest: Floats
    fastest: Floats

    @property
    def affordable(self) -> Floats:
        """The energy in joules, or as much as is never used up: solvers need it finite."""
        enough = self.seconds * (self.power + self.epsilon * self.fastest**3)
        energy: Floats = np.fmin(self.energy, enough)
        return energy

    @property
    def airtime(self) -> Floats:
        """Seconds of sending the uncompressed update; NaN or infinite without a link."""
        return self.bits / self.bit_rate

    def allowed(self, frequency: Floats) -> Floats:
        """Return the nearest frequency within bounds; for NaN the slowest."""
        near: Floats = np.fmin(np.fmax(frequency, self.slowest), self.fastest)
        return near


def _columns(budgets: AnycostBudgets) -> _Columns:
    return _Columns(*(_floats(getattr(budgets, name)) for name in _Columns._fields))


def _floats(column: Floats | float) -> Floats:
    """Return floats; of one number a scalar, which is quicker and may be divided by 0."""
    floats: Floats = np.asarray(column, dtype=np.float64)[()]
    return floats


def _best_sending(own: _Columns, least: Floats, most: Floats) -> AnycostSending:
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
    return AnycostSending(np.where(fits, beta, np.nan), np.where(fits, frequency, np.nan))


def _time_to_send(
    own: _Columns, computing: Floats, joules: Floats, both: Flags
) -> tuple[Floats, Flags]:
    """Return how many seconds may be spent sending, and whether that is more than rounding.

    Where time and energy allow the same (`both`), it is computed from what rounds less.
    """
    by_time = own.seconds * (1 + _ROUNDING) - computing
    by_energy = (own.energy * (1 + _ROUNDING) - joules) / own.power
    poor = np.where(both, own.power * own.seconds > own.energy, by_energy < by_time)
    seconds: Floats = np.where(poor, by_energy, by_time)
    noise = 2 * _ROUNDING * np.where(poor, own.energy / own.power, own.seconds)
    return seconds, seconds > noise


def _crossing(cubic: Floats, linear: Floats, constant: Floats) -> Floats:
    """Return the one positive x with cubic x³ + linear x = constant; infinity if there is none.

    Only `linear` may be below 0.
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
