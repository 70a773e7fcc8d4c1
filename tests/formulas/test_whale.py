"""Utility, levels and regions of WHALE-FL, with the numbers of the specification."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyfleet.formulas.reference.whale import (
    cheap_fisher_trace,
    fisher_trace,
    whale_block_budget,
    whale_region_sizes,
    whale_unit_seconds,
)
from anyfleet.formulas.whale import (
    WhaleRegionFisher,
    WhaleScore,
    whale_blocks,
    whale_effectiveness,
    whale_extreme_share,
    whale_importance,
    whale_level,
    whale_region_fisher,
    whale_relative_effectiveness,
    whale_scores,
    whale_target_seconds,
    whale_threshold_utility,
    whale_utility,
)

WINDOW = np.array([[0.2, 0.1], [0.3, 0.2]])
COUNTS = np.array([3, 3, 1, 0, 2, 0, 1, 3])
FISHER = np.array([0.9, 0.2, 0.8, 0.1, 0.5, 0.7, 0.3, 0.4])

# --- scheduling -------------------------------------------------------------------------------


def test_1_10_effectiveness_example() -> None:
    assert whale_effectiveness(WINDOW, 32) == pytest.approx(9.6)
    assert whale_effectiveness(np.zeros((0, 2)), 32) == 0


@pytest.mark.parametrize(
    ("seconds", "threshold", "u", "chosen"),
    [
        (8, 10, 0.96, 1),
        (8, 20, 0.48, 3),
        (8, 50, 0.192, 5),
        (20, 10, 0.24, 4),
        (20, 20, 0.12, 5),
    ],
)
def test_1_10_levels_of_the_example(
    seconds: float, threshold: float, u: float, chosen: int
) -> None:
    useful = whale_utility(whale_effectiveness(WINDOW, 32), seconds, 10.0)
    found = whale_threshold_utility(useful, threshold)
    assert found == pytest.approx(u)
    assert whale_level(found) == chosen


def test_1_10_levels_of_utilities() -> None:
    u = np.array([0, 0.19, 0.2, 0.4, 0.6, 0.79, 0.8, 1])
    assert whale_level(u).tolist() == [5, 5, 4, 3, 2, 2, 1, 1]


@pytest.mark.parametrize("levels", [1, 2, 3, 5, 7])
def test_1_10_a_level_is_the_first_whose_share_is_reached(levels: int) -> None:
    for u in np.linspace(0, 1, 43):
        reached = [p for p in range(1, levels + 1) if u >= (levels - p) / levels - 1e-12]
        assert whale_level(u, levels) == (reached[0] if u >= 1 / levels - 1e-12 else levels)


def test_1_10_a_device_stays_below_its_cap() -> None:
    assert whale_level(np.array([1.0, 0.0, 0.5]), 5, np.array([3, 3, 3])).tolist() == [3, 5, 3]
    assert whale_level(np.array([np.nan, 1.0])).tolist() == [5, 1]


def test_1_10_utility_at_its_ends() -> None:
    assert whale_utility(9.6, 10.0, 10.0) == 9.6  # just in time
    assert whale_utility(np.array([9.6, 0.0]), np.array([math.inf, 3.0]), 10.0).tolist() == [0, 0]
    assert whale_utility(9.6, math.inf, 10.0, penalty=0.0) == 0
    assert whale_utility(9.6, 20.0, 10.0, penalty=0.0) == 9.6
    assert whale_utility(9.6, 20.0, 10.0, penalty=1.0) == pytest.approx(4.8)
    assert whale_utility(9.6, 1e9, math.inf) == 9.6


def test_1_10_the_relative_scale_starts_at_ten() -> None:
    same = np.array([[3.0, 2.0], [12.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    counts = np.array([[3, 2], [3, 0], [0, 0], [4, 4]])
    found = whale_relative_effectiveness(same, counts)
    assert found == pytest.approx([10.0, 20.0, 0.0, 0.0])
    # Thresholds 10, 20 and 50 then start at these levels.
    for threshold, first in ((10, 1), (20, 3), (50, 4)):
        assert whale_level(whale_threshold_utility(found[0], threshold)) == first
    assert whale_relative_effectiveness(np.array([4.0]), np.array([1])) == 20.0


def test_1_10_unit_seconds() -> None:
    rate, speed = np.array([80.0, 0.0, 80.0]), np.array([5.0, 5.0, 0.0])
    assert whale_unit_seconds(160.0, rate, 10.0, speed).tolist() == [4.0, math.inf, math.inf]
    assert whale_target_seconds(np.array([1.0, 5.0, 2.0, math.inf])) == 2.0
    assert whale_target_seconds(np.array([math.inf])) == math.inf


def test_1_10_share_of_extreme_utilities() -> None:
    assert whale_extreme_share(np.array([0.0, 1.0, 0.5, 1.0])) == 0.75
    assert whale_extreme_share(np.zeros(0)) == 0


def test_1_10_fisher_traces() -> None:
    rows = np.array([[1.0, 2.0], [3.0, 0.0]])
    assert fisher_trace(rows) == 7.0
    assert fisher_trace(np.zeros((0, 2))) == 0
    assert cheap_fisher_trace(rows.mean(axis=0), 2) == 10.0
    assert cheap_fisher_trace(rows[0], 1) == fisher_trace(rows[:1])


@given(st.integers(0, 2**31))
def test_1_10_expected_fisher_of_a_softmax(seed: int) -> None:
    """With labels weighed by their probability the trace is that of diag(p) - pp'."""
    logits = np.random.default_rng(seed).normal(size=4)
    p = np.exp(logits) / np.exp(logits).sum()
    trace = sum(p[y] * fisher_trace((np.eye(4)[y] - p)[np.newaxis]) for y in range(4))
    assert trace == pytest.approx(1 - (p**2).sum())


