"""AnycostFL's shrinking, compressing and aggregating, with the numbers of the specification."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyfleet.arrays import Ints
from anyfleet.formulas.anycost import anycost_channel_norms, anycost_channel_order, anycost_weights
from anyfleet.formulas.reference.averaging import anycost_mean
from anyfleet.formulas.reference.compression import (
    HEADER_BITS,
    AnycostMagnitudes,
    anycost_analytic_compression,
    anycost_bits,
    anycost_grid,
    anycost_grid_levels,
    anycost_grid_values,
    anycost_kept_kernels,
    anycost_kernel_threshold,
    anycost_magnitudes,
    entropy_bits,
)
from anyfleet.formulas.reference.masks import anycost_channel_count, anycost_channels

U = np.array([0.1, -0.5, 0.25])


def test_1_12_order_of_the_example() -> None:
    norms = anycost_channel_norms([np.array([[1.0, 0.0], [3.0, 4.0], [0.0, 2.0]])])
    assert norms == pytest.approx([1.0, 5.0, 2.0])
    assert anycost_channel_order(norms).tolist() == [1, 2, 0]
    assert anycost_channels(norms, 4 / 9).tolist() == [1, 2]
    assert anycost_channels(norms, 1.0).tolist() == [0, 1, 2]


def test_1_12_widths_and_ties() -> None:
    assert [anycost_channel_count(1 / 4, size) for size in (16, 32, 64)] == [8, 16, 32]
    assert anycost_channel_count(1e-6, 16) == 1
    assert anycost_channel_order(np.array([1.0, 2.0, 1.0, 2.0])).tolist() == [1, 3, 0, 2]


def test_1_12_a_group_adds_its_producers() -> None:
    kernels = np.array([[[3.0]], [[0.0]]])
    norms = anycost_channel_norms([kernels, np.array([[4.0, 0.0], [1.0, 0.0]])])
    assert norms == pytest.approx([5.0, 1.0])


def test_1_12_kernels_of_the_example() -> None:
    norms = np.array([3.0, 1.0, 2.0, 0.5])
    assert anycost_kernel_threshold(norms, 0.5) == 2
    assert anycost_kept_kernels(norms, 0.5).tolist() == [0, 2]
    assert anycost_kept_kernels(norms, 0.01).tolist() == [0]
    assert anycost_kept_kernels(np.ones(4), 0.5).tolist() == [0, 1]


def test_1_12_grid_of_the_example() -> None:
    ends = anycost_magnitudes(U)
    assert ends == (0.1, 0.5)
    assert anycost_grid(ends, 2) == pytest.approx([0.1, 0.3, 0.5])
    low = anycost_grid_levels(U, ends, 2, np.array([0.9, 0.9, 0.75]))
    assert low.tolist() == [0, 2, 0]  # .25 goes down with probability .25: from u = .75 on
    high = anycost_grid_levels(U, ends, 2, np.array([0.0, 0.0, 0.7499]))
    assert high.tolist() == [0, 2, 1]
    assert anycost_grid_values(high, U, ends, 2) == pytest.approx([0.1, -0.5, 0.3])


@given(st.integers(0, 2**31), st.sampled_from([1, 2, 5]))
def test_1_12_the_grid_is_exact_in_the_mean(seed: int, levels: int) -> None:
    """The mean over all uniforms, by the midpoint rule: exact up to a step of it."""
    values = np.random.default_rng(seed).normal(size=4)
    ends = anycost_magnitudes(values)
    u = (np.arange(1000)[:, np.newaxis] + 0.5) / 1000
    decoded = anycost_grid_values(
        anycost_grid_levels(values, ends, levels, u), values, ends, levels
    )
    assert np.mean(decoded, axis=0) == pytest.approx(values, abs=(ends.high - ends.low) / 1000)


def test_1_12_messages_with_little_to_say() -> None:
    u = np.full(3, 0.5)
    nothing = anycost_magnitudes(np.zeros(3))
    assert nothing == (0.0, 0.0)
    assert anycost_grid_levels(np.zeros(3), nothing, 4, u).tolist() == [-1, -1, -1]
    one = np.array([0.0, -2.0, 2.0])
    assert anycost_grid_levels(one, anycost_magnitudes(one), 4, u).tolist() == [-1, 0, 0]
    assert anycost_grid_values(
        np.array([-1, 0, 0]), one, AnycostMagnitudes(2.0, 2.0), 4
    ).tolist() == [0, -2, 2]
    # Fewer than one level are one.
    assert anycost_grid(anycost_magnitudes(U), 0) == pytest.approx([0.1, 0.5])
    assert anycost_grid_levels(U, anycost_magnitudes(U), 0, u).tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("beta", "keep", "bits", "levels"), [(1 / 15, 0.258, 8.26, 307), (1 / 40, 0.158, 5.06, 33)]
)
def test_1_12_analytic_rates(beta: float, keep: float, bits: float, levels: float) -> None:
    found = anycost_analytic_compression(beta)
    assert found.keep == pytest.approx(keep, abs=5e-4)
    assert np.log2(found.levels) == pytest.approx(bits, abs=5e-3)
    assert found.levels == pytest.approx(levels, abs=1)


def test_1_12_bits_of_a_message() -> None:
    kept = np.array([True, True, False, False])
    # Mask 4 × 1 bit; levels 0 1 1 and one zero: 4 × 1.5 bits; three signs.
    assert anycost_bits(kept, np.array([0, 1, 1, -1])) == pytest.approx(96 + 4 + 6 + 3)
    assert anycost_bits(kept, np.array([-1, -1])) == HEADER_BITS


@pytest.mark.parametrize(
    ("symbols", "bits"), [([], 0.0), ([3, 3, 3], 0.0), ([0, 1], 2.0), ([0, 0, 1, 2], 6.0)]
)
def test_f_7_entropy_of_symbols(symbols: list[int], bits: float) -> None:
    found: Ints = np.array(symbols, dtype=np.int64)
    assert entropy_bits(found) == pytest.approx(bits)


def test_1_12_all_in_one_example() -> None:
    masks = np.array([[1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 0]], dtype=np.bool_)
    updates = np.array([[1, 2, np.nan, 9], [3, 9, 4, 9], [5, 6, 9, 9.0]])
    found = anycost_mean(updates, masks, np.array([0.5, 0.3, 0.2]))
    assert found == pytest.approx([2.4, 3.142857, 4.0, 0.0], abs=1e-6)


def test_1_12_weights_of_the_example() -> None:
    found = anycost_weights(np.array([1, 0.5, 0.25]), 1 / 15)
    assert found == pytest.approx([0.392827, 0.332452, 0.274721], abs=1e-6)


def test_1_12_weights_at_the_ends() -> None:
    found = anycost_weights(np.array([1.0, 1.0]), np.array([1.0, 0.25]))
    assert found == pytest.approx(np.array([1e6, 4.0]) / (1e6 + 4))
    sized = anycost_weights(np.array([1.0, 1.0]), 0.1, np.array([1, 3]))
    assert sized == pytest.approx([0.25, 0.75])
    assert anycost_weights(np.ones(2), 0.1, np.zeros(2)).tolist() == [0.0, 0.0]
