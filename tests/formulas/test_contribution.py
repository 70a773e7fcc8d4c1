"""Angles and subsets, with the numbers of the specification."""

from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyfleet.arrays import Floats, Ints
from anyfleet.formulas.contribution import (
    Statistic,
    Stopping,
    alignment_without_each,
    fedadp_angles,
    fedadp_contribution,
    fedadp_smoothed_angles,
    fedadp_weights,
    fewest_kept_updates,
    optimal_subset,
    update_alignment,
)

ADP = np.array([[1.0, 0.0], [1.0, 1.0], [-0.2, 1.0]])
PNS = np.array([[1.0, 0.0], [0.8, 0.2], [0.9, -0.1], [-1.0, 0.3]])
EVEN = np.ones(4)
STATISTICS: tuple[Statistic, ...] = ("sum", "mean")


def angles_of(vectors: Floats, sizes: Floats) -> Floats:
    mean = sizes @ vectors / sizes.sum()
    lengths = np.linalg.norm(vectors, axis=1)
    return fedadp_angles(vectors @ mean, lengths, float(np.linalg.norm(mean)))


def direct(vectors: Floats, weights: Floats, statistic: Statistic) -> float:
    mean = weights @ vectors / weights.sum()
    return float(mean @ mean) * (len(weights) if statistic == "sum" else 1)


# --- FedAdp -----------------------------------------------------------------------------------


def test_1_17_fedadp_example() -> None:
    found = angles_of(ADP, np.ones(3))
    assert found == pytest.approx([0.837981, 0.052583, 0.930211], abs=1e-6)
    assert fedadp_contribution(found) == pytest.approx([4.472012, 5.0, 3.788494], abs=1e-6)
    weights = fedadp_weights(np.ones(3), found)
    assert weights == pytest.approx([0.312465, 0.529790, 0.157744], abs=1e-6)
    later = fedadp_smoothed_angles(found, np.array([2, 2, 2]), np.array([0.3, 0.3, 1.5]))
    assert later == pytest.approx([0.568991, 0.176292, 1.215105], abs=1e-6)
    weights = fedadp_weights(np.ones(3), later)
    assert weights == pytest.approx([0.492731, 0.493172, 0.014097], abs=1e-6)


def test_1_17_sizes_weigh_in_the_direction_and_in_the_mean() -> None:
    sizes = np.array([100.0, 100.0, 200.0])
    found = angles_of(ADP, sizes)
    assert found == pytest.approx([1.080839, 0.295441, 0.687353], abs=1e-6)
    weights = fedadp_weights(sizes, found)
    assert weights == pytest.approx([0.025691, 0.333975, 0.640334], abs=1e-6)


def test_1_17_map_values() -> None:
    found = fedadp_contribution(np.array([0.0, 0.5, 1.0, np.pi / 2, np.pi]))
    assert found == pytest.approx([5.0, 4.99997, 3.16060, 0.27993, 0.00011], abs=6e-6)
    assert fedadp_contribution(np.array([0.0]), 1e4) == pytest.approx([1e4])
    assert fedadp_contribution(np.array([0.0, 2.0]), 1.0) == pytest.approx(
        1 - np.exp(-np.exp([1.0, -1.0]))
    )


def test_1_17_no_direction_is_neutral() -> None:
    found = fedadp_angles(np.array([0.0, 1.0]), np.array([0.0, 1.0]), 1.0)
    assert found == pytest.approx([np.pi / 2, 0.0])
    found = fedadp_angles(np.zeros(2), np.array([1.0, 2.0]), 0.0)
    assert found == pytest.approx([np.pi / 2] * 2)
    # Then everybody has the same angle, and the weights are FedAvg's.
    assert fedadp_weights(np.array([1, 3]), found) == pytest.approx([0.25, 0.75])


def test_1_17_angles_are_safe_at_the_ends() -> None:
    tiny = 1e-200
    found = fedadp_angles(np.array([1.0 + 1e-12, -1.0 - 1e-12]), np.ones(2), np.ones(2))
    assert found == pytest.approx([0.0, np.pi])
    # Lengths whose product is below the smallest number still have a direction.
    short = fedadp_angles(np.array([tiny * 1e-100]), np.array([tiny]), 1e-100)
    assert short == pytest.approx([0.0])


def test_1_17_one_device_and_no_data() -> None:
    assert fedadp_weights(np.array([7]), np.array([0.0])).tolist() == [1.0]
    assert fedadp_weights(np.zeros(2), np.array([0.0, 1.0])).tolist() == [0.0, 0.0]
    assert fedadp_weights(np.array([2, 0]), np.zeros(2)).tolist() == [1.0, 0.0]
    assert len(fedadp_weights(np.zeros(0), np.zeros(0))) == 0
    huge = fedadp_weights(np.ones(2), np.array([0.0, np.pi]), 2000.0)
    assert huge == pytest.approx([1.0, 0.0])