# --- regions ----------------------------------------------------------------------------------


def test_1_11_rings_of_half_widths() -> None:
    assert whale_region_sizes(np.array([256, 64, 16, 4, 1])).tolist() == [192, 48, 12, 3, 1]
    assert whale_region_sizes(np.array([7])).tolist() == [7]


def test_1_11_nested_rings_leave_no_choice() -> None:
    """Whatever the scores, a level's budget holds exactly the rings inside it."""
    nested = np.array([256, 64, 16, 4, 1])
    rings, draw = whale_region_sizes(nested), np.random.default_rng(0)
    for p, budget in enumerate(nested):
        for _ in range(20):
            counts = draw.integers(0, 5, 5)
            found = whale_blocks(draw.normal(size=5), counts, rings, float(budget))
            assert found.tolist() == list(range(p, 5))


def test_1_11_blocks_of_the_levels() -> None:
    assert whale_block_budget(np.arange(1, 6)).tolist() == [16, 8, 4, 2, 1]
    assert whale_block_budget(6) == 1


def test_1_11_importance_example() -> None:
    found = whale_importance(FISHER, 0.1, 0.9)
    expected = [1.00125, 0.12625, 0.87625, 0.00125, 0.50125, 0.75125, 0.25125, 0.37625]
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    ("score", "chosen"),
    [
        ("literal", [0, 2, 4, 7]),
        ("recommended", [0, 2, 4, 5]),
        # Products 0 of regions 3 and 5, then .25125 of 6 and .37875 of 1.
        ("maxmin", [1, 3, 5, 6]),
    ],
)
def test_1_11_blocks_of_the_example(score: WhaleScore, chosen: list[int]) -> None:
    wanted = whale_scores(whale_importance(FISHER, 0.1, 0.9), COUNTS, score)
    assert whale_blocks(wanted, COUNTS, np.ones(8), 4).tolist() == chosen


def test_1_11_bounds_that_agree() -> None:
    found = whale_importance(
        np.array([0.5, 3.0]), np.array([0.5, 1.0]), np.array([0.5 + 1e-13, 5.0])
    )
    assert found == pytest.approx([1.0, 2.001 / 4])


def test_1_11_ties_go_to_the_rarely_trained_and_then_by_index() -> None:
    even = np.zeros(4)
    assert whale_blocks(even, np.array([1, 2, 0, 1]), np.ones(4), 2).tolist() == [0, 2]
    assert whale_blocks(even, np.zeros(4, dtype=np.int64), np.ones(4), 3).tolist() == [0, 1, 2]


def test_1_11_what_does_not_fit_is_skipped() -> None:
    wanted, counts = np.array([3.0, 2.0, 1.0]), np.zeros(3, dtype=np.int64)
    assert whale_blocks(wanted, counts, np.array([5, 2, 2]), 4).tolist() == [1, 2]
    assert whale_blocks(wanted, counts, np.array([5, 3, 2]), 1).tolist() == [2]
    # A tenth three times is a little more than three tenths.
    assert whale_blocks(wanted, counts, np.full(3, 0.1), 0.3).tolist() == [0, 1, 2]
    assert whale_blocks(np.array([np.nan, 0.0, 1.0]), counts, np.ones(3), 2).tolist() == [1, 2]


def test_1_11_regions_nobody_trained_keep_what_was_known() -> None:
    before = WhaleRegionFisher(np.full(3, 7.0), np.full(3, 6.0), np.full(3, 8.0))
    values = np.array([[1.0, 2.0, 9.0], [3.0, np.nan, 9.0]])
    trained = np.array([[True, True, False], [True, False, False]])
    after = whale_region_fisher(before, values, trained)
    assert after.mean.tolist() == [2.0, 2.0, 7.0]
    assert after.low.tolist() == [1.0, 2.0, 6.0]
    assert after.high.tolist() == [3.0, 2.0, 8.0]
    nobody = whale_region_fisher(before, np.zeros((0, 3)), np.zeros((0, 3), dtype=np.bool_))
    assert nobody.low.tolist() == [6.0] * 3
    assert nobody.mean.tolist() == [7.0] * 3
