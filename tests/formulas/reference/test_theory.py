"""Indices, bounds and conditions of the papers' theory, with the numbers of the specification."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyfleet.formulas.anycost import anycost_contraction, anycost_divergence, anycost_gain
from anyfleet.formulas.contribution import (
    fedadp_angles,
    fedadp_dissimilarity,
    fedadp_expected_decrease,
    fedadp_weights,
    fedpns_label_distance,
    selection_entropy,
)
from anyfleet.formulas.fedpmt import fedpmt_psi
from anyfleet.formulas.reference.theory import (
    FedpmtConstants,
    anycost_contraction_bound,
    anycost_global_gain,
    anycost_largest_gradient_ratio,
    fedadp_decrease_is_proved,
    fedadp_mean_divergence,
    fedpmt_bound,
    fedpmt_noise,
    fedpmt_psi_layer,
    fedpns_gradient_bound,
    whale_fewest_trainers,
    whale_omega_squared,
    whale_regions_trained,
    whale_step_size_cap,
)

CASE = FedpmtConstants(
    smoothness=2.0,
    convexity=0.5,
    epsilon=4.0,
    offset=3.0,
    start=7.0,
    steps=3,
    gradient=0.5,
    heterogeneity=0.1,
    variance=0.25,
    widths=2,
    devices=10,
)


# --- FedPMT -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shares", "value"),
    [
        ([0.5, 0.5], 3.0),
        ([1 / 3] * 3, 5.5),
        ([0.25] * 4, 8.333333),
        ([0.2] * 5, 11.416667),
        ([0.0, 0.0, 0.0, 1.0], 4.0),
        ([1.0], 1.0),
        ([0.5, 0.5, 0.0], math.inf),
    ],
)
def test_f_1_psi(shares: list[float], value: float) -> None:
    assert fedpmt_psi(np.array(shares)) == pytest.approx(value, abs=1e-6)


def test_f_1_psi_layer() -> None:
    variance = np.array([0.5, 0.3, 0.2])
    assert fedpmt_psi_layer(variance, np.ones(3)) == pytest.approx(1.0)
    assert fedpmt_psi_layer(variance, np.array([0.25, 0.5, 1.0])) == pytest.approx(2.8)
    assert fedpmt_psi_layer(variance, np.array([0.0, 0.5, 1.0])) == math.inf
    # A layer without variance may rest.
    assert fedpmt_psi_layer(np.array([0.0, 1.0]), np.array([0.0, 0.5])) == pytest.approx(2.0)


def test_f_1_the_bound_written_out() -> None:
    # 8·2²·0.5² = 8; 2·2·(2·3 + 10 + 4)·0.1 = 8; 2·0.25·3 = 1.5
    assert fedpmt_noise(CASE, 3.0) == pytest.approx(17.5)
    # (2/2)·(4·7 + 4·17.5/(0.5·4)²) / (17 + 3)
    assert fedpmt_bound(CASE, 3.0, 17) == pytest.approx(45.5 / 20)
    assert fedpmt_bound(CASE, math.inf, 17) == math.inf
    still = replace(CASE, heterogeneity=0.0)
    assert fedpmt_noise(still, math.inf) == math.inf


@given(st.lists(st.floats(0.01, 1), min_size=2, max_size=6))
def test_f_1_training_less_never_improves_the_index(raw: list[float]) -> None:
    shares = np.array(raw) / sum(raw)
    assert fedpmt_psi(shares) >= len(raw) - 1e-9
    less = shares.copy()
    less[0] += less[-1] / 2
    less[-1] /= 2
    assert fedpmt_psi(less) > fedpmt_psi(shares)


# --- WHALE-FL ---------------------------------------------------------------------------------


def test_f_2_fewest_trainers() -> None:
    trained = np.zeros((2, 3, 4), dtype=np.bool_)
    assert whale_fewest_trainers(trained) == 0
    trained[0, :, :2] = True
    trained[1, :2, 1:3] = True
    assert whale_fewest_trainers(trained) == 2
    assert whale_regions_trained(trained).tolist() == [2, 2]
    trained[1, 0, 3] = True
    assert whale_fewest_trainers(trained) == 1
    assert whale_regions_trained(trained).tolist() == [2, 3]


def test_f_2_step_size_cap() -> None:
    assert whale_step_size_cap(20, 4, 10, 1.0) == pytest.approx(0.0027951, abs=5e-8)
    # Of the three limits the second is the tightest wherever devices are only devices.
    assert whale_step_size_cap(1, 1, 1, 1.0) == pytest.approx(1 / 16)
    assert whale_step_size_cap(10**6, 1, 1, 1.0) == pytest.approx(0.001 / 16)
    assert whale_step_size_cap(20, 0, 1, 1.0) == 0
    assert whale_step_size_cap(1, 100, 1, 1.0) == pytest.approx(1 / 12)
    assert whale_step_size_cap(20, 4, 10, 5.0) == pytest.approx(
        whale_step_size_cap(20, 4, 10, 1.0) / 5
    )


def test_f_2_omega_squared() -> None:
    theta = np.array([[3.0, 4.0], [0.0, 5.0]])
    masks = np.array([[[1, 1], [1, 1]], [[1, 0], [1, 1]], [[0, 0], [1, 1]]], dtype=np.bool_)
    assert whale_omega_squared(theta, masks[:1]) == 0
    assert whale_omega_squared(theta, masks[:2]) == pytest.approx(16 / 50)
    assert whale_omega_squared(theta, masks) == pytest.approx(25 / 50)
    assert whale_omega_squared(np.zeros((2, 2)), masks) == 0
    assert whale_omega_squared(theta, masks[:0]) == 0


# --- AnycostFL --------------------------------------------------------------------------------


def test_f_3_gains() -> None:
    assert anycost_gain(1.0, 1 / 15) == pytest.approx(0.0667, abs=5e-5)
    assert anycost_global_gain(np.array([1, 0.5, 0.25]), 1 / 15) == pytest.approx(0.0237, abs=5e-5)
    assert anycost_global_gain(np.zeros(0), 1 / 15) == 0


@pytest.mark.parametrize(("gain", "ratio"), [(1 / 15, 1.071), (0.0237, 1.024)])
def test_f_3_where_the_contraction_ends(gain: float, ratio: float) -> None:
    limit = anycost_largest_gradient_ratio(gain)
    assert limit == pytest.approx(ratio, abs=5e-4)
    at = anycost_contraction(gain, convexity=0.5, smoothness=2.0, ratio=limit)
    assert at == pytest.approx(1.0)
    assert anycost_contraction(gain, convexity=0.5, smoothness=2.0, ratio=0.9 * limit) < 1
    assert anycost_largest_gradient_ratio(1.0) == math.inf


def test_f_3_the_bound_shrinks_by_the_contraction() -> None:
    z = anycost_contraction(0.2, convexity=0.5, smoothness=2.0, ratio=0.5)
    assert z == pytest.approx(1 - 0.25 * 0.6)
    assert anycost_contraction_bound(z, 1) == 1
    assert anycost_contraction_bound(z, 4) == pytest.approx(z**3)


def test_f_3_divergence_index() -> None:
    assert anycost_divergence(1.0, 1.0) == 0
    assert anycost_divergence(0.5, 0.25) == pytest.approx((1 - 0.75 / 2) ** 2)
    # On the paper's box the bracket is never below 0.7418.
    alpha = np.linspace(0.25, 1, 50)
    assert np.sqrt(anycost_divergence(alpha, 1 / 15)).min() == pytest.approx(0.7418, abs=5e-5)


# --- FedAdp -----------------------------------------------------------------------------------


@given(st.integers(0, 2**31))
def test_f_4_instantaneous_angles_never_decrease_less_than_fedavg(seed: int) -> None:
    draw = np.random.default_rng(seed)
    vectors, sizes = draw.normal(size=(5, 3)) + 0.5, draw.uniform(1, 9, 5)
    mean = sizes @ vectors / sizes.sum()
    lengths = np.linalg.norm(vectors, axis=1)
    found = fedadp_angles(vectors @ mean, lengths, float(np.linalg.norm(mean)))
    ours = fedadp_expected_decrease(fedadp_weights(sizes, found), found)
    assert ours >= fedadp_expected_decrease(sizes / sizes.sum(), found) - 1e-12


def test_f_4_expected_decrease() -> None:
    value = fedadp_expected_decrease(np.array([0.25, 0.75]), np.array([0.0, np.pi / 3]))
    assert value == pytest.approx(0.625)


def test_f_4_when_the_bound_holds() -> None:
    found = np.array([0.0, np.pi / 3])  # cosines 1 and a half
    assert fedadp_decrease_is_proved(found, dissimilarity=2.0, smoothness=1.0, lr=0.4)
    assert not fedadp_decrease_is_proved(found, dissimilarity=2.0, smoothness=1.0, lr=0.6)


def test_f_4_divergence_and_dissimilarity() -> None:
    rows = np.array([[3.0, 4.0], [0.0, 0.0]])
    assert fedadp_mean_divergence(rows, rows.mean(axis=0)) == pytest.approx(2.5)
    assert fedadp_mean_divergence(rows[:0], np.zeros(2)) == 0
    assert fedadp_dissimilarity(np.array([5.0, 0.0]), 2.5) == (0.0, 2.0)
    assert fedadp_dissimilarity(np.array([5.0, 5.0]), 0.0) == (math.inf, math.inf)
    assert all(math.isnan(bound) for bound in fedadp_dissimilarity(np.zeros(0), 1.0))


# --- FedPNS -----------------------------------------------------------------------------------


def test_f_5_label_distance() -> None:
    everybody = np.array([0.25, 0.25, 0.25, 0.25])
    own = np.array([[0.25] * 4, [1.0, 0, 0, 0], [0.5, 0.5, 0, 0]])
    assert fedpns_label_distance(own, everybody) == pytest.approx([0.0, 1.5, 1.0])
    assert fedpns_label_distance(np.array([1.0, 0.0]), np.array([0.0, 1.0])) == 2.0


def test_f_5_gradient_bound_and_entropy() -> None:
    bounds = np.array([1.0, 5.0])
    assert fedpns_gradient_bound(np.array([0.75, 0.25]), bounds) == 2.0
    assert fedpns_gradient_bound(np.array([0.5, 0.5]), bounds) == bounds.mean()
    assert selection_entropy(np.full(8, 1 / 8)) == pytest.approx(math.log(8))
    assert selection_entropy(np.array([0.0, 1.0])) == 0
    assert selection_entropy(np.array([0.5, 0.0, 0.25, 0.25])) == pytest.approx(1.5 * math.log(2))
