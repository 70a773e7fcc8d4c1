"""Codecs and weights by error, with the numbers of the specification."""

import math
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anyfleet.arrays import Floats
from anyfleet.formulas.fedhq import fedhq_weights
from anyfleet.formulas.reference.compression import (
    SCALAR_BITS,
    QsgdMessage,
    fedhq_quantisation_levels,
    qsgd,
    qsgd_error_bound,
    qsgd_values,
    qsgd_variance,
    relative_error,
    stc_bits,
    stc_expected_bits,
    stc_golomb_parameter,
    stc_golomb_position_bits,
    stc_position_entropy,
    stc_rice_bits,
    stc_sparse_ternary,
    stc_top_entries,
    uveq,
    uveq_dither,
    uveq_lattice,
    uveq_lattice_indices,
    uveq_scale,
    uveq_values,
    uveq_variance,
)

V = np.array([0.1, -0.9, 0.5, 0.05, -0.3])


# --- sparse ternary ---------------------------------------------------------------------------


def test_1_13_stc_example() -> None:
    found = stc_sparse_ternary(V, 2 / 5)
    assert found.magnitude == pytest.approx(0.7)
    assert found.sent == pytest.approx([0, -0.7, 0.7, 0, 0])
    assert found.residual == pytest.approx([0.1, -0.2, -0.2, 0.05, -0.3])


def test_1_13_ties_zeros_and_few() -> None:
    assert stc_top_entries(np.array([1.0, -1.0, 1.0]), 0.5).tolist() == [0, 1]
    assert stc_top_entries(V, 1e-9).tolist() == [1]
    assert stc_top_entries(np.ones(100), 0.07).tolist() == list(range(7))
    nothing = stc_sparse_ternary(np.zeros(4), 0.5)
    assert nothing.magnitude == 0
    assert nothing.sent.tolist() == [0] * 4
    some = stc_sparse_ternary(np.array([2.0, 0.0]), 1.0)
    assert some.sent.tolist() == [1.0, 0.0]  # the sign of 0 is 0
    assert len(stc_sparse_ternary(np.zeros(0), 0.5).sent) == 0


@pytest.mark.parametrize(
    ("share", "parameter", "bits", "rate"),
    [(0.01, 6, 8.10791019, 0.00285), (0.05, 4, 5.78611829, 0.0106), (0.1, 3, 4.75582516, 0.0180)],
)
def test_1_13_golomb_example(share: float, parameter: int, bits: float, rate: float) -> None:
    assert stc_golomb_parameter(share) == parameter
    assert stc_golomb_position_bits(share) == pytest.approx(bits)
    total = stc_expected_bits(round(share * 10**7), share) / (32 * 10**7)
    assert total == pytest.approx(rate, abs=6e-5)


def test_1_13_golomb_at_the_ends() -> None:
    assert stc_position_entropy(0.01) == pytest.approx(8.079, abs=5e-4)
    assert (
        stc_golomb_parameter(1.0),
        stc_golomb_position_bits(1.0),
        stc_position_entropy(1.0),
    ) == (0, 1, 0)
    assert stc_golomb_parameter(0.9) == 0


@given(st.floats(1e-4, 0.99))
def test_1_13_no_code_beats_the_entropy(share: float) -> None:
    least = stc_position_entropy(share)
    assert stc_golomb_position_bits(share) >= least - 1e-9
    # Neither neighbour among the parameters would be better.
    best = stc_golomb_parameter(share)
    for other in (max(0, best - 1), best + 1):
        bits = other + 1 / (1 - (1 - share) ** (2**other))
        assert stc_golomb_position_bits(share) <= bits + 1e-9


def test_1_13_measured_bits() -> None:
    assert stc_rice_bits(np.array([1, 2, 5]), 1) == 2 + 2 + 4
    assert stc_rice_bits(np.array([1, 4]), 0) == 1 + 4
    # Share .1 of 100: gaps 1, 9 and 90 take 4, 5 and 15 bits.
    assert stc_golomb_parameter(0.1) == 3
    assert stc_bits(np.array([0, 9, 99]), 100, 0.1) == 4 + 5 + 15 + 3 + SCALAR_BITS
    # Where gaps take more than a bit per place: a bitmap.
    assert stc_bits(np.arange(50), 50, 0.1) == 50 + 50 + SCALAR_BITS
    assert stc_bits(np.arange(50), 50, 1.0) == 50 + 50 + SCALAR_BITS
    assert stc_bits(np.array([0, 19]), 20, 1.0) == 20 + 2 + SCALAR_BITS
    assert stc_bits(np.zeros(0, dtype=np.int64), 50, 0.1) == SCALAR_BITS