@given(st.lists(st.floats(0, np.pi), min_size=1, max_size=6))
def test_1_17_smoothing_is_the_mean_of_all_visits(history: list[float]) -> None:
    running = np.array([np.nan])  # what was there before the first visit does not matter
    for visit, angle in enumerate(history, start=1):
        running = fedadp_smoothed_angles(running, np.array([visit]), np.array([angle]))
    assert running == pytest.approx([np.mean(history)])


# --- Optimal Aggregation ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statistic", "now", "without", "now_then", "without_then"),
    [
        (
            "mean",
            0.190625,
            [0.072222, 0.094444, 0.098889, 0.811111],
            0.811111,
            [0.725, 0.905, 0.82],
        ),
        (
            "sum",
            0.7625,
            [0.216667, 0.283333, 0.296667, 2.433333],
            2.433333,
            [1.45, 1.81, 1.64],
        ),
    ],
)
def test_1_18_statistics_of_the_example(
    statistic: Statistic,
    now: float,
    without: list[float],
    now_then: float,
    without_then: list[float],
) -> None:
    gram = PNS @ PNS.T
    assert update_alignment(gram, EVEN, statistic) == pytest.approx(now, abs=1e-6)
    assert alignment_without_each(gram, EVEN, statistic) == pytest.approx(without, abs=1e-6)
    rest = gram[:3, :3]
    assert update_alignment(rest, EVEN[:3], statistic) == pytest.approx(now_then, abs=1e-6)
    assert alignment_without_each(rest, EVEN[:3], statistic) == pytest.approx(
        without_then, abs=1e-6
    )


def test_1_18_the_example_excludes_the_adverse_device() -> None:
    subset = optimal_subset(PNS @ PNS.T, EVEN, lambda rows, without: False, share=0.25)
    assert (subset.kept.tolist(), subset.labelled.tolist()) == ([0, 1, 2], [3])
    assert subset.excluded.tolist() == [3]
    literal = optimal_subset(
        PNS @ PNS.T, EVEN, lambda rows, without: False, share=0.5, statistic="mean"
    )
    assert literal.labelled.tolist() == [3, 1]


def test_1_18_a_removal_that_hurts_is_labelled_and_kept() -> None:
    asked: list[tuple[list[int], list[int]]] = []

    def worse(rows: Ints, without: Ints) -> bool:
        asked.append((rows.tolist(), without.tolist()))
        return True

    subset = optimal_subset(PNS @ PNS.T, EVEN, worse)
    assert asked == [([0, 1, 2, 3], [0, 1, 2])]
    assert subset.kept.tolist() == [0, 1, 2, 3]
    assert (subset.labelled.tolist(), subset.excluded.tolist()) == ([3], [])


@pytest.mark.parametrize(
    ("rule", "count", "left"),
    [
        ("share", 10, 7),
        ("thesis", 10, 6),
        ("code", 10, 8),
        ("share", 3, 3),
        ("share", 1, 1),
        ("thesis", 1, 1),
        ("code", 2, 1),
    ],
)
def test_1_18_how_many_must_remain(rule: Stopping, count: int, left: int) -> None:
    assert fewest_kept_updates(count, rule=rule) == left


def test_1_18_a_share_that_is_a_whole_number_is_not_rounded_up() -> None:
    assert fewest_kept_updates(100, 0.07) == 7  # the product is a little above 7


@pytest.mark.parametrize(("rule", "left"), [("share", 7), ("thesis", 6), ("code", 8)])
def test_1_18_the_loop_stops_at_the_fewest(rule: Stopping, left: int) -> None:
    vectors = np.ones((10, 1))
    vectors[5:] = -0.9
    subset = optimal_subset(vectors @ vectors.T, np.ones(10), lambda a, b: False, rule=rule)
    assert len(subset.kept) == left
    assert subset.excluded.tolist() == list(range(5, 15 - left))


@pytest.mark.parametrize("statistic", STATISTICS)
def test_1_18_nothing_to_gain(statistic: Statistic) -> None:
    for vectors in (np.zeros((4, 2)), np.full((4, 2), 0.1), np.full((1, 2), 3.0)):
        subset = optimal_subset(
            vectors @ vectors.T, np.ones(len(vectors)), lambda a, b: False, statistic=statistic
        )
        assert len(subset.kept) == len(vectors)
        assert len(subset.labelled) == 0


def nobody_hurts(rows: Ints, without: Ints) -> bool:
    return False


@pytest.mark.parametrize("statistic", STATISTICS)
def test_1_18_identical_updates_label_nobody_whatever_their_sizes(statistic: Statistic) -> None:
    """One device may have nearly all data: without it, hardly anything is left of the sums."""
    draw = np.random.default_rng(3)
    for _ in range(100):
        gram = np.full((5, 5), draw.uniform(0.1, 3))
        sizes = np.array([10, 100, 1, 100, 1e5])[draw.permutation(5)]
        subset = optimal_subset(gram, sizes, nobody_hurts, share=0.2, statistic=statistic)
        assert len(subset.labelled) == 0


