"""AnycostFL's plan against worked numbers and against brute force."""

import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from anyfleet.arrays import Floats
from anyfleet.formulas.anycost import AnycostBudgets
from anyfleet.formulas.reference.anycost_plans import (
    DEFAULT_BOUNDS,
    AnycostBounds,
    AnycostDevice,
    AnycostPlan,
    anycost_cost,
    anycost_discriminant,
    anycost_plan,
    anycost_plan_at,
    anycost_plans,
    anycost_tight_gain,
    anycost_tight_plan,
    anycost_time_shares,
)

DEVICE = AnycostDevice(
    energy=6, seconds=10, power=0.1, bit_rate=8e6, bits=111.7e6, epsilon=7.5e-27, cycles=833 * 4.5e6
)
HEAVY = replace(DEVICE, cycles=833 * 7.3e6)
OPEN = AnycostBounds(beta_max=1.0)


def slope(share: float, energy: float, sent: float) -> float:
    return -4 * sent * share**2 + (6 * sent - 3 * energy) * share + 2 * (energy - sent)


# --- closed form ------------------------------------------------------------------------------


def test_3_roots_of_the_example() -> None:
    assert anycost_discriminant(6, 1) == 304
    assert anycost_time_shares(6, 1) == pytest.approx((0.679449, -3.679449), abs=1e-6)
    printed = anycost_time_shares(6, 1, printed=True).second
    assert printed == pytest.approx(-5.179449, abs=1e-6)
    # The derivative, with the factor that was divided out, is far from 0 there.
    assert printed * slope(printed, 6, 1) == pytest.approx(182, abs=0.5)
    assert anycost_time_shares(0.6, 1) == pytest.approx((0.8, 0.25))


@given(st.floats(0.01, 100), st.floats(1e-6, 100))
@example(1.0, 1e-14)
def test_3_the_derivative_vanishes_at_both_roots(energy: float, sent: float) -> None:
    assert anycost_discriminant(energy, sent) > 0
    first, second = anycost_time_shares(energy, sent)
    assert slope(first, energy, sent) == pytest.approx(0, abs=1e-9 * (energy + sent))
    scale = sent * second**2 + (energy + sent) * (1 + abs(second))
    assert slope(second, energy, sent) == pytest.approx(0, abs=1e-9 * scale)
    # Only the first lies where both time and energy are positive.
    assert max(0.0, 1 - energy / sent) < first < 1
    assert second <= max(0.0, 1 - energy / sent) + 1e-12


def test_3_sending_that_costs_nothing() -> None:
    assert anycost_time_shares(5.0, 0.0) == (2 / 3, -np.inf)


@given(st.floats(0.5, 12), st.floats(1, 20))
def test_3_the_first_root_is_the_best_of_a_grid(energy: float, seconds: float) -> None:
    device = replace(DEVICE, energy=energy, seconds=seconds)
    sent = device.power * seconds
    shares = np.linspace(max(0.0, 1 - energy / sent), 1, 20_001)
    best = shares[np.argmax(anycost_tight_gain(device, shares))]
    assert anycost_time_shares(energy, sent).first == pytest.approx(best, abs=2e-4)


@given(st.floats(0.05, 0.95))
def test_3_a_tight_plan_uses_everything(share: float) -> None:
    plan = anycost_tight_plan(DEVICE, share)
    cost = anycost_cost(DEVICE, plan.alpha, plan.beta, plan.frequency)
    assert cost.computing_seconds == pytest.approx(share * 10)
    assert cost.computing_seconds + cost.sending_seconds == pytest.approx(10)
    assert cost.computing_joules + cost.sending_joules == pytest.approx(6)
    assert anycost_tight_gain(DEVICE, share) == pytest.approx(plan.gain)


def test_3_the_paper_literally_breaks_its_own_cap() -> None:
    least = 1 - HEAVY.bits / 15 / (HEAVY.bit_rate * HEAVY.seconds)
    plan = anycost_tight_plan(HEAVY, least)
    found = (least, plan.alpha, plan.beta)
    assert found == pytest.approx((0.906917, 0.660456, 0.100940), abs=1e-6)
    clipped = plan.alpha**4 / 15
    best = anycost_plan(HEAVY)
    assert best is not None
    assert (clipped, best.gain) == pytest.approx((0.012685, 0.013935), abs=1e-6)