def test_1_13_measured_bits_follow_the_expectation() -> None:
    positions = np.flatnonzero(np.random.default_rng(0).uniform(size=200_000) < 0.05)
    expected = stc_expected_bits(len(positions), 0.05)
    assert stc_bits(positions, 200_000, 0.05) == pytest.approx(expected, rel=0.02)


# --- stochastic levels ------------------------------------------------------------------------


def test_1_14_qsgd_example() -> None:
    v = np.array([3.0, -4.0])
    low = qsgd(v, 4, np.array([0.41, 0.21]))
    assert low.levels.tolist() == [2, -3]
    assert qsgd_values(low, 4) == pytest.approx([2.5, -3.75])
    high = qsgd(v, 4, np.array([0.39, 0.19]))
    assert high.levels.tolist() == [3, -4]
    assert qsgd_values(high, 4) == pytest.approx([3.75, -5.0])
    mean = 0.6 * 2.5 + 0.4 * 3.75, 0.8 * -3.75 + 0.2 * -5.0
    assert mean == pytest.approx((3.0, -4.0))
    assert qsgd_variance(v, 4) == pytest.approx(0.625)
    assert 25 * float(qsgd_error_bound(2, 4)) == pytest.approx(3.125)


def test_1_14_edges() -> None:
    assert qsgd(np.zeros(3), 4, np.zeros(3)).levels.tolist() == [0, 0, 0]
    assert qsgd_values(qsgd(np.zeros(3), 4, np.zeros(3)), 4).tolist() == [0, 0, 0]
    # An entry that is the whole norm, also where rounding makes it a little more.
    assert qsgd(np.array([0.0, -7.0]), 16, np.zeros(2)).levels.tolist() == [0, -16]
    assert qsgd(np.array([0.8132702392002724]), 3, np.zeros(1)).levels.tolist() == [3]
    empty = qsgd(np.zeros(0), 4, np.zeros(0))
    assert len(empty.norms) == len(qsgd_values(empty, 4)) == 0
    assert qsgd_variance(np.zeros(2), 4) == 0


def test_1_14_buckets_have_norms_of_their_own() -> None:
    v = np.array([3.0, 4.0, 6.0, 8.0, 2.0])
    message = qsgd(v, 10, np.full(5, 0.5), bucket=2)
    assert message.norms == pytest.approx([5.0, 10.0, 2.0])
    assert message.levels.tolist() == [6, 8, 6, 8, 10]
    assert qsgd_values(message, 10, bucket=2) == pytest.approx(v)
    whole = qsgd(v, 10, np.full(5, 0.5), bucket=None)
    assert whole.norms == pytest.approx([np.linalg.norm(v)])
    assert isinstance(whole, QsgdMessage)


@settings(max_examples=30)
@given(st.integers(0, 2**31), st.sampled_from([1, 2, 16]))
def test_1_14_levels_are_exact_in_the_mean(seed: int, levels: int) -> None:
    v = np.random.default_rng(seed).normal(size=5)
    u = (np.arange(250) + 0.5) / 250
    found = np.array([qsgd_values(qsgd(v, levels, np.full(5, each)), levels) for each in u])
    norm = float(np.linalg.norm(v))
    assert found.mean(axis=0) == pytest.approx(v, abs=norm / levels / 250)
    variance = ((found - v) ** 2).sum(axis=1).mean()
    assert variance == pytest.approx(qsgd_variance(v, levels), abs=5 * (norm / levels) ** 2 / 125)
    assert qsgd_variance(v, levels) <= float(qsgd_error_bound(5, levels)) * norm**2


# --- dithered lattices ------------------------------------------------------------------------


def test_1_15_uveq_example() -> None:
    basis, noise = uveq_lattice(0.5, 1), np.array([[0.1], [-0.2]])
    indices = uveq(np.array([0.6, -0.8]), 1.0, basis, noise)
    assert indices.tolist() == [[1], [-2]]
    assert uveq_values(indices, 1.0, basis, noise, 2) == pytest.approx([0.4, -0.8])


