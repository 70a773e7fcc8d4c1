"""Selection by learned probabilities: the law of its draws, and numbers of the specification."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyfleet import rng
from anyfleet.arrays import Flags, Ints
from anyfleet.errors import CompositionError
from anyfleet.formulas.contribution import weighted_draw
from anyfleet.methods import fedavg, fedpns
from anyfleet.parts.aggregate import Diagnosed, ServerOptimised, Subset
from anyfleet.parts.select import Learned, Uniform
from anyfleet.parts.select.learned import Chances
from anyfleet.world import levels
from tests.helpers import small
from tests.helpers.vectors import vectors
from tests.parts.select.test_select import all_free, seen


@pytest.mark.parametrize("size", [50, 9000])
def test_1_19_the_first_cohort_is_a_uniform_draw(size: int) -> None:
    view = seen(size, lambda devices: devices % 3 > 0)
    select = Learned(10)
    for seed in range(5):
        key = rng.root(seed, "first")
        chosen = select(view, select.init(view), key)
        assert chosen.tolist() == Uniform(10)(view, None, key).tolist()


def chances(*probability: float) -> Chances:
    never = np.zeros(len(probability), dtype=np.int64)
    return Chances(np.array(probability) / sum(probability), never, never)


def test_1_19_while_few_are_labelled_most_of_the_cohort_is_that_of_a_uniform_draw() -> None:
    view, key = seen(50, all_free), rng.root(4, "same")
    uniform = Uniform(10)(view, None, key)
    out = int(uniform[3])
    state = chances(*(0.0 if device == out else 1.0 for device in range(50)))
    learned = Learned(10)(view, state, key)
    assert out not in learned
    assert len(set(uniform.tolist()) & set(learned.tolist())) == 9


@pytest.mark.parametrize("size", [8, 5000])
def test_1_19_draws_follow_the_probabilities(size: int) -> None:
    heavy = np.arange(size) < size // 2
    state = chances(*np.where(heavy, 3.0, 1.0).tolist())
    view = seen(size, all_free)
    first = [int(Learned(1)(view, state, rng.root(s, "law"))[0]) for s in range(800)]
    share = np.mean(np.array(first) < size // 2)
    assert share == pytest.approx(0.75, abs=4 * np.sqrt(0.75 * 0.25 / 800))


def test_1_19_too_few_with_a_chance_are_all_drawn_and_others_fill_up() -> None:
    state = chances(0.0, 0.5, 0.0, 0.5, 0.0, 0.0)
    drawn = [Learned(3)(seen(6, all_free), state, rng.root(s, "fill")) for s in range(400)]
    assert all({1, 3} <= set(ids.tolist()) and len(ids) == 3 for ids in drawn)
    others = np.bincount(np.concatenate(drawn), minlength=6)[[0, 2, 4, 5]]
    assert (abs(others - 100) < 4 * np.sqrt(400 * 3 / 16)).all()
    away = seen(6, lambda devices: devices != 3)
    assert 1 in Learned(2)(away, state, rng.root(0, "fill"))


def test_1_19_few_free_ones_are_found_and_a_schedule_may_want_fewer() -> None:
    state = chances(*range(1, 5001))
    there = np.array([3, 2500, 4999])
    view = seen(5000, lambda devices: np.isin(devices, there))
    assert Learned(5)(view, state, rng.root(0, "few")).tolist() == there.tolist()
    assert len(Learned(5)(replace(view, most_devices=2), state, rng.root(0, "few"))) == 2


def test_a_weighted_draw_from_a_million_looks_at_few() -> None:
    looked: list[Ints] = []

    def free(devices: Ints) -> Flags:
        looked.append(devices)
        there: Flags = devices % 2 == 0
        return there

    state = chances(*np.linspace(1, 2, 10**6).tolist())
    assert len(Learned(100)(seen(10**6, free), state, rng.root(0, "many"))) == 100
    assert sum(map(len, looked)) < 2000


@given(st.integers(1, 30), st.integers(0, 40), st.integers(0, 1000))
def test_a_draw_of_few_is_the_beginning_of_a_draw_of_all(size: int, count: int, seed: int) -> None:
    noise = np.random.default_rng(seed)
    probability = noise.integers(0, 3, size) / 3.0
    luck = noise.uniform(size=size)
    whole = weighted_draw(probability, size, luck)
    assert weighted_draw(probability, count, luck).tolist() == whole[:count].tolist()


def test_a_fleet_that_has_grown_gives_new_devices_an_equal_share() -> None:
    select, key = Learned(3), rng.root(2, "grown")
    small_one, large = seen(6, all_free), seen(8, all_free)
    first = select(large, select.init(small_one), key)
    assert first.tolist() == Uniform(3)(large, None, key).tolist()
    arrived = replace(vectors([(1.0, 0.0)]), device=np.array([7]))
    after = select.learn(arrived, {"labelled": (7,)}, large, chances(2.0, 1.0, 1.0, 1.0, 1.0, 0.0))
    assert after.selected.tolist() == [0] * 7 + [1]
    assert after.probability.sum() == pytest.approx(1.0)
    assert after.probability[6] > after.probability[7]
    # Before, the first had a third of six devices' chances, and the new ones an eighth of all.
    unlabelled = select.learn(None, {}, large, chances(2.0, 1.0, 1.0, 1.0, 1.0, 0.0)).probability
    assert unlabelled.tolist() == pytest.approx([1 / 4] + [1 / 8] * 4 + [0.0] + [1 / 8] * 2)


def test_1_19_fedpns_example() -> None:
    select, view = Learned(1), seen(5, all_free)
    arrived = vectors([(1.0, 0.0)])
    arrived = replace(arrived, device=np.array([3]))

    def after(selected_before: int) -> Chances:
        state = select.init(view)._replace(selected=np.array([0, 0, 0, selected_before, 0]))
        new = select.learn(arrived, {"labelled": (3,)}, view, state)
        assert state.selected[3] == selected_before  # what was is not changed
        assert new.selected.tolist() == [0, 0, 0, selected_before + 1, 0]
        assert new.labelled.tolist() == [0, 0, 0, 1, 0]
        return new

    assert after(9).probability == pytest.approx([0.232, 0.232, 0.232, 0.072, 0.232])
    for early in (2, 0):  # x = 1/3, and 1: a chance of zero at once
        assert after(early).probability == pytest.approx([0.25, 0.25, 0.25, 0.0, 0.25])
    unlabelled = select.learn(arrived, {"labelled": ()}, view, after(0))
    assert unlabelled.probability == pytest.approx([0.25, 0.25, 0.25, 0.0, 0.25])
    returned = vectors([(1.0, 0.0)])  # of device 0: what it loses all others gain, also device 3
    back = select.learn(returned, {"labelled": (0,)}, view, after(0))
    assert back.probability == pytest.approx([0.0, 0.3125, 0.3125, 0.0625, 0.3125])


def test_1_19_edge_cases_of_learning() -> None:
    select, view = Learned(5), seen(5, all_free)
    state, everybody = select.init(view), vectors([(1.0, 0.0)] * 5)
    same = select.learn(everybody, {"labelled": (0, 1, 2, 3, 4)}, view, state)
    assert same.probability == pytest.approx([0.2] * 5)
    empty = select.learn(None, {}, view, state)
    assert empty.probability == pytest.approx(state.probability)
    assert not empty.selected.any()
    twice = vectors([(1.0, 0.0)] * 2)
    twice = replace(twice, device=np.array([2, 2]))
    again = select.learn(twice, {"labelled": (2, 2)}, view, state)
    assert (again.selected[2], again.labelled[2]) == (2, 2)
    assert again.probability.sum() == pytest.approx(1.0, abs=1e-15)
    told = select.diagnostics(again)
    assert told["selection_entropy"] == pytest.approx(math.log(4))
    assert told["selection_highest"] == pytest.approx(0.25)
    assert told["selection_impossible"] == 1


def test_a_selection_by_labels_needs_somebody_who_labels() -> None:
    with pytest.raises(CompositionError, match=r"labelled.*aggregate=Subset"):
        replace(fedavg(), select=Learned(3))
    for aggregate in (Subset(), Diagnosed(Subset()), ServerOptimised(Subset())):
        replace(fedavg(), select=Learned(3), aggregate=aggregate)


def test_1_19_whoever_was_asked_counts_as_selected_also_when_nothing_came() -> None:
    fleet = levels(speeds=(1e9,), mortality=0.5)
    method = fedpns(count=4, lr=0.1, batch_size=8)
    steps = small.steps(method, small.task(), 4, fleet=fleet)
    asked = np.bincount([r.device for step in steps for r in small.rows(step)], minlength=8)
    assert steps[-1].snapshot.states["select"].selected.tolist() == asked.tolist()
    assert any(row.failure for step in steps for row in small.rows(step))
