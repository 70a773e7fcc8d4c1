"""AnycostFL's plan of a device: sub-model, compression and frequency within time and energy.

It is found twice: for one device by search, as the specification tells it, and for whole cohorts
in closed form, without a grid. Tests compare both. Two facts replace the search, since the gain of
a size is log-concave: for a given compression factor, the largest size is the root of a cubic;
where neither bound of the factor holds, the best size is known (`phi_1` of the specification
where its frequency is allowed, else a quotient at the frequency's bound).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from anyfleet.arrays import Floats
from anyfleet.formulas.anycost import (
    AnycostBudgets,
    _best_sending,
    _Columns,
    _columns,
    _crossing,
    _floats,
)

Branch = Literal["saturated", "tight", "search"]
# Constraints may be missed by this share: what is solved for meets them only up to rounding.
_SLACK = 1e-9
_HALVINGS = 60
_GRID = 101
_REFINEMENTS = 6  # each fifty times finer: the last one resolves 1e-10 of the widest range


# --- one device, by search ------------------------------------------------------------------------


@dataclass(frozen=True)
class AnycostDevice:
    """A device's round: joules and seconds it may spend, and what costs them.

    power: watts while sending. bit_rate: bits per second. bits: of the uncompressed update of the
    whole model; 0 where there is nothing to send. epsilon: joules per cycle and squared frequency.
    cycles: of training the whole model, epochs × samples × cycles per sample.
    """

    energy: float
    seconds: float
    power: float
    bit_rate: float
    bits: float
    epsilon: float
    cycles: float

    def __post_init__(self) -> None:
        if not self.bits >= 0:
            raise ValueError(f"AnycostDevice.bits must be a number, at least 0, got {self.bits}.")


@dataclass(frozen=True)
class AnycostBounds:
    """The limits within which a plan may choose; frequencies in hertz."""

    alpha_min: float = 0.25
    beta_min: float = 0.0
    beta_max: float = 1 / 15
    slowest: float = 1e8
    fastest: float = 3e9


DEFAULT_BOUNDS = AnycostBounds()


class AnycostCost(NamedTuple):
    """Seconds and joules of computing and of sending."""

    computing_seconds: float
    sending_seconds: float
    computing_joules: float
    sending_joules: float


class AnycostPlan(NamedTuple):
    """The choice of a device for one round, and the branch of the solution that found it."""

    alpha: float
    beta: float
    frequency: float
    branch: Branch

    @property
    def gain(self) -> float:
        return self.alpha**4 * self.beta


class AnycostTimeShares(NamedTuple):
    """The two stationary shares of time for computing; only the first is ever needed."""

    first: float
    second: float


def anycost_cost(device: AnycostDevice, alpha: float, beta: float, frequency: float) -> AnycostCost:
    """Return the seconds and joules that a choice costs (Eqs. 6 to 9, specification §3)."""
    computing = alpha * device.cycles / frequency
    sending = alpha * beta * device.bits / device.bit_rate if device.bit_rate > 0 else math.inf
    joules = device.epsilon * frequency**2 * alpha * device.cycles
    return AnycostCost(computing, sending, joules, device.power * sending)


def anycost_time_shares(
    energy: float, sending_energy: float, printed: bool = False
) -> AnycostTimeShares:
    """Return the shares of computing time at which the gain's derivative is 0 (specification §3).

    `sending_energy` is power × seconds. `printed` gives the second root as the paper's Eq. 24
    prints it, with -3/4 for +3/4.
    """
    linear = 3 * energy - 6 * sending_energy
    root = math.sqrt(anycost_discriminant(energy, sending_energy))
    if linear > 0:  # the other form would subtract nearly equal numbers
        first = 4 * (energy - sending_energy) / (linear + root)
    else:
        first = (root - linear) / (8 * sending_energy)
    second = (-linear - root) / (8 * sending_energy) if sending_energy else -math.inf
    return AnycostTimeShares(first, second - 1.5 if printed else second)


def anycost_discriminant(energy: float, sending_energy: float) -> float:
    """Return the paper's psi under the root, which is always positive (specification §3)."""
    return 4 * sending_energy**2 - 4 * energy * sending_energy + 9 * energy**2


