"""AnycostFL's plans of cohorts against worked numbers, one device at a time, and brute force."""

from dataclasses import dataclass, fields, replace

import numpy as np
import pytest

from anyfleet.arrays import Flags, Floats
from anyfleet.formulas.anycost import AnycostBudgets, anycost_best_sending
from anyfleet.formulas.reference.anycost_plans import (
    AnycostBounds,
    AnycostDevice,
    AnycostPlans,
    anycost_plan,
    anycost_plan_at,
    anycost_plans,
    anycost_time_shares,
)

DEVICE = AnycostBudgets(
    energy=6,
    seconds=10,
    power=0.1,
    bit_rate=8e6,
    bits=111.7e6,
    epsilon=7.5e-27,
    cycles=833 * 4.5e6,
    slowest=1e8,
    fastest=3e9,
)
NAMES = [field.name for field in fields(AnycostBudgets)]


@dataclass(frozen=True, eq=False)
class Cohort:
    """Devices and what each of them may choose."""

    budgets: AnycostBudgets
    alpha_min: Floats
    beta_min: Floats
    beta_max: Floats

    def __len__(self) -> int:
        return len(self.alpha_min)

    def plans(self) -> AnycostPlans:
        return anycost_plans(
            self.budgets,
            alpha_min=self.alpha_min,
            beta_min=self.beta_min,
            beta_max=self.beta_max,
        )

    def one(self, row: int) -> tuple[AnycostDevice, AnycostBounds]:
        """A device for the reference, which plans one at a time."""
        own = {name: float(np.asarray(getattr(self.budgets, name))[row]) for name in NAMES}
        slowest, fastest = own.pop("slowest"), own.pop("fastest")
        bounds = AnycostBounds(
            alpha_min=float(self.alpha_min[row]),
            beta_min=float(self.beta_min[row]),
            beta_max=float(self.beta_max[row]),
            slowest=slowest,
            fastest=fastest,
        )
        return AnycostDevice(**own), bounds

    def columns(self) -> AnycostBudgets:
        """Each device a row, for grids beside it."""
        return AnycostBudgets(*(np.asarray(getattr(self.budgets, name))[:, None] for name in NAMES))


def random_cohort(seed: int, size: int) -> Cohort:
    """Wide ranges: devices that can do everything, nothing, or are held by a frequency's bound."""
    draw = np.random.default_rng(seed)

    def powers(low: float, high: float) -> Floats:
        values: Floats = 10 ** draw.uniform(low, high, size)
        return values

    slowest, fastest = np.sort(10 ** draw.uniform(8, 9.5, (2, size)), axis=0)
    budgets = AnycostBudgets(
        energy=powers(-1, 1.5),
        seconds=powers(0, 1.5),
        power=powers(-3, 0.5),
        bit_rate=powers(5, 7.5),
        bits=powers(7, 8.5),
        epsilon=draw.uniform(5e-27, 1e-26, size),
        cycles=powers(9, 10.3),
        slowest=slowest,
        fastest=fastest,
    )
    return Cohort(
        budgets,
        draw.choice([0.05, 0.25], size),
        draw.choice([0.0, 1e-3], size),
        draw.choice([1 / 15, 1.0], size),
    )


def most_overspent(budgets: AnycostBudgets, plans: AnycostPlans) -> float:
    """By which share time or energy is exceeded, at most; below 0 if by nobody."""
    alpha, beta, frequency = plans
    work, sending = alpha * budgets.cycles, alpha * beta * budgets.bits / budgets.bit_rate
    seconds = work / frequency + sending
    joules = budgets.epsilon * frequency**2 * work + budgets.power * sending
    over = np.maximum(seconds / budgets.seconds, joules / budgets.energy)
    return float(np.nanmax(over)) - 1


def check_bounds(cohort: Cohort, plans: AnycostPlans) -> None:
    alpha, beta, frequency = plans
    nothing = np.isnan(beta)
    assert (np.isnan(alpha) == nothing).all()
    assert (np.isnan(frequency) == nothing).all()
    assert (nothing | ((cohort.alpha_min <= alpha) & (alpha <= 1))).all()
    assert (nothing | ((cohort.beta_min <= beta) & (beta <= cohort.beta_max) & (beta > 0))).all()
    slowest, fastest = cohort.budgets.slowest, cohort.budgets.fastest
    assert (nothing | ((slowest <= frequency) & (frequency <= fastest))).all()
    assert most_overspent(cohort.budgets, plans) < 1e-9