def test_1_18_nearly_all_data_on_one_device_still_counts() -> None:
    vectors, sizes = np.array([[1.0], [1.0], [1 - 1e-6]]), np.array([1.0, 1.0, 1e5])
    subset = optimal_subset(vectors @ vectors.T, sizes, nobody_hurts, share=0.6, statistic="mean")
    assert subset.labelled.tolist() == [2]


@pytest.mark.parametrize("rule", get_args(Stopping))
def test_1_18_where_nobody_moves_nobody_is_labelled(rule: Stopping) -> None:
    for statistic in STATISTICS:
        subset = optimal_subset(
            np.zeros((6, 6)), np.ones(6), nobody_hurts, statistic=statistic, rule=rule
        )
        assert len(subset.kept) == 6
        assert len(subset.labelled) == 0


def test_1_18_of_identical_adverse_updates_the_first_is_taken() -> None:
    draw = np.random.default_rng(5)
    for _ in range(100):
        vectors, sizes = draw.normal(size=(7, 50)) + 1, draw.uniform(8, 9, 7)
        first, second = np.sort(draw.choice(7, 2, replace=False))
        vectors[second] = vectors[first] = -vectors.mean(axis=0)
        sizes[second] = sizes[first]
        gram = vectors @ vectors.T
        gram = (1 + 1e-15 * draw.normal(size=gram.shape)) * gram  # as another library rounds
        assert optimal_subset(gram, sizes, nobody_hurts).labelled[0] == first


def test_1_18_the_thesis_goes_on_with_ties() -> None:
    vectors = np.full((4, 2), 0.1)
    subset = optimal_subset(
        vectors @ vectors.T, EVEN, lambda a, b: False, statistic="mean", rule="thesis"
    )
    assert subset.kept.tolist() == [2, 3]


def test_1_18_an_update_that_is_not_finite_leaves_first() -> None:
    vectors = np.vstack([PNS, [np.nan, 0.0]])[[4, 0, 1, 2, 3]]
    subset = optimal_subset(vectors @ vectors.T, np.ones(5), lambda a, b: False)
    assert subset.kept.tolist() == [1, 2, 3]
    assert (subset.labelled.tolist(), subset.excluded.tolist()) == ([4], [0, 4])


def test_1_18_nobody_and_nobody_with_data() -> None:
    none = np.zeros((0, 0))
    assert update_alignment(none, np.zeros(0)) == 0
    assert len(alignment_without_each(none, np.zeros(0))) == 0
    assert update_alignment(np.ones((2, 2)), np.zeros(2)) == 0
    assert alignment_without_each(np.ones((2, 2)), np.array([0.0, 1.0])).tolist() == [1.0, 0.0]
    assert alignment_without_each(np.ones((1, 1)), np.ones(1)).tolist() == [0.0]


@given(st.integers(0, 2**31), st.integers(2, 7), st.sampled_from(STATISTICS))
def test_1_18_inner_products_say_what_the_vectors_say(
    seed: int, count: int, statistic: Statistic
) -> None:
    draw = np.random.default_rng(seed)
    vectors, weights = draw.normal(size=(count, 5)), draw.uniform(1, 9, count)
    gram = vectors @ vectors.T
    assert update_alignment(gram, weights, statistic) == pytest.approx(
        direct(vectors, weights, statistic)
    )
    without = [
        direct(np.delete(vectors, k, axis=0), np.delete(weights, k), statistic)
        for k in range(count)
    ]
    assert alignment_without_each(gram, weights, statistic) == pytest.approx(
        np.array(without), abs=1e-9
    )


@given(st.integers(0, 2**31))
def test_1_18_the_thesis_statistic_always_labels_someone(seed: int) -> None:
    vectors = np.random.default_rng(seed).normal(size=(6, 4)) + 1
    gram = vectors @ vectors.T
    assert alignment_without_each(gram, np.ones(6), "mean").max() > update_alignment(
        gram, np.ones(6), "mean"
    )


@given(st.integers(0, 2**31))
def test_1_18_each_exclusion_is_the_best_of_its_turn(seed: int) -> None:
    vectors = np.random.default_rng(seed).normal(size=(6, 3)) + 0.3
    subset = optimal_subset(vectors @ vectors.T, np.ones(6), lambda a, b: False, share=0.1)
    rows = list(range(6))
    for gone in subset.excluded:
        value = {
            k: direct(vectors[[r for r in rows if r != k]], np.ones(len(rows) - 1), "sum")
            for k in rows
        }
        assert value[int(gone)] == pytest.approx(max(value.values()))
        assert value[int(gone)] > direct(vectors[rows], np.ones(len(rows)), "sum")
        rows.remove(int(gone))
    assert subset.kept.tolist() == rows
