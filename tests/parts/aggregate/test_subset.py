"""Aggregating those updates that go well together, with the numbers of the specification."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from anyfleet.core.messages import Params
from anyfleet.core.slots import Aggregate
from anyfleet.parts.aggregate import AngleWeighted, Mean, ServerOptimised, ServerSgd, Subset
from tests.core.test_updates import MATRIX, rows_and_columns, updates_of
from tests.helpers.vectors import ADP, PLACE, PNS, ZERO, Seen, at, step, vectors


def rising(place: Tensor) -> float:
    """A loss that falls as the first number grows: without the fourth device it does."""
    return -float(place[0])


def falling(place: Tensor) -> float:
    return float(place[0])


def test_1_18_optimal_aggregation_example_with_the_sum() -> None:
    seen = Seen(rising)
    stepped = step(Subset(), vectors(PNS), seen=seen)
    assert stepped.diagnostics["labelled"] == stepped.diagnostics["excluded"] == (3,)
    assert stepped.diagnostics["labelled_count"] == stepped.diagnostics["excluded_count"] == 1
    assert stepped.diagnostics["alignment"] == pytest.approx(0.7625)
    assert stepped.diagnostics["alignment_after"] == pytest.approx(2.433333, abs=1e-6)
    assert stepped.model[PLACE].tolist() == pytest.approx([0.9, 0.1 / 3])
    both, without = (place for _, place in seen.asked)
    assert both == pytest.approx((0.425, 0.1))
    assert without == pytest.approx((0.9, 0.1 / 3))


def test_1_18_optimal_aggregation_example_with_the_mean() -> None:
    seen = Seen(rising)
    stepped = step(Subset(share=0.4, statistic="mean"), vectors(PNS), seen=seen)
    assert stepped.diagnostics["alignment"] == pytest.approx(0.190625)
    assert stepped.diagnostics["labelled"][:2] == (3, 1)
    kept = step(Subset(share=0.4), vectors(PNS), seen=Seen(rising))
    assert kept.diagnostics["labelled"] == (3,)  # the sum stops where the mean goes on


def test_1_18_a_removal_that_hurts_is_labelled_and_undone() -> None:
    stepped = step(Subset(), vectors(PNS), seen=Seen(falling))
    assert stepped.diagnostics["labelled"] == (3,)
    assert stepped.diagnostics["excluded"] == ()
    assert torch.equal(stepped.model[PLACE], step(Mean(), vectors(PNS)).model[PLACE])
    equal = step(Subset(), vectors(PNS), seen=Seen(lambda place: 1.0))
    assert equal.diagnostics["excluded"] == (3,)  # only a loss that rises speaks for a device


def test_1_18_both_models_meet_the_same_batch_and_every_comparison_another() -> None:
    noise = np.random.default_rng(1)
    honest = (np.array([1.0, 0.0]) + 0.05 * noise.normal(size=(10, 2))).tolist()
    adverse = [(-1.0, 0.2), (-0.9, -0.3), (-1.2, 0.1)]
    seen = Seen()
    stepped = step(Subset(share=0.7), vectors([*honest, *adverse]), seen=seen)
    assert sorted(stepped.diagnostics["excluded"]) == [10, 11, 12]
    keys = [key for key, _ in seen.asked]
    assert keys[::2] == keys[1::2]
    assert len(set(keys)) == 3
    # A model that lost to nobody is the one that the next is compared with.
    assert seen.asked[1][1] == seen.asked[2][1]


def test_1_18_a_share_of_the_updates_remains() -> None:
    scattered = vectors(at(*np.linspace(0, 5, 10), lengths=np.linspace(0.1, 1, 10).tolist()))
    for left, fewest in (("share", 7), ("thesis", 6), ("code", 8)):
        part = Subset(statistic="mean", left=left)  # type: ignore[arg-type]
        assert step(part, scattered).diagnostics["excluded_count"] == 10 - fewest
    assert step(Subset(share=1.0), scattered).diagnostics["labelled"] == ()


@pytest.mark.parametrize("values", [[(1.0, 2.0)], [(0.0, 0.0)] * 4, [(1.0, 2.0)] * 5])
def test_1_18_nobody_is_judged_where_there_is_nothing_to_leave_out(
    values: list[tuple[float, float]],
) -> None:
    seen = Seen()
    stepped = step(Subset(), vectors(values), seen=seen)
    assert not seen.asked
    assert stepped.diagnostics["labelled"] == stepped.diagnostics["excluded"] == ()
    assert stepped.model[PLACE].tolist() == list(values[0])


def test_1_18_broken_updates_are_removed_before_and_not_labelled() -> None:
    broken = vectors([(math.nan, 0.0), *PNS, (math.inf, 1.0)])
    stepped = step(Subset(), broken, seen=Seen(rising))
    assert stepped.diagnostics["labelled"] == (4,)
    assert stepped.diagnostics["excluded"] == (0, 5, 4)
    clean = step(Subset(), vectors(PNS), seen=Seen(rising))
    assert torch.equal(stepped.model[PLACE], clean.model[PLACE])
    nobody = step(Subset(), vectors([(math.nan, 0.0)]))
    assert torch.equal(nobody.model[PLACE], ZERO[PLACE])
    assert nobody.diagnostics["excluded"] == (0,)


def test_a_broken_loss_is_never_the_better_one() -> None:
    def without(place: Tensor) -> float:
        return math.nan if float(place[0]) > 0.8 else 1.0

    def together(place: Tensor) -> float:
        return 1.0 if float(place[0]) > 0.8 else math.nan

    assert step(Subset(), vectors(PNS), seen=Seen(without)).diagnostics["excluded"] == ()
    assert step(Subset(), vectors(PNS), seen=Seen(lambda _: math.nan)).diagnostics["excluded"] == ()
    assert step(Subset(), vectors(PNS), seen=Seen(together)).diagnostics["excluded"] == (3,)


INNER: list[Aggregate] = [
    Mean("equal"),
    AngleWeighted(),
    ServerOptimised(AngleWeighted(), ServerSgd(0.5, 0.9)),
]


@pytest.mark.parametrize("inner", INNER, ids=str)
def test_a_subset_of_everybody_is_its_inner_aggregator_bit_for_bit(inner: Aggregate) -> None:
    states: list[object] = [None, None]
    models: list[Params] = [ZERO, ZERO]
    for values in (ADP, PNS, PNS):
        for row, part in enumerate((inner, Subset(inner))):
            seen = Seen(falling)
            stepped = step(part, vectors(values), states[row], model=models[row], seen=seen)
            models[row], states[row] = stepped.model, stepped.state
        assert torch.equal(models[0][PLACE], models[1][PLACE])
    assert repr(states[0]) == repr(states[1])


def test_the_state_of_the_inner_aggregator_is_that_of_those_who_stayed() -> None:
    inner = ServerOptimised(AngleWeighted(), ServerSgd(0.5, 0.9))
    subset = Subset(inner)
    one = step(subset, vectors(PNS), seen=Seen(rising))
    two = step(subset, vectors(PNS), one.state, model=one.model, seen=Seen(rising))
    assert one.diagnostics["excluded"] == two.diagnostics["excluded"] == (3,)
    assert two.state.inner.keys() == {0, 1, 2}
    assert {angle.visits for angle in two.state.inner.values()} == {2}  # trials left no trace
    first = step(inner, vectors(PNS[:3]))
    second = step(inner, vectors(PNS[:3]), first.state, model=first.model)
    assert torch.equal(two.model[PLACE], second.model[PLACE])
    assert "weights" in two.diagnostics


def test_sub_models_are_compared_on_what_everybody_trained() -> None:
    part = rows_and_columns((0,))
    shared = [1.0, 1.1, 0.9, -1.0]
    changes = [{MATRIX: torch.full((1, 1), value)} for value in shared[:3]]
    # The last has a large matrix that agrees where it is alone; where all are it does not.
    whole = torch.full((3, 3), 50.0)
    whole[0, 0] = shared[3]
    found = updates_of([*changes, {MATRIX: whole}], slices=[part] * 3 + [replace(part, keep=())])
    model = {MATRIX: torch.zeros(3, 3), **ZERO}
    notes = step(Subset(), found, model=model).diagnostics
    assert notes["labelled"] == (3,)
    sizes = np.array(shared)
    assert notes["alignment"] == pytest.approx(4 * sizes.mean() ** 2, rel=1e-6)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: AngleWeighted(sharpness=0), "AngleWeighted.sharpness"),
        (lambda: Subset(share=1.5), "Subset.share"),
        (lambda: Subset(statistic="median"), "Subset.statistic"),  # type: ignore[arg-type]
        (lambda: Subset(left="none"), "Subset.left"),  # type: ignore[arg-type]
    ],
)
def test_impossible_aggregators_are_refused(make: Callable[[], Aggregate], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()