# --- worked examples --------------------------------------------------------------------------


def test_3_examples() -> None:
    """The table of the specification: tight, saturated, at the cap, and no plan at all."""
    cycles = 833 * np.array([4.5e6, 4.5e6, 7.3e6, 4.5e6])
    budgets = replace(DEVICE, cycles=cycles, energy=np.array([6, 6, 6, 0.01]))
    plans = anycost_plans(budgets, beta_max=np.array([1, 1 / 15, 1 / 15, 1 / 15]))
    nan = np.nan
    assert plans.alpha == pytest.approx([0.872292732, 1, 0.676156899, nan], rel=1e-9, nan_ok=True)
    assert plans.beta == pytest.approx([0.263191014, 1 / 15, 1 / 15, nan], rel=1e-8, nan_ok=True)
    frequencies = [481240981.413, 413323532.114, 438780636.15, nan]
    assert plans.frequency == pytest.approx(frequencies, rel=1e-9, nan_ok=True)
    assert plans.gain == pytest.approx([0.152377, 1 / 15, 0.013935, nan], abs=5e-7, nan_ok=True)
    # The first computes for phi_1 of the time, and both budgets are used up.
    assert (plans.alpha * cycles / plans.frequency)[0] == pytest.approx(
        10 * anycost_time_shares(6, 1).first
    )
    assert most_overspent(budgets, plans) == pytest.approx(0, abs=1e-12)


def test_3_one_budget_alone() -> None:
    """Where only time or only energy limits, three quarters of it are for computing."""
    slow = replace(DEVICE, fastest=2e8)
    timed = anycost_plans(slow, alpha_min=0.05, beta_max=1.0)
    assert timed.alpha == pytest.approx(0.75 * 10 * 2e8 / float(DEVICE.cycles), rel=1e-12)
    assert timed.frequency == 2e8
    hungry = replace(DEVICE, slowest=1e9, power=2.0)
    fed = anycost_plans(hungry, alpha_min=0.05, beta_max=1.0)
    expected = 0.75 * 6 / (7.5e-27 * 1e18 * float(DEVICE.cycles))
    assert fed.alpha == pytest.approx(expected, rel=1e-12)
    assert fed.frequency == 1e9


def test_3_both_budgets_at_a_bound_of_the_frequency() -> None:
    """Three quarters of neither: the size that uses up both, at the slowest frequency."""
    budgets = replace(DEVICE, slowest=5.2e8)
    plans = anycost_plans(budgets, beta_max=1.0)
    assert (plans.alpha, plans.frequency) == pytest.approx((0.7266287898554215, 5.2e8), rel=1e-9)
    work = plans.alpha * budgets.cycles
    sending = plans.alpha * plans.beta * budgets.bits / budgets.bit_rate
    assert work / 5.2e8 + sending == pytest.approx(10)
    assert 7.5e-27 * 5.2e8**2 * work + 0.1 * sending == pytest.approx(6)


# --- the reference, one device at a time ------------------------------------------------------


def test_3_plans_are_those_of_one_device_at_a_time() -> None:
    cohort = random_cohort(seed=1, size=400)
    plans = cohort.plans()
    check_bounds(cohort, plans)
    branches = []
    for row, gain in enumerate(plans.gain):
        alone = anycost_plan(*cohort.one(row))
        branches.append(alone and alone.branch)
        assert np.isnan(gain) == (alone is None)
        # The reference searches: what it finds may be a little worse.
        if alone is not None:
            assert alone.gain * (1 - 1e-8) <= gain <= alone.gain * (1 + 1e-6)
    assert all(branches.count(each) > 20 for each in ("saturated", "tight", "search", None))