# --- the planner ------------------------------------------------------------------------------


def test_3_example_tight() -> None:
    plan = anycost_plan(DEVICE, OPEN)
    assert plan is not None
    assert plan.branch == "tight"
    found = (plan.alpha, plan.beta, plan.frequency / 1e6, plan.gain)
    assert found == pytest.approx((0.872293, 0.263191, 481.240981, 0.152377), rel=1e-5)
    cost = anycost_cost(DEVICE, *plan[:3])
    assert cost.computing_joules / 6 == pytest.approx(0.946575, abs=1e-6)


def test_3_example_saturated() -> None:
    plan = anycost_plan(DEVICE)
    assert plan is not None
    assert (plan.alpha, plan.beta, plan.branch) == (1.0, 1 / 15, "saturated")
    assert plan.frequency == pytest.approx(413323532.114, rel=1e-9)


def test_3_example_at_the_cap() -> None:
    plan = anycost_plan(HEAVY)
    assert plan is not None
    assert plan.branch == "tight"
    found = (plan.alpha, plan.beta, plan.frequency)
    assert found == pytest.approx((0.676156899, 1 / 15, 438780636.15), rel=1e-7)
    cost = anycost_cost(HEAVY, *plan[:3])
    assert cost == pytest.approx((9.3706, 0.6294, 5.9371, 0.0629), abs=5e-5)


def test_3_example_infeasible() -> None:
    assert anycost_plan(replace(DEVICE, energy=0.01)) is None
    assert anycost_plan(replace(DEVICE, bit_rate=0.0)) is None
    assert anycost_plan_at(1.0, replace(DEVICE, energy=0.01)) is None
    assert anycost_plan_at(1.0, replace(DEVICE, bit_rate=0.0)) is None


def test_3_a_fixed_size_gets_the_best_rest() -> None:
    best = anycost_plan(HEAVY)
    assert best is not None
    again = anycost_plan_at(best.alpha, HEAVY)
    assert again is not None
    assert again[:3] == pytest.approx(best[:3])
    smaller = anycost_plan_at(0.5, HEAVY)
    assert smaller is not None
    assert smaller.beta == 1 / 15
    # Both budgets have room: the slowest frequency that is in time.
    cost = anycost_cost(HEAVY, *smaller[:3])
    assert cost.computing_seconds + cost.sending_seconds == pytest.approx(10)


def test_3_a_fixed_size_that_leaves_less_than_may_be_sent_has_no_plan() -> None:
    idle = replace(DEVICE, cycles=0.0, energy=1e-3)
    found = anycost_plan_at(1.0, idle)
    assert found is not None
    assert found.beta == pytest.approx(1e-3 / 0.1 * 8e6 / 111.7e6)
    for factor, fits in ((0.999, True), (1.0, True), (1.001, False)):
        bounds = AnycostBounds(beta_min=factor * found.beta)
        assert (anycost_plan_at(1.0, idle, bounds) is not None) == fits


def test_3_one_budget_alone() -> None:
    """Where only time or only energy limits, the best alpha is known."""
    slow = AnycostBounds(alpha_min=0.05, beta_max=1.0, fastest=2e8)
    timed = anycost_plan(DEVICE, slow)
    assert timed is not None
    assert timed.branch == "search"
    assert timed.alpha == pytest.approx(0.75 * 10 * 2e8 / DEVICE.cycles)
    hungry = AnycostBounds(alpha_min=0.05, beta_max=1.0, slowest=1e9)
    device = replace(DEVICE, power=2.0)
    fed = anycost_plan(device, hungry)
    assert fed is not None
    assert fed.branch == "search"
    expected = 0.75 * device.energy / (device.epsilon * 1e18 * device.cycles)
    assert fed.alpha == pytest.approx(expected)


