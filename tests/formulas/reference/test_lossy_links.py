"""Columns over lossy links, with the numbers of the specification."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyfleet.formulas.links import leading_columns
from anyfleet.formulas.reference.lossy_links import (
    all_delivered,
    column_coverage,
    delivered_chances,
    delivered_width,
    expected_column_coverage,
    expected_delivered_share,
    mean_delivered,
    none_delivered,
)


@pytest.mark.parametrize(
    ("error", "share"), [(0.05, 0.799376), (0.15, 0.515319), (0.25, 0.337458), (0.3, 0.274853)]
)
def test_1_9_shares_of_the_example(error: float, share: float) -> None:
    assert expected_delivered_share(error, 8) == pytest.approx(share, abs=1e-6)


def test_1_9_all_and_nothing_of_the_example() -> None:
    chances = delivered_chances(0.15, 8)
    assert chances[8] == pytest.approx(0.272491, abs=1e-6)
    assert chances[0] == pytest.approx(0.15)


@given(st.floats(0, 1), st.integers(0, 30))
def test_1_9_all_and_nothing_are_the_ends_of_the_law(error: float, columns: int) -> None:
    chances = delivered_chances(error, columns)
    assert all_delivered(error, columns) == pytest.approx(chances[-1])
    assert none_delivered(error, columns) == (chances[0] if columns else 0)


@given(st.floats(0, 1), st.integers(0, 12))
def test_1_9_the_chances_are_a_law_with_this_mean(error: float, columns: int) -> None:
    chances = delivered_chances(error, columns)
    assert len(chances) == columns + 1
    assert chances.sum() == pytest.approx(1.0)
    assert chances @ np.arange(columns + 1) == pytest.approx(mean_delivered(error, columns))
    reached = chances[::-1].cumsum()[::-1][1:]
    assert reached == pytest.approx(expected_column_coverage(error, columns), abs=1e-12)


def test_1_9_the_first_loss_ends_the_transmission() -> None:
    u = np.array([[0.5, 0.2, 0.9], [0.1, 0.9, 0.9], [0.9, 0.9, 0.9], [0.2, 0.2, 0.1]])
    assert leading_columns(u, 0.2).tolist() == [3, 0, 3, 2]
    assert leading_columns(u, np.array([0.0, 0.3, 0.0])).tolist() == [1, 3, 3, 1]
    assert leading_columns(u[:, :0], 0.2).tolist() == [0] * 4
    assert leading_columns(u, 0.0).tolist() == [3] * 4
    assert leading_columns(u, 1.0).tolist() == [0] * 4


def test_1_9_a_width_is_never_more_than_the_device_has() -> None:
    assert delivered_width(np.array([0, 2, 3]), 0.35).tolist() == [0.0, 0.25, 0.35]


def test_f_6_coverage_of_a_round() -> None:
    assert column_coverage(np.array([0, 2, 3, 3]), 4).tolist() == [0.75, 0.75, 0.5, 0.0]
    assert column_coverage(np.zeros(0, dtype=np.int64), 2).tolist() == [0.0, 0.0]
    # Every column the same: the mean coverage is the delivered share.
    u = np.random.default_rng(0).uniform(size=(20_000, 8))
    share = column_coverage(leading_columns(u, 0.15), 8)
    expected = expected_column_coverage(0.15, 8)
    assert np.abs(share - expected).max() < 5 * 0.5 / np.sqrt(20_000)


def test_f_6_without_loss_or_columns_everything_arrives() -> None:
    assert expected_delivered_share(0.0, 8) == 1.0
    assert expected_delivered_share(1.0, 8) == 0.0
    assert expected_delivered_share(0.5, 0) == 1.0