def test_3_sending_of_given_work_is_that_of_one_device_at_a_time() -> None:
    cohort = random_cohort(seed=2, size=300)
    half = replace(
        cohort.budgets,
        cycles=0.5 * np.asarray(cohort.budgets.cycles),
        bits=0.5 * np.asarray(cohort.budgets.bits),
    )
    beta, frequency = anycost_best_sending(half, cohort.beta_min, cohort.beta_max)
    capped, found = 0, 0
    for row in range(len(cohort)):
        alone = anycost_plan_at(0.5, *cohort.one(row))
        assert np.isnan(beta[row]) == np.isnan(frequency[row]) == (alone is None)
        if alone is not None:
            assert beta[row] == pytest.approx(alone.beta, rel=1e-7)
            assert frequency[row] == pytest.approx(alone.frequency, rel=1e-6)
            found, capped = found + 1, capped + (alone.beta == cohort.beta_max[row])
    assert 40 < capped < found - 40


# --- brute force ------------------------------------------------------------------------------


def brute_force(cohort: Cohort) -> Floats:
    """The best gain of a grid of sizes, and of ever finer ones around the best; 0 if nothing fits.

    Every size has its own grids of frequencies. A grid of both at once would miss the tips in
    which what is feasible often ends.
    """
    low, high = cohort.alpha_min, np.ones(len(cohort))
    best = np.zeros(len(cohort))
    for _ in range(10):
        alpha: Floats = np.linspace(low, high, 25, axis=-1)
        gains = gains_of_sizes(cohort, alpha)
        best = np.maximum(best, gains.max(axis=1))
        low, high = beside(alpha, gains)
    return best


def gains_of_sizes(cohort: Cohort, alpha: Floats) -> Floats:
    """With the best of ever finer grids of frequencies."""
    own = cohort.columns()
    low, high = (np.broadcast_to(each, alpha.shape) for each in (own.slowest, own.fastest))
    seconds = np.full(alpha.shape, -np.inf)
    for _ in range(11):
        frequency: Floats = np.linspace(low, high, 25, axis=-1)
        sending = sending_seconds(cohort, alpha, frequency)
        seconds = np.maximum(seconds, sending.max(axis=-1))
        low, high = beside(frequency, sending)
    beta = np.minimum(seconds * own.bit_rate / (alpha * own.bits), cohort.beta_max[:, None])
    usable = (beta > 0) & (beta >= cohort.beta_min[:, None])
    gains: Floats = np.where(usable, alpha**4 * beta, 0.0)
    return gains


def sending_seconds(cohort: Cohort, alpha: Floats, frequency: Floats) -> Floats:
    """What time and energy leave, for devices × sizes × frequencies."""
    one = cohort.columns()
    own = AnycostBudgets(*(np.asarray(getattr(one, name))[:, :, None] for name in NAMES))
    work = alpha[:, :, None] * own.cycles
    energy = (own.energy - own.epsilon * frequency**2 * work) / own.power
    seconds: Floats = np.minimum(own.seconds - work / frequency, energy)
    return seconds


def beside(places: Floats, worth: Floats) -> tuple[Floats, Floats]:
    """The neighbours of the best place."""
    best = worth.argmax(axis=-1)[..., None]
    last = places.shape[-1] - 1
    low = np.take_along_axis(places, np.maximum(best - 1, 0), -1)[..., 0]
    high = np.take_along_axis(places, np.minimum(best + 1, last), -1)[..., 0]
    return low, high


def test_3_brute_force_is_never_better() -> None:
    cohort = random_cohort(seed=3, size=240)
    plans, best = cohort.plans(), brute_force(cohort)
    check_bounds(cohort, plans)
    nothing = np.isnan(plans.gain)
    assert (nothing == (best == 0)).all()
    ratio = (plans.gain / best)[~nothing]
    assert ratio.min() > 1 - 1e-7
    assert ratio.max() < 1 + 1e-7  # the grids are fine enough to tell
    whole = (plans.alpha == 1) & (plans.beta == cohort.beta_max)
    bound = (plans.frequency == cohort.budgets.slowest) | (
        plans.frequency == cohort.budgets.fastest
    )
    assert min(nothing.sum(), whole.sum(), (bound & ~whole).sum()) > 10
    assert (~nothing & ~whole & ~bound).sum() > 40


# --- given factors and shapes -----------------------------------------------------------------