@pytest.mark.parametrize(
    ("cycles", "slowest", "alpha", "frequency"),
    [(3e6, 1e8, 1.0, 539879829.2586855), (4.5e6, 5.2e8, 0.7266287898554215, 5.2e8)],
)
def test_3_tight_at_a_bound(cycles: float, slowest: float, alpha: float, frequency: float) -> None:
    """The whole model, or the slowest frequency: both budgets are still used up."""
    device = replace(DEVICE, cycles=833 * cycles)
    plan = anycost_plan(device, replace(OPEN, slowest=slowest))
    assert plan is not None
    assert plan.branch == "tight"
    assert (plan.alpha, plan.frequency) == pytest.approx((alpha, frequency), rel=1e-9)
    cost = anycost_cost(device, *plan[:3])
    assert cost.computing_seconds + cost.sending_seconds == pytest.approx(10)
    assert cost.computing_joules + cost.sending_joules == pytest.approx(6)


def test_3_free_sending() -> None:
    device = replace(DEVICE, power=0.0)
    plan = anycost_plan(device, OPEN)
    assert plan is not None
    assert anycost_cost(device, *plan[:3]).computing_seconds == pytest.approx(20 / 3)
    assert anycost_plan(replace(device, energy=1e-3), OPEN) is None
    capped = anycost_plan(replace(device, cycles=2 * device.cycles))
    assert capped is not None
    assert capped.beta == pytest.approx(1 / 15)


def test_3_free_sending_of_a_fixed_size() -> None:
    """As fast as the energy allows, not a little faster, which it does not allow."""
    device = replace(DEVICE, energy=0.1, power=0.0, cycles=5e8)
    bounds = AnycostBounds(slowest=1e7)
    plan = anycost_plan_at(0.75, device, bounds)
    assert plan is not None
    assert plan.beta == pytest.approx(1 / 15)
    check(device, bounds, plan)
    fastest = (0.1 / (7.5e-27 * 0.75 * 5e8)) ** 0.5
    assert plan.frequency <= fastest == pytest.approx(188.56e6, rel=1e-4)
    # Without a cap all the time that the fastest affordable computing leaves is used.
    uncapped = anycost_plan_at(0.75, device, replace(bounds, beta_max=1e3))
    assert uncapped is not None
    left = 10 - 0.75 * 5e8 / fastest
    assert uncapped.beta == pytest.approx(8e6 * left / (0.75 * 111.7e6))


@pytest.mark.parametrize(
    "nothing",
    [
        {"energy": 0.0},
        {"energy": 0.0, "power": 0.0},
        {"seconds": 0.0},
        {"seconds": 0.0, "cycles": 0.0},
        {"seconds": 0.0, "power": 0.0},
    ],
    ids=str,
)
def test_3_without_a_budget_there_is_no_plan(nothing: dict[str, float]) -> None:
    device = replace(DEVICE, **nothing)
    assert anycost_plan(device) is None
    assert anycost_plan_at(1.0, device) is None


def test_3_computing_that_costs_nothing() -> None:
    """The whole model, and as much of the update as can be sent."""
    idle = replace(DEVICE, cycles=0.0, energy=1e-3)
    plan = anycost_plan(idle)
    assert plan is not None
    assert (plan.alpha, plan.branch) == (1.0, "search")
    assert plan.beta == pytest.approx(1e-3 / 0.1 * 8e6 / 111.7e6)
    sent = anycost_plan(replace(idle, energy=1.0, power=0.0))
    assert sent is not None
    assert (sent.alpha, sent.beta, sent.branch) == (1.0, 1 / 15, "saturated")
    # Cycles that take time but no energy: three quarters of the time, or the whole model.
    frugal = replace(DEVICE, epsilon=0.0, energy=1.0, cycles=1e11)
    timed = anycost_plan(frugal, replace(OPEN, alpha_min=0.05))
    assert timed is not None
    assert timed.alpha == pytest.approx(0.75 * 10 * 3e9 / 1e11)


def brute_force(device: AnycostDevice, bounds: AnycostBounds) -> float:
    """The best gain on a grid of costs and frequencies, 0 if nothing fits."""
    alpha = np.linspace(bounds.alpha_min, 1, 150)[:, np.newaxis]
    frequency = np.geomspace(bounds.slowest, bounds.fastest, 600)
    return float(grid_gains(device, bounds, alpha, frequency).max())


