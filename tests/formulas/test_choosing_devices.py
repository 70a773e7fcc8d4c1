"""Probabilities that are learned, and norms: whom to ask, with the numbers of the specification."""

from itertools import combinations, permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyfleet.arrays import Floats
from anyfleet.formulas.contribution import bn2_largest, fedpns_lowered, weighted_draw

# --- FedPNS -----------------------------------------------------------------------------------


def labelled_once(labelled: int, selected: int) -> Floats:
    counts = np.zeros(5, dtype=np.int64)
    times_labelled, times_selected = counts.copy(), counts.copy()
    times_labelled[3], times_selected[3] = labelled, selected
    return fedpns_lowered(np.full(5, 0.2), np.array([3]), times_labelled, times_selected)


def test_1_19_fedpns_example() -> None:
    assert labelled_once(1, 10) == pytest.approx([0.232, 0.232, 0.232, 0.072, 0.232])
    assert labelled_once(1, 3) == pytest.approx([0.25, 0.25, 0.25, 0.0, 0.25])
    assert labelled_once(1, 1)[3] == 0


def test_1_19_exponents() -> None:
    found = fedpns_lowered(
        np.full(2, 0.5), np.array([0]), np.array([1, 0]), np.array([4, 4]), alpha=1.0, beta=0.5
    )
    assert found == pytest.approx([0.125, 0.875])


def test_1_19_everybody_or_nobody_labelled_changes_nothing() -> None:
    start, counts = np.array([0.1, 0.6, 0.3]), np.ones(3, dtype=np.int64)
    for labelled in ([], [0, 1, 2], [2, 0, 1]):
        rows = np.array(labelled, dtype=np.int64)
        assert fedpns_lowered(start, rows, counts, counts) == pytest.approx(start)


def test_1_19_drift_is_removed_and_the_argument_stays() -> None:
    start = np.array([0.3, 0.3, 0.3])
    after = fedpns_lowered(start, np.array([1]), np.array([0, 1, 0]), np.array([1, 9, 1]))
    assert after.sum() == pytest.approx(1.0)
    assert start.tolist() == [0.3, 0.3, 0.3]


@given(
    st.lists(st.floats(0.01, 1), min_size=3, max_size=8),
    st.data(),
)
def test_1_19_probabilities_stay_probabilities(raw: list[float], data: st.DataObject) -> None:
    start = np.array(raw) / sum(raw)
    labelled = np.array(
        data.draw(st.lists(st.integers(0, len(raw) - 1), unique=True)), dtype=np.int64
    )
    selected = np.array([data.draw(st.integers(1, 9)) for _ in raw])
    times = np.array([data.draw(st.integers(1, int(most))) for most in selected])
    after = fedpns_lowered(start, labelled, times, selected)
    assert after.sum() == pytest.approx(1.0)
    assert (after >= 0).all()
    others = np.setdiff1d(np.arange(len(raw)), labelled)
    if len(others):
        gains = after[others] - start[others]
        assert gains == pytest.approx(np.full(len(others), gains[0]), abs=1e-12)
        # What is lost lies in [beta^alpha, 1] of what was there.
        assert (after[labelled] <= 0.51 * start[labelled] + 1e-12).all()


def test_1_19_drawing_follows_the_probabilities() -> None:
    chance, draws = np.array([0.5, 0.3, 0.2]), 40_000
    u = np.random.default_rng(3).uniform(size=(draws, 3))
    found = [tuple(weighted_draw(chance, 2, row).tolist()) for row in u]
    for pair in permutations(range(3), 2):
        expected = chance[pair[0]] * chance[pair[1]] / (1 - chance[pair[0]])
        spread = np.sqrt(expected * (1 - expected) / draws)
        assert found.count(pair) / draws == pytest.approx(expected, abs=5 * spread)


def test_1_19_drawing_when_too_few_have_a_chance() -> None:
    chance, draws = np.array([0.0, 0.4, 0.0, 0.6, 0.0]), 6000
    u = np.random.default_rng(4).uniform(size=(draws, 5))
    found = [frozenset(weighted_draw(chance, 4, row).tolist()) for row in u]
    assert all({1, 3} <= cohort for cohort in found)
    for pair in combinations((0, 2, 4), 2):
        share = found.count(frozenset({1, 3, *pair})) / draws
        assert share == pytest.approx(1 / 3, abs=5 * np.sqrt(2 / 9 / draws))
    assert len(weighted_draw(chance, 9, u[0])) == 5
    assert weighted_draw(chance, 0, u[0]).tolist() == []


# --- BN2 --------------------------------------------------------------------------------------


def test_1_20_bn2_example() -> None:
    assert bn2_largest(np.array([0.5, 2.0, 1.0, 3.0, 0.1]), 2).tolist() == [3, 1]


def test_1_20_ties_go_by_index_and_nan_comes_last() -> None:
    norms = np.array([np.nan, 1.0, 2.0, 2.0, 1.0, np.inf])
    assert bn2_largest(norms, 6).tolist() == [5, 2, 3, 1, 4, 0]
    assert bn2_largest(norms, 3).tolist() == [5, 2, 3]