def test_1_15_scale_and_cells() -> None:
    assert uveq_scale(2.0, 5.0, 9) == pytest.approx(2.0)
    assert abs(np.linalg.det(uveq_lattice(0.5))) == pytest.approx(0.25 * 2 / math.sqrt(3))
    assert uveq_variance(3.0, uveq_lattice(0.5, 1)) == pytest.approx(9 * 0.25 / 12)
    cell = 0.25 * 2 / math.sqrt(3)
    assert uveq_variance(1.0, uveq_lattice(0.5)) == pytest.approx(0.0801875 * cell, rel=1e-5)


def around(basis: Floats, reach: int = 4) -> Floats:
    steps = np.arange(-reach, reach + 1)
    places = np.stack(np.meshgrid(*[steps] * len(basis), indexing="ij"), -1)
    points: Floats = places.reshape(-1, len(basis)) @ basis
    return points


@given(st.integers(0, 2**31))
def test_1_15_the_point_is_the_nearest_of_all(seed: int) -> None:
    points = np.random.default_rng(seed).uniform(-1, 1, size=(20, 2))
    basis = uveq_lattice(0.7)
    found = uveq_lattice_indices(points, basis) @ basis
    every = np.linalg.norm(around(basis)[:, np.newaxis] - points, axis=-1).min(axis=0)
    assert np.linalg.norm(found - points, axis=1) == pytest.approx(every)


@pytest.mark.parametrize("dimension", [1, 2])
def test_1_15_the_error_does_not_depend_on_the_update(dimension: Literal[1, 2]) -> None:
    count, basis, scale = 30_000, uveq_lattice(0.5, dimension), 2.0
    draw = np.random.default_rng(8)
    expected = uveq_variance(scale, basis)
    for v in (np.zeros(count), np.full(count, 0.37), draw.normal(size=count)):
        noise = uveq_dither(draw.uniform(size=(count // dimension, dimension)), basis)
        error = uveq_values(uveq(v, scale, basis, noise), scale, basis, noise, count) - v
        assert abs(error.mean()) < 5 * math.sqrt(expected / count)
        # The fourth moment of an even cell is below three times the square of the second.
        assert error.var() == pytest.approx(expected, abs=5 * expected * math.sqrt(2 / count))


def test_1_15_zeros_and_short_blocks() -> None:
    basis, noise = uveq_lattice(0.5), np.full((2, 2), 0.1)
    silent = uveq(np.zeros(3), 0.0, basis, noise)
    assert uveq_values(silent, 0.0, basis, noise, 3).tolist() == [0, 0, 0]
    short = uveq(np.array([0.5, 0.2, -0.4]), 1.0, basis, noise)
    padded = uveq(np.array([0.5, 0.2, -0.4, 0.0]), 1.0, basis, noise)
    assert short.tolist() == padded.tolist()
    assert len(uveq_values(short, 1.0, basis, noise, 3)) == 3


# --- weights by error -------------------------------------------------------------------------


def test_1_16_fedhq_example() -> None:
    errors = qsgd_error_bound(1000, np.array([2, 4, 16]))
    assert errors == pytest.approx([15.811, 7.906, 1.976], abs=1e-3)
    assert fedhq_weights(errors) == pytest.approx([0.117152, 0.221150, 0.661698], abs=1e-6)


def test_1_16_weights_at_the_ends() -> None:
    assert fedhq_weights(np.full(4, 3.0)) == pytest.approx(np.full(4, 0.25))
    assert fedhq_weights(np.zeros(2), np.array([1, 3])) == pytest.approx([0.25, 0.75])
    assert fedhq_weights(np.ones(2), np.zeros(2)).tolist() == [0, 0]


def test_1_16_levels_by_budget() -> None:
    levels, bits = 2 ** np.arange(9), np.linspace(100.0, 900.0, 9)
    assert fedhq_quantisation_levels(bits, 450.0, levels) == 8
    assert fedhq_quantisation_levels(bits, 1e9, levels) == 256
    assert fedhq_quantisation_levels(bits, 400.0, levels) == 8
    assert fedhq_quantisation_levels(bits, 50.0, levels) == 1


def test_f_7_relative_error() -> None:
    assert relative_error(np.array([3.0, 4.0]), np.array([3.0, 0.0])) == pytest.approx(0.64)
    assert relative_error(np.zeros(2), np.zeros(2)) == 0