def grid_gains(
    device: AnycostDevice, bounds: AnycostBounds, alpha: Floats, frequency: Floats
) -> Floats:
    """The gain with the largest compression factor that is affordable; 0 if there is none."""
    work = alpha * device.cycles
    time = device.seconds - work / frequency
    energy = (device.energy - device.epsilon * frequency**2 * work) / device.power
    beta = np.minimum(
        bounds.beta_max, device.bit_rate * np.minimum(time, energy) / (alpha * device.bits)
    )
    usable = (beta > 0) & (beta >= bounds.beta_min)
    gains: Floats = np.where(usable, alpha**4 * beta, 0.0)
    return gains


def check(device: AnycostDevice, bounds: AnycostBounds, plan: AnycostPlan) -> None:
    cost = anycost_cost(device, *plan[:3])
    near = 1 + 1e-7
    assert cost.computing_seconds + cost.sending_seconds <= device.seconds * near
    assert cost.computing_joules + cost.sending_joules <= device.energy * near
    assert bounds.alpha_min / near <= plan.alpha <= near
    assert max(0.0, bounds.beta_min / near) <= plan.beta <= bounds.beta_max * near
    assert bounds.slowest / near <= plan.frequency <= bounds.fastest * near


@settings(max_examples=60, deadline=None)
@given(
    st.floats(0.2, 12),
    st.floats(0.01, 1.5),
    st.floats(2e5, 2e7),
    st.floats(1e6, 2e7),
    st.sampled_from([1 / 15, 0.3, 1.0]),
    st.sampled_from([(1e8, 3e9), (1e8, 4e8), (6e8, 3e9), (4e8, 6e8)]),
)
def test_3_brute_force_is_never_better(
    energy: float,
    power: float,
    rate: float,
    cycles: float,
    beta_max: float,
    speeds: tuple[float, float],
) -> None:
    device = replace(DEVICE, energy=energy, power=power, bit_rate=rate, cycles=833 * cycles)
    bounds = AnycostBounds(beta_min=1e-3, beta_max=beta_max, slowest=speeds[0], fastest=speeds[1])
    plan, best = anycost_plan(device, bounds), brute_force(device, bounds)
    if plan is None:
        assert best == 0
        return
    check(device, bounds, plan)
    assert plan.gain >= best * (1 - 2e-6)


def test_3_every_branch_is_met() -> None:
    draw = np.random.default_rng(7)
    branches = set()
    for _ in range(60):
        device = replace(
            DEVICE,
            energy=draw.uniform(0.1, 9),
            bit_rate=10 ** draw.uniform(5, 7.3),
            cycles=833 * draw.uniform(1e6, 1.5e7),
        )
        plan = anycost_plan(device, AnycostBounds(fastest=6e8))
        branches.add(plan and plan.branch)
    assert branches == {"saturated", "tight", "search", None}


REPEATED = AnycostDevice(
    energy=8.3464,
    seconds=10.0,
    power=0.1,
    bit_rate=1.9534e7,
    bits=1.117e8,
    epsilon=8.038e-27,
    cycles=1.5413e10,
)
NARROW = AnycostDevice(
    energy=0.678175,
    seconds=3.778482,
    power=0.00523439,
    bit_rate=1.949880e7,
    bits=5.0461336e7,
    epsilon=9.785207e-27,
    cycles=5.0533115e9,
)


def zoomed(device: AnycostDevice, bounds: AnycostBounds) -> float:
    """The best gain of grids of alphas and frequencies, each around the best of the last."""
    box = [(bounds.alpha_min, 1.0), (bounds.slowest, bounds.fastest)]
    ends, best = box, 0.0
    for _ in range(9):
        alpha = np.linspace(*ends[0], 61)[:, np.newaxis]
        frequency = np.linspace(*ends[1], 121)
        gains = grid_gains(device, bounds, alpha, frequency)
        best = max(best, float(gains.max()))
        row, column = np.unravel_index(np.argmax(gains), gains.shape)
        middle, reaches = (alpha[row, 0], frequency[column]), [(b - a) / 8 for a, b in ends]
        ends = [
            (max(low, at - reach), min(high, at + reach))
            for at, reach, (low, high) in zip(middle, reaches, box, strict=True)
        ]
    return best