def test_3_a_given_factor_is_only_checked() -> None:
    """What a plan has found fits, to rounding, and a little more does not."""
    cohort = random_cohort(seed=4, size=300)
    alpha, beta, frequency = cohort.plans()
    there = ~np.isnan(beta)
    part = replace(
        cohort.budgets,
        cycles=alpha * np.asarray(cohort.budgets.cycles),
        bits=alpha * np.asarray(cohort.budgets.bits),
    )
    again = anycost_best_sending(part, beta, beta)
    assert (again.beta[there] == beta[there]).all()
    assert again.frequency[there] == pytest.approx(frequency[there], rel=1e-9)
    full = there & (beta < cohort.beta_max)
    assert full.sum() > 50
    assert np.isnan(
        anycost_best_sending(part, beta * (1 + 1e-6), beta * (1 + 1e-6)).beta[full]
    ).all()


def test_3_a_given_factor_takes_the_slowest_frequency_in_time() -> None:
    sent = anycost_best_sending(DEVICE, 0.01, 0.01)
    assert sent.beta == 0.01
    left = 10 - 0.01 * 111.7e6 / 8e6
    assert sent.frequency == pytest.approx(833 * 4.5e6 / left, rel=1e-12)
    assert anycost_best_sending(replace(DEVICE, cycles=1e8), 0.01, 0.01).frequency == 1e8


def test_3_a_frequency_that_cannot_be_chosen() -> None:
    speeds = np.array([3e8, 4e8, 6e8])
    sent = anycost_best_sending(replace(DEVICE, slowest=speeds, fastest=speeds), beta_max=1.0)
    late, in_time, hungry = sent.beta
    assert np.isnan(late)  # 12.5 seconds
    assert in_time == pytest.approx((10 - 833 * 4.5e6 / 4e8) * 8e6 / 111.7e6)
    assert np.isnan(hungry)  # 10 joules
    assert sent.frequency[1] == 4e8


def test_3_columns_broadcast() -> None:
    alphas, energies = np.linspace(0.1, 1, 9), np.array([0.5, 2.0, 6.0])[:, None]
    budgets = replace(DEVICE, energy=energies, cycles=alphas * 833 * 4.5e6, bits=alphas * 111.7e6)
    beta, frequency = anycost_best_sending(budgets, beta_max=1.0)
    assert beta.shape == frequency.shape == (3, 9)
    for (row, column), found in np.ndenumerate(beta):
        one = replace(
            budgets,
            energy=energies[row, 0],
            cycles=alphas[column] * 833 * 4.5e6,
            bits=alphas[column] * 111.7e6,
        )
        alone = anycost_best_sending(one, beta_max=1.0)
        assert alone.beta.shape == ()
        assert np.isnan(found) == np.isnan(alone.beta)
        assert found == pytest.approx(float(alone.beta), rel=1e-12, nan_ok=True)
    caps = np.array([1 / 15, 1.0])
    plans = anycost_plans(replace(DEVICE, energy=energies), beta_max=caps)
    assert {column.shape for column in (*plans, plans.gain)} == {(3, 2)}
    assert (plans.gain[2, 1], plans.gain[2, 0]) == pytest.approx((0.152377, 1 / 15), abs=1e-6)


# --- edges ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "nothing",
    [
        {"energy": 0.0},
        {"energy": 0.0, "power": 0.0},
        {"energy": -1.0},
        {"energy": -1.0, "power": 0.0},
        {"energy": -1.0, "power": 0.0, "epsilon": 0.0},
        {"seconds": 0.0},
        {"seconds": 0.0, "cycles": 0.0},
        {"seconds": 0.0, "power": 0.0},
        {"seconds": -1.0},
        {"seconds": -1.0, "cycles": 0.0, "bits": 0.0},
        {"bit_rate": 0.0},
        {"bit_rate": 0.0, "bits": 0.0},
        {"fastest": 1e8},
        {"slowest": 2e9, "epsilon": 1e-25},
    ],
    ids=str,
)
def test_3_without_a_budget_there_is_no_plan(nothing: dict[str, float]) -> None:
    poor = replace(DEVICE, **nothing)
    assert np.isnan(anycost_best_sending(poor)).all()
    assert np.isnan(anycost_best_sending(poor, 0.01, 0.01)).all()
    assert np.isnan(anycost_plans(poor, alpha_min=0.3)).all()