def anycost_tight_plan(device: AnycostDevice, share: float) -> AnycostPlan:
    """Return the choice that uses up all seconds and joules (AnycostFL, specification §3).

    `share` is the share of time for computing. Bounds are not looked at. NaN where the energy does
    not last for the sending.
    """
    _check_bits(device, "tight_plan")
    left = device.energy - device.power * device.seconds * (1 - share)
    if not (left > 0 and share > 0):
        return AnycostPlan(math.nan, math.nan, math.nan, "tight")
    cube = (share * device.seconds) ** 2 * left / (device.epsilon * device.cycles**3)
    alpha = math.cbrt(cube)
    beta = device.bit_rate * (1 - share) * device.seconds / (alpha * device.bits)
    frequency = alpha * device.cycles / (share * device.seconds)
    return AnycostPlan(alpha, beta, frequency, "tight")


def anycost_tight_gain(device: AnycostDevice, share: Floats | float) -> Floats:
    """Return the gain of `anycost_tight_plan` for its share of time (Eq. 21, specification §3)."""
    _check_bits(device, "tight_gain")
    part, sent = np.asarray(share, dtype=np.float64), device.power * device.seconds
    scale = device.bit_rate * device.seconds**3 / (device.bits * device.epsilon * device.cycles**3)
    gain: Floats = scale * (device.energy - sent + sent * part) * (part**2 - part**3)
    return gain


def anycost_plan(
    device: AnycostDevice, bounds: AnycostBounds = DEFAULT_BOUNDS
) -> AnycostPlan | None:
    """Return the choice with the largest gain within all bounds, or None (specification §3).

    Saturated: everything is affordable. Tight: both budgets are used up. Search: a bound leaves
    one of them slack. With no bits to send, sending costs nothing: the largest compression factor,
    and the largest model that can be computed. None if no choice fits.
    """
    if not device.bit_rate > 0:
        return None
    full = _saturated(device, bounds)
    if full is not None:
        return full
    found: list[AnycostPlan] = []
    if _spendable(device):
        first = anycost_time_shares(device.energy, device.power * device.seconds).first
        best = anycost_tight_plan(device, first)
        if _allowed(best, bounds):
            return best
        tight = (anycost_tight_plan(device, share) for share in _corners(device, bounds))
        found = [plan for plan in tight if _allowed(plan, bounds)]
    searched = _search(device, bounds)
    if searched is not None and all(searched.gain > plan.gain * (1 + _SLACK) for plan in found):
        return searched
    return max(found, key=lambda plan: plan.gain, default=None)


def anycost_plan_at(
    alpha: float, device: AnycostDevice, bounds: AnycostBounds = DEFAULT_BOUNDS
) -> AnycostPlan | None:
    """Return the best compression and frequency for a given alpha, or None (specification §3).

    For plans that are charged with what their rounded widths cost.
    """
    if not device.bit_rate > 0:
        return None
    beta = float(_best_beta(device, bounds, np.array([alpha]))[0])
    if not beta > 0 or beta < bounds.beta_min:
        return None
    frequency = max(bounds.slowest, _slowest(device, alpha, beta))
    return AnycostPlan(alpha, beta, min(frequency, bounds.fastest), "search")


def _saturated(device: AnycostDevice, bounds: AnycostBounds) -> AnycostPlan | None:
    frequency = max(bounds.slowest, _slowest(device, 1.0, bounds.beta_max))
    cost = anycost_cost(device, 1.0, bounds.beta_max, frequency)
    fits = cost.computing_joules + cost.sending_joules <= device.energy
    if fits and frequency <= bounds.fastest:
        return AnycostPlan(1.0, bounds.beta_max, frequency, "saturated")
    return None