@pytest.mark.parametrize(
    ("device", "bounds"),
    [
        (REPEATED, AnycostBounds(fastest=4e8)),
        (NARROW, AnycostBounds(alpha_min=0.05, beta_max=1.0, slowest=5e8, fastest=6e8)),
    ],
    ids=["repeated", "narrow"],
)
def test_3_a_search_does_not_stop_at_a_place_that_is_on_its_grid_twice(
    device: AnycostDevice, bounds: AnycostBounds
) -> None:
    """The known optima, clipped, are ends of the grid."""
    plan = anycost_plan(device, bounds)
    assert plan is not None
    check(device, bounds, plan)
    assert plan.gain >= zoomed(device, bounds) * (1 - 1.1e-6)


def test_3_nothing_is_better_in_wide_random_cells() -> None:
    draw, found = np.random.default_rng(11), []
    for _ in range(150):
        device = AnycostDevice(
            energy=10 ** draw.uniform(-1, 1.5),
            seconds=10 ** draw.uniform(0, 1.5),
            power=10 ** draw.uniform(-3, 0.5),
            bit_rate=10 ** draw.uniform(5, 7.5),
            bits=10 ** draw.uniform(7, 8.5),
            epsilon=draw.uniform(5e-27, 1e-26),
            cycles=10 ** draw.uniform(9, 10.3),
        )
        slowest, fastest = np.sort(10 ** draw.uniform(8, 9.5, 2))
        bounds = AnycostBounds(
            alpha_min=draw.choice([0.05, 0.25]),
            beta_min=draw.choice([0.0, 1e-3]),
            beta_max=draw.choice([1 / 15, 1.0]),
            slowest=slowest,
            fastest=fastest,
        )
        plan, best = anycost_plan(device, bounds), zoomed(device, bounds)
        found.append(plan and plan.branch)
        if plan is None:
            assert best == 0
            continue
        check(device, bounds, plan)
        assert plan.gain >= best * (1 - 1.1e-6)
    assert found.count("search") > 20


WORK = DEVICE.cycles
IDLE_LINK: tuple[dict[str, float], ...] = (
    {},  # everything is affordable
    {"energy": 0.1},  # energy allows a part
    {"energy": 0.1, "power": 0.0},
    {"epsilon": 0.0, "cycles": 10 * WORK},  # time allows a part
    {"cycles": 10 * WORK},  # nothing fits
    {"energy": 1e-9},
    {"cycles": 0.0},
    {"bit_rate": 0.0},
)


@pytest.mark.parametrize("changes", IDLE_LINK, ids=str)
def test_without_bits_a_plan_is_the_limit_of_ever_fewer(changes: dict[str, float]) -> None:
    device = replace(DEVICE, **changes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        none = anycost_plan(replace(device, bits=0.0))
    few = anycost_plan(replace(device, bits=1e-6))
    named = {name: getattr(device, name) for name in ("energy", "seconds", "power", "bit_rate")}
    cohort = anycost_plans(
        AnycostBudgets(
            **named,
            bits=0.0,
            epsilon=device.epsilon,
            cycles=device.cycles,
            slowest=DEFAULT_BOUNDS.slowest,
            fastest=DEFAULT_BOUNDS.fastest,
        )
    )
    if none is None:
        assert few is None
        assert np.isnan(cohort.gain)
        return
    assert few is not None
    assert none.beta == DEFAULT_BOUNDS.beta_max
    assert none[:3] == pytest.approx(few[:3], rel=1e-9)
    assert none[:3] == pytest.approx(tuple(map(float, cohort)), rel=1e-8)


def test_what_has_no_limit_without_bits_is_refused() -> None:
    device = replace(HEAVY, bits=0.0)
    with pytest.raises(ValueError, match=r"tight_plan: a device with no bits .* anycost_plan has"):
        anycost_tight_plan(device, 0.5)
    with pytest.raises(ValueError, match="tight_gain: a device with no bits"):
        anycost_tight_gain(device, 0.5)
    for bits in (-1.0, math.nan):
        with pytest.raises(ValueError, match=r"AnycostDevice\.bits must be a number, at least 0"):
            replace(HEAVY, bits=bits)