@pytest.mark.parametrize("name", NAMES)
def test_3_what_is_unknown_is_not_planned_with(name: str) -> None:
    unknown = replace(DEVICE, **{name: np.array([np.nan, getattr(DEVICE, name)])})
    for found in (anycost_best_sending(unknown), anycost_plans(unknown)):
        assert all(np.isnan(column).tolist() == [True, False] for column in found)


def test_3_energy_without_end() -> None:
    """Time alone limits: as fast as possible, but for the capped not faster than needed."""
    rich = replace(DEVICE, energy=np.inf, cycles=5e10)
    plans = anycost_plans(rich, alpha_min=0.05, beta_max=1.0)
    assert plans.frequency == 3e9
    assert plans.alpha == pytest.approx(0.75 * 10 * 3e9 / 5e10, rel=1e-12)
    capped = anycost_best_sending(replace(rich, cycles=5e9), beta_max=1e-3)
    assert capped.frequency == pytest.approx(5e9 / (10 - 111.7e3 / 8e6), rel=1e-12)


def test_3_free_sending() -> None:
    """As fast as the energy allows; two thirds of the time for computing."""
    free = replace(DEVICE, power=0.0)
    plans = anycost_plans(free, beta_max=1.0)
    assert plans.alpha * DEVICE.cycles / plans.frequency == pytest.approx(20 / 3)
    sent = anycost_best_sending(replace(free, energy=0.1, cycles=5e8, slowest=1e7), beta_max=1e3)
    fastest = (0.1 / (7.5e-27 * 5e8)) ** 0.5
    assert sent.frequency == pytest.approx(fastest, rel=1e-12)
    assert sent.beta == pytest.approx((10 - 5e8 / fastest) * 8e6 / 111.7e6, rel=1e-12)


def test_3_free_sending_at_the_end_of_the_energy() -> None:
    """The largest size leaves nothing of it, and rounding does not make that too little."""
    draw = np.random.default_rng(5)
    energies = draw.uniform(0.1, 1, 200)
    slow = replace(DEVICE, power=0.0, energy=energies, slowest=5e8)
    plans = anycost_plans(slow, alpha_min=0.01, beta_min=1e-3)
    assert plans.alpha == pytest.approx(energies / (7.5e-27 * 2.5e17 * float(DEVICE.cycles)))
    assert (plans.beta == 1 / 15).all()


def test_3_computing_that_costs_nothing() -> None:
    """The whole model, and as much of the update as can be sent."""
    idle = replace(DEVICE, cycles=0.0, energy=1e-3)
    plans = anycost_plans(idle)
    assert plans.alpha == 1
    assert plans.frequency == 1e8
    assert plans.beta == pytest.approx(1e-3 / 0.1 * 8e6 / 111.7e6, rel=1e-12)
    assert anycost_best_sending(replace(idle, energy=9.0), beta_max=1.0).beta == pytest.approx(
        80 / 111.7
    )
    # Cycles that take time but no energy: three quarters of the time.
    frugal = replace(DEVICE, epsilon=0.0, energy=1.0, cycles=1e11)
    timed = anycost_plans(frugal, alpha_min=0.05, beta_max=1.0)
    assert timed.alpha == pytest.approx(0.75 * 10 * 3e9 / 1e11, rel=1e-12)
    # Little energy for sending: no faster than leaves the time it pays for.
    sent = anycost_best_sending(replace(frugal, energy=0.1, cycles=1e10), beta_max=1.0)
    assert sent.beta == pytest.approx(8e6 / 111.7e6, rel=1e-12)
    assert sent.frequency == pytest.approx(1e10 / 9, rel=1e-12)
    free = anycost_plans(replace(DEVICE, epsilon=0.0, power=0.0, energy=0.0))
    assert free.alpha == 1
    assert free.beta == 1 / 15


