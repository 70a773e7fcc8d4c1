"""Intervals over seeds: textbook numbers, coverage by simulation, and what has no interval."""

import math

import numpy as np
import pytest

from anyfleet.analysis.intervals import estimate, paired_difference, t_quantile

# Two-sided 5 % points, to the three places of the usual tables (Fisher and Yates, table III).
TABLE = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306}
TABLE |= {9: 2.262, 10: 2.228, 14: 2.145, 15: 2.131, 20: 2.086, 29: 2.045, 30: 2.042}
TABLE |= {40: 2.021, 60: 2.000, 120: 1.980}

# Extra hours of sleep with two drugs, the same ten patients (Cushny and Peebles 1905, the example
# of Student 1908; `sleep` in R).
FIRST = (0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0)
SECOND = (1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4)
# Darwin's maize: crossed minus self-fertilised, eighths of an inch (Fisher 1935, The Design of
# Experiments, chapter III).
MAIZE = (49, -67, 8, 16, 6, 23, 28, 41, 14, 29, 56, 24, 75, 60, -48)


@pytest.mark.parametrize("degrees", TABLE)
def test_quantiles_are_those_of_the_tables(degrees: int) -> None:
    assert t_quantile(degrees) == pytest.approx(TABLE[degrees], abs=5.01e-4)


def test_quantiles_of_other_confidences() -> None:
    assert t_quantile(9, 0.99) == pytest.approx(3.250, abs=5e-4)
    assert t_quantile(4, 0.90) == pytest.approx(2.132, abs=5e-4)
    assert t_quantile(1, 0.5) == pytest.approx(1.0, rel=1e-12)  # Cauchy's quartile
    assert t_quantile(100_000) == pytest.approx(1.95999, abs=2e-5)  # nearly normal
    for degrees, confidence in ((0, 0.95), (3, 0.0), (3, 1.0), (3, math.nan)):
        with pytest.raises(ValueError, match="must"):
            t_quantile(degrees, confidence)


def test_the_interval_of_darwins_maize_is_fishers() -> None:
    found = estimate([each / 8 for each in MAIZE])
    assert found.mean == pytest.approx(2.616667, abs=1e-6)
    assert found.deviation == pytest.approx(37.744 / 8, abs=1e-4)
    assert (found.low, found.high) == pytest.approx((0.003899165, 5.229434), abs=1e-6)


def test_the_paired_interval_of_students_sleep_data() -> None:
    first, second = dict(enumerate(FIRST)), dict(enumerate(SECOND))
    found = paired_difference(first, second, range(10))
    assert found.mean == pytest.approx(-1.58)
    assert found.count == 10
    assert (found.low, found.high) == pytest.approx((-2.4598858, -0.7001142), abs=1e-7)
    alone = estimate(FIRST)
    assert (alone.low, alone.high) == pytest.approx((-0.5297804, 2.0297804), abs=1e-6)


@pytest.mark.parametrize("seeds", [2, 3, 5, 10])
def test_intervals_cover_the_truth_in_95_of_100_studies(seeds: int) -> None:
    """Over 1,000 made-up studies, within the bounds that a binomial number leaves once in 1,000."""
    random = np.random.default_rng(16)
    studies = random.normal(0.7, 0.05, size=(1000, seeds))
    found = [estimate(study) for study in studies.tolist()]
    covered = sum(each.low <= 0.7 <= each.high for each in found)
    spare = 3.29 * math.sqrt(1000 * 0.95 * 0.05)
    assert 950 - spare <= covered <= 950 + spare


def test_paired_intervals_cover_and_are_narrow_where_seeds_do_the_same_to_both() -> None:
    random = np.random.default_rng(17)
    covered, narrower = 0, 0
    for _ in range(1000):
        luck = random.normal(
            0.0, 0.10, size=4
        )  # of the seed: the same data, cohorts, initial model
        one, other = (
            dict(enumerate((mean + luck + random.normal(0.0, 0.01, size=4)).tolist()))
            for mean in (0.72, 0.70)
        )
        found = paired_difference(one, other, range(4))
        covered += found.low <= 0.02 <= found.high
        narrower += found.margin < estimate(list(one.values())).margin
    spare = 3.29 * math.sqrt(1000 * 0.95 * 0.05)
    assert 950 - spare <= covered <= 950 + spare
    assert narrower > 950


def test_what_is_not_known_has_no_interval() -> None:
    single = estimate([0.5])
    assert (single.mean, single.count, single.selected) == (0.5, 1, False)
    assert math.isnan(single.margin)
    assert math.isnan(single.deviation)
    nothing = estimate([], 3)
    assert (nothing.count, nothing.of) == (0, 3)
    assert math.isnan(nothing.mean)
    broken = estimate([0.5, math.nan])
    assert math.isnan(broken.mean)
    assert math.isnan(broken.margin)
    endless = estimate([0.5, math.inf])
    assert endless.mean == math.inf
    assert math.isnan(endless.margin)
    with pytest.raises(ValueError, match="2 numbers cannot be of 1"):
        estimate([1.0, 2.0], 1)


def test_there_is_no_interval_of_seeds_that_were_selected() -> None:
    """Two of three reached the target: their mean says nothing about the third."""
    found = estimate([10.0, 12.0], 3)
    assert (found.mean, found.selected) == (11.0, True)
    assert math.isnan(found.margin)
    pairs = paired_difference({0: 3.0, 1: 5.0}, {0: 1.0, 2: 9.0}, (0, 1, 2))
    assert (pairs.mean, pairs.count, pairs.of) == (2.0, 1, 3)
    assert math.isnan(pairs.margin)


def test_equal_numbers_have_an_interval_without_width() -> None:
    found = estimate([2.0, 2.0, 2.0])
    assert (found.low, found.high) == (2.0, 2.0)