def _spendable(device: AnycostDevice) -> bool:
    """Return whether a plan can be tight: time and energy are there, and work takes both."""
    return min(device.energy, device.seconds, device.epsilon, device.cycles, device.bits) > 0


def _check_bits(device: AnycostDevice, function: str) -> None:
    """Raise ValueError unless there is something to send: otherwise no plan uses up the time."""
    if not device.bits > 0:
        raise ValueError(
            f"{function}: a device with no bits to send has no plan that uses up its time by "
            "sending; anycost_plan has its best one."
        )


def _slowest(device: AnycostDevice, alpha: float, beta: float) -> float:
    """Return the slowest frequency that is in time, which is the one that costs least energy."""
    left = device.seconds - alpha * beta * device.bits / device.bit_rate
    return alpha * device.cycles / left if left > 0 else math.inf


def _allowed(plan: AnycostPlan, bounds: AnycostBounds) -> bool:
    """Return whether a plan is within all bounds up to rounding; one with NaN is not."""
    low, high = 1 - _SLACK, 1 + _SLACK
    return (
        bounds.alpha_min * low <= plan.alpha <= high
        and 0 < plan.beta <= bounds.beta_max * high
        and plan.beta >= bounds.beta_min * low
        and bounds.slowest * low <= plan.frequency <= bounds.fastest * high
    )


def _corners(device: AnycostDevice, bounds: AnycostBounds) -> Iterator[float]:
    """Yield the shares of time at which a tight plan meets a bound."""
    sent = device.power * device.seconds
    least = max(0.0, 1 - device.energy / sent) if sent else 0.0

    def alpha(share: float) -> float:
        return anycost_tight_plan(device, share).alpha

    def inverse_beta(share: float) -> float:
        return 1 / anycost_tight_plan(device, share).beta

    for bound in (bounds.alpha_min, 1.0):
        yield _root(alpha, bound, least)
    for bound in (bounds.beta_max, bounds.beta_min):
        if bound > 0:
            yield _root(inverse_beta, 1 / bound, least)
    for bound in (bounds.slowest, bounds.fastest):
        # Of a tight plan, epsilon f³ T = (E - PT) / share + PT.
        cube = device.epsilon * bound**3 * device.seconds - sent
        share = (device.energy - sent) / cube if cube else math.nan
        if least < share < 1:
            yield share


def _root(curve: Callable[[float], float], target: float, least: float) -> float:
    """Return where a rising curve on (least, 1) reaches the target, or the end next to it."""
    low, high = least, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _below(curve, middle, target) else (low, middle)
    return (low + high) / 2


def _below(curve: Callable[[float], float], place: float, target: float) -> bool:
    try:
        value = curve(place)
    except ZeroDivisionError:  # beta vanishes at the upper end
        return False
    return not value >= target  # NaN stands where the energy is not enough: too far down


def _search(device: AnycostDevice, bounds: AnycostBounds) -> AnycostPlan | None:
    """Return the plan with the best alpha on a grid that is refined around its best place.

    The last grid resolves a billionth, or nearly. None if no alpha fits.
    """
    # Where one budget alone limits a plan, its optimum is known: three quarters are for computing.
    costs = (
        anycost_cost(device, 1.0, 0.0, bounds.fastest).computing_seconds,
        anycost_cost(device, 1.0, 0.0, bounds.slowest).computing_joules,
    )
    budgets = zip((device.seconds, device.energy), costs, strict=True)
    known = [0.75 * budget / cost for budget, cost in budgets if cost > 0]
    low, high = bounds.alpha_min, 1.0
    alphas = np.append(np.linspace(low, high, _GRID), np.clip(known, low, high))
    # The logarithm of the gain is concave: the best lies beside the best of any grid.
    for _ in range(_REFINEMENTS):
        alphas = np.unique(alphas)  # beside an alpha stands another one, never itself again
        betas = _best_beta(device, bounds, alphas)
        usable = (betas > 0) & (betas >= bounds.beta_min)
        if not usable.any():
            return None
        best = int(np.argmax(np.where(usable, alphas**4 * betas, -1.0)))
        alpha = float(alphas[best])
        low, high = alphas[max(best - 1, 0)], alphas[min(best + 1, len(alphas) - 1)]
        alphas = np.append(np.linspace(low, high, _GRID), alpha)
    return anycost_plan_at(alpha, device, bounds)