def test_3_nothing_to_send() -> None:
    """The largest factor, if the computing fits."""
    assert anycost_best_sending(replace(DEVICE, bits=0.0)).beta == 1 / 15
    assert anycost_plans(replace(DEVICE, bits=0.0)).alpha == 1
    assert np.isnan(anycost_best_sending(replace(DEVICE, bits=0.0, fastest=3e8)).beta)
    heavy = replace(DEVICE, bits=0.0, cycles=1e10)
    largest = (6 * 100 / 7.5e-27) ** (1 / 3) / 1e10  # all of both budgets
    plans = anycost_plans(heavy)
    assert (plans.alpha, plans.beta) == pytest.approx((largest, 1 / 15), rel=1e-9)
    assert anycost_best_sending(DEVICE, 0.0, 0.0).beta == 0
    assert np.isnan(anycost_best_sending(replace(DEVICE, fastest=3e8), 0.0, 0.0).beta)


@pytest.mark.parametrize("power", [0.0, 0.1])
def test_3_computing_that_takes_all_leaves_nothing_to_send(power: float) -> None:
    """Rounding is not time, and not energy: a little less work and there is a plan."""
    cycles = 10 ** np.random.default_rng(8).uniform(6, 10, 300)
    late = replace(DEVICE, power=power, cycles=cycles, seconds=cycles / 3e9, energy=1e4)
    hungry = replace(
        DEVICE, cycles=cycles, energy=7.5e-27 * 1e16 * cycles, seconds=1e3, fastest=1e8
    )
    for budgets in (late, hungry):
        assert np.isnan(
            anycost_best_sending(replace(budgets, cycles=cycles * (1 + 1e-12))).beta
        ).all()
        assert (anycost_best_sending(replace(budgets, cycles=cycles * (1 - 1e-9))).beta > 0).all()
        assert np.isnan(anycost_best_sending(budgets).beta).all()


def test_3_limits_that_contradict_each_other_leave_nothing() -> None:
    assert np.isnan(anycost_best_sending(DEVICE, 0.02, 0.01).beta)
    assert anycost_best_sending(DEVICE, 0.01, 0.02).beta == 0.02
    assert np.isnan(anycost_plans(replace(DEVICE, slowest=2e9, fastest=1e9))).all()


def test_3_extreme_scales_break_no_constraint() -> None:
    draw = np.random.default_rng(6)

    def powers(low: float, high: float) -> Floats:
        values: Floats = 10 ** draw.uniform(low, high, 20_000)
        return values

    budgets = AnycostBudgets(
        energy=powers(-12, 12),
        seconds=powers(-6, 8),
        power=powers(-12, 6),
        bit_rate=powers(0, 12),
        bits=powers(0, 12),
        epsilon=powers(-40, -10),
        cycles=powers(0, 15),
        slowest=powers(-3, 3),
        fastest=powers(3, 13),
    )
    sent = anycost_best_sending(budgets, beta_max=1.0)
    one = AnycostPlans(np.ones(20_000), *sent)
    assert most_overspent(budgets, one) < 1e-9
    there = ~np.isnan(sent.beta)
    assert 0.1 < there.mean() < 0.9
    assert (there == feasible(budgets)).all()
    plans = anycost_plans(budgets, alpha_min=1e-6, beta_max=1.0)
    assert most_overspent(budgets, plans) < 1e-9
    # No size beside the chosen one is better, nor is the whole model.
    for change in (0.5, 0.99, 0.9999, 1.0001, 1.01, 2.0, np.inf):
        alpha = np.clip(plans.alpha * change, 1e-6, 1)
        part = replace(budgets, cycles=alpha * budgets.cycles, bits=alpha * budgets.bits)
        gain = alpha**4 * anycost_best_sending(part, beta_max=1.0).beta
        assert np.nanmax(gain / plans.gain) < 1 + 1e-9


def feasible(budgets: AnycostBudgets) -> Flags:
    """Whether computing alone fits: between the slowest in time and the fastest affordable."""
    in_time = np.maximum(budgets.slowest, np.asarray(budgets.cycles) / budgets.seconds)
    paid = np.sqrt(budgets.energy / (np.asarray(budgets.epsilon) * budgets.cycles))
    found: Flags = in_time < np.minimum(budgets.fastest, paid)
    return found
