"""Sub-models and their means, with the numbers of the specification."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from anyfleet.arrays import Flags, Floats
from anyfleet.formulas.reference.averaging import (
    fedavg_cohort_size,
    fedavg_mean,
    fedpmt_computing_seconds,
    fedpmt_layer_mean,
    fedpmt_layer_product,
    fedpmt_layer_weights,
    fedpmt_quotas,
    fedprox_step,
    heterofl_static_moments,
    overlap_mean,
    pseudo_gradient,
)
from anyfleet.formulas.reference.masks import (
    feddrop_channels,
    fedpmt_layer_mask,
    fedrescue_column_mask,
    fedrescue_padded,
    heterofl_masked_logits,
    heterofl_width,
    prefix_mask,
)
from anyfleet.formulas.sub_models import fedrolex_window, kept_channels

G = np.arange(1.0, 10.0).reshape(3, 3)
WHOLE = np.ones((3, 3), dtype=np.bool_)


# --- overlap mean -----------------------------------------------------------------------------


def test_0_2_a_coordinate_that_nobody_has_keeps_its_value() -> None:
    masks = np.array([[True, False, False], [True, True, False]])
    values = np.array([[1.0, np.nan, np.nan], [4.0, 5.0, np.inf]])
    old = np.array([7.0, 8.0, 9.0])
    assert overlap_mean(old, values, masks, np.ones(2)).tolist() == [2.5, 5.0, 9.0]
    assert overlap_mean(old, values, masks, np.array([3, 1])).tolist() == [1.75, 5.0, 9.0]
    # Without data there is no weight, and a device without weight changes nothing.
    assert overlap_mean(old, values, masks, np.array([1, 0])).tolist() == [1.0, 8.0, 9.0]
    assert overlap_mean(old, values[:0], masks[:0], np.zeros(0)).tolist() == old.tolist()


@given(st.integers(0, 2**31))
def test_0_2_overlap_mean_is_the_mean_of_each_coordinate(seed: int) -> None:
    draw = np.random.default_rng(seed)
    values, masks = draw.normal(size=(4, 2, 3)), draw.uniform(size=(4, 2, 3)) < 0.5
    weights, old = draw.integers(0, 4, 4), draw.normal(size=(2, 3))
    found = overlap_mean(old, values, masks, weights)
    for place in np.ndindex(2, 3):
        have = [k for k in range(4) if masks[k][place] and weights[k]]
        expected = old[place]
        if have:
            expected = np.average([values[k][place] for k in have], weights=weights[have])
        assert found[place] == pytest.approx(expected)


def test_0_2_kept_channels() -> None:
    assert kept_channels(1 / 16, 8) == 1
    assert [kept_channels(share, 10) for share in (0.3, 0.31, 1.0, 1e-12)] == [3, 4, 10, 1]
    assert kept_channels(0.07, 100) == 7  # the product is a little above 7
    assert [kept_channels(0.5, size, "round") for size in (16, 32, 64)] == [8, 16, 32]
    assert kept_channels(0.24, 10, "round") == 2


def test_0_1_pseudo_gradients_undo_the_steps() -> None:
    assert pseudo_gradient(np.array([-0.2, 0.4]), 0.1, 2) == pytest.approx([1.0, -2.0])


# --- whole models -----------------------------------------------------------------------------


def test_1_1_fedavg_example() -> None:
    models = np.array([[1.0, 2.0], [3.0, 0.0], [5.0, 4.0]])
    found = fedavg_mean(np.zeros(2), models, np.array([10, 20, 30]))
    assert found == pytest.approx([3.666667, 2.333333], abs=1e-6)
    assert fedavg_mean(np.zeros(2), models[:1], np.array([7])).tolist() == [1.0, 2.0]
    assert fedavg_mean(np.ones(2), models, np.zeros(3)).tolist() == [1.0, 1.0]


def test_1_1_cohorts() -> None:
    assert [fedavg_cohort_size(100, share) for share in (0.1, 0.001, 1.0)] == [10, 1, 100]


def test_1_2_fedprox_example() -> None:
    weights, gradient = np.array([1.0, 2.0]), np.array([0.5, -0.5])
    found = fedprox_step(weights, np.zeros(2), gradient, lr=0.1, mu=0.1)
    assert found == pytest.approx([0.94, 2.03])
    plain = fedprox_step(weights, np.zeros(2), gradient, lr=0.1, mu=0.0)
    assert plain.tolist() == (weights - 0.1 * gradient).tolist()


# --- layers -----------------------------------------------------------------------------------


def test_1_3_fedpmt_example() -> None:
    masks = np.array([fedpmt_layer_mask(3, trained) for trained in (1, 2, 3)])
    assert fedpmt_layer_weights(masks) == pytest.approx(
        np.array([[0, 0, 1 / 3], [0, 1 / 2, 1 / 3], [1, 1 / 2, 1 / 3]])
    )
    old = [np.array([1.0, 1.0]), np.array([2.0]), np.array([3.0, 3.0])]
    losses = [(0.0, 0.0, 0.3), (0.0, 0.2, 0.1), (0.4, 0.6, 0.5)]
    found = fedpmt_layer_mean(old, losses, masks)
    assert np.concatenate(found) == pytest.approx([0.6, 0.6, 1.6, 2.7, 2.7])
    assert old[0].tolist() == [1.0, 1.0]


def test_1_3_a_layer_that_nobody_delivers_stays() -> None:
    masks = np.array([[0, 1], [0, 1]])
    assert fedpmt_layer_weights(masks).tolist() == [[0, 0.5], [0, 0.5]]
    found = fedpmt_layer_mean([np.ones(2), np.ones(1)], [(np.nan, 1.0), (np.nan, 0.0)], masks)
    assert [layer.tolist() for layer in found] == [[1.0, 1.0], [0.5]]


@given(st.integers(0, 2**31))
def test_1_3_the_layer_mean_is_an_overlap_mean(seed: int) -> None:
    draw = np.random.default_rng(seed)
    old, new = draw.normal(size=3), draw.normal(size=(4, 3))
    masks = np.array([fedpmt_layer_mask(3, trained) for trained in draw.integers(1, 4, 4)])
    by_layer = fedpmt_layer_mean([old[i : i + 1] for i in range(3)], (old - new).tolist(), masks)
    assert np.concatenate(by_layer) == pytest.approx(overlap_mean(old, new, masks, np.ones(4)))


def test_1_3_layer_product_example() -> None:
    found = fedpmt_layer_product(
        np.array([0, 1, 2]), [np.full(3, 2.0), np.ones(2), np.full(4, 3.0)]
    )
    assert [layer.tolist() for layer in found] == [[0, 0, 0], [1, 1], [6, 6, 6, 6]]


def test_1_3_quotas_go_round_from_the_largest_width() -> None:
    assert fedpmt_quotas(8, 4).tolist() == [2, 2, 2, 2]
    assert fedpmt_quotas(10, 4).tolist() == [2, 2, 3, 3]
    assert fedpmt_quotas(2, 5).tolist() == [0, 0, 0, 1, 1]


def test_1_3_seconds_of_the_deadline_example() -> None:
    """Ratios rounded up to two digits, 10 s for a whole model at full speed."""
    shares = np.array([0.46, 0.58, 0.88, 0.94, 1.0])
    levels = np.array([1 / 5, 1 / 4, 1 / 3, 1 / 2, 1])
    found = fedpmt_computing_seconds(10 * shares, 1, 1, levels)
    assert found == pytest.approx([23.0, 23.2, 26.4, 18.8, 10.0])
    assert fedpmt_computing_seconds(2.0, 300, 2, 100.0) == 12.0


# --- channels ---------------------------------------------------------------------------------


def overlap_of(mask: Flags) -> Floats:
    masks = np.array([WHOLE, mask])
    return overlap_mean(G, np.array([G + 1, G - 1]), masks, np.ones(2))


def test_1_4_feddrop_example() -> None:
    kept = np.zeros((3, 3), dtype=np.bool_)
    kept[np.ix_([0, 2], [0, 2])] = True
    assert overlap_of(kept).tolist() == [[1, 3, 3], [5, 6, 7], [7, 9, 9]]


def test_1_4_random_channels_are_even() -> None:
    u = np.random.default_rng(2).uniform(size=(6000, 4))
    found = [tuple(feddrop_channels(4, 2, row).tolist()) for row in u]
    assert set(found) == {(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)}
    for pair in set(found):
        assert found.count(pair) / 6000 == pytest.approx(1 / 6, abs=5 * np.sqrt(5 / 36 / 6000))
    assert feddrop_channels(4, 4, u[0]).tolist() == [0, 1, 2, 3]


def test_1_5_heterofl_example() -> None:
    assert overlap_of(prefix_mask((3, 3), (2, 2))).tolist() == [[1, 2, 4], [4, 5, 7], [8, 9, 10]]


def test_1_5_shares_of_the_levels() -> None:
    assert heterofl_width(np.arange(1, 6)).tolist() == [1, 1 / 2, 1 / 4, 1 / 8, 1 / 16]
    parameters = heterofl_width(np.arange(1, 6)) ** 2
    assert parameters.tolist() == [1, 1 / 4, 1 / 16, 1 / 64, 1 / 256]


def test_1_5_new_coordinates_are_an_l() -> None:
    new = prefix_mask((3, 3), (2, 2)) & ~prefix_mask((3, 3), (1, 1))
    assert new.astype(int).tolist() == [[0, 1, 0], [1, 1, 0], [0, 0, 0]]


def test_1_5_absent_classes_stay_in_the_denominator() -> None:
    logits = heterofl_masked_logits(np.array([[3.0, -2.0, 5.0]]), np.array([True, True, False]))
    assert logits.tolist() == [[3.0, -2.0, 0.0]]


def test_1_5_static_statistics_are_plain_means_over_batches() -> None:
    found = heterofl_static_moments([np.array([[0.0], [2.0]]), np.array([[3.0], [3.0], [6.0]])])
    assert found.mean == pytest.approx([2.5])
    assert found.variance == pytest.approx([2.5])


def test_1_6_fedrolex_example() -> None:
    windows = [fedrolex_window(5, 3, turn).tolist() for turn in range(6)]
    assert windows == [[0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 0], [4, 0, 1], [0, 1, 2]]


def test_1_6_windows_of_everything_and_other_steps() -> None:
    assert fedrolex_window(5, 5, 3).tolist() == [0, 1, 2, 3, 4]
    assert fedrolex_window(5, 2, 2, step=3).tolist() == [1, 2]


def test_1_6_every_channel_is_trained_equally_often() -> None:
    trained = np.concatenate([fedrolex_window(7, 3, turn) for turn in range(7)])
    assert np.bincount(trained).tolist() == [3] * 7


# --- columns ----------------------------------------------------------------------------------


def test_1_8_example() -> None:
    masks = np.array([fedrescue_column_mask(width, 4) for width in (0.5, 0.75, 1.0)])
    values = np.array([[1.0] * 4, [2.0] * 4, [4.0] * 4])
    found = overlap_mean(np.full(4, 9.0), values, masks, np.ones(3))
    assert found == pytest.approx([7 / 3, 7 / 3, 3.0, 4.0])


def test_1_8_grids_that_do_not_match() -> None:
    assert fedrescue_column_mask(0.35, 20).sum() == 7
    assert fedrescue_column_mask(0.0, 4).sum() == 0
    assert fedrescue_column_mask(0.375, 20).sum() == 8


@given(st.floats(0.001, 1), st.integers(1, 40))
@example(0.6, 4)
def test_1_8_columns_are_rounded_as_slices_are(width: float, columns: int) -> None:
    kept = kept_channels(width, columns)
    assert fedrescue_column_mask(width, columns).tolist() == [True] * kept + [False] * (
        columns - kept
    )


def test_1_8_padding() -> None:
    server, own = np.full(4, 1.0), np.full(4, 2.0)
    assert fedrescue_padded(server, own, fedrescue_column_mask(0.5, 4)).tolist() == [1, 1, 2, 2]
    assert fedrescue_padded(server, own, fedrescue_column_mask(0.0, 4)).tolist() == [2, 2, 2, 2]