def _best_beta(device: AnycostDevice, bounds: AnycostBounds, alphas: Floats) -> Floats:
    """Return the largest compression factor of each alpha; not above 0 where none fits."""
    work = alphas * device.cycles
    low, high = np.full(len(alphas), bounds.slowest), np.full(len(alphas), bounds.fastest)
    # Faster leaves more time for sending and less energy: the best frequency is where both agree.
    for _ in range(_HALVINGS):
        middle = np.sqrt(low * high)
        time, energy = _sending(device, work, middle)
        low, high = np.where(time < energy, middle, low), np.where(time < energy, high, middle)
    # On both sides of the crossing: beyond it, energy that falls steeply may be short already.
    ends = (bounds.slowest, bounds.fastest, low, high)
    sending = np.max([np.minimum(*_sending(device, work, f)) for f in ends], axis=0)
    if not device.bits:  # sent in no time, if there is any time left
        return np.where(sending >= 0, bounds.beta_max, -np.inf)
    beta: Floats = np.minimum(bounds.beta_max, device.bit_rate * sending / (alphas * device.bits))
    return beta


def _sending(
    device: AnycostDevice, work: Floats, frequency: Floats | float
) -> tuple[Floats, Floats]:
    """Return the seconds left for sending, and the seconds of sending that the energy pays for."""
    time = device.seconds - work / frequency
    left = device.energy - device.epsilon * frequency**2 * work
    # Sending that costs nothing is paid for, unless computing alone is too much already.
    energy = left / device.power if device.power else np.where(left >= 0, np.inf, -np.inf)
    return time, energy


# --- whole cohorts, in closed form ----------------------------------------------------------------


class AnycostPlans(NamedTuple):
    """The choices of devices for one round; NaN where nothing fits."""

    alpha: Floats
    beta: Floats
    frequency: Floats

    @property
    def gain(self) -> Floats:
        gain: Floats = self.alpha**4 * self.beta
        return gain


def anycost_plans(
    budgets: AnycostBudgets,
    *,
    alpha_min: Floats | float = 0.25,
    beta_min: Floats | float = 0.0,
    beta_max: Floats | float = 1 / 15,
) -> AnycostPlans:
    """Return the plans with the largest gain, one for every row (AnycostFL, specification §3).

    A plan is a size, a compression factor and a frequency. Budgets hold the cycles and bits of the
    whole model: both grow with the size alpha.
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


def _largest_size(own: _Columns, beta: Floats) -> Floats:
    """Return the largest size whose update can be sent with this factor; may be above 1."""
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
    """Return the size with the largest gain if any compression factor and any size were allowed."""
    energy, sent = own.affordable, own.power * own.seconds
    # phi_1 = upper / lower: the root of the specification, without a difference of large numbers.
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
    """Return the best size at a given frequency.

    It takes three quarters of one budget, or is where both are used up.
    """
    seconds, joules = own.cycles / frequency, own.epsilon * frequency**2 * own.cycles
    timed, fed = 0.75 * own.seconds / seconds, 0.75 * own.energy / joules

    def spent(size: Floats) -> Floats:
        """Return the joules if all seconds are used."""
        return own.power * (own.seconds - size * seconds) + size * joules

    both = (own.power * own.seconds - own.energy) / (own.power * seconds - joules)
    size: Floats = np.where(
        spent(timed) <= own.energy, timed, np.where(spent(fed) >= own.energy, fed, both)
    )
    return size
