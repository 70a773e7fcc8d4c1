"""Overlap means and other reductions, with the numbers of the specification."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from anyfleet.arrays import Floats
from anyfleet.core.messages import Aggregated, Params, Report
from anyfleet.core.slots import Aggregate
from anyfleet.core.updates import Updates, add_delta
from anyfleet.elastic import Blueprint, Slice, cut, place, trace
from anyfleet.parts.aggregate import (
    AngleWeighted,
    Clipped,
    CoordinateMedian,
    Diagnosed,
    Mean,
    ServerAdam,
    ServerOptimised,
    ServerSgd,
    Subset,
    TrimmedMean,
)
from tests.helpers import small

MODEL = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
BLUEPRINT = trace(MODEL, (torch.zeros(2, 4),))
MATRIX = "2.weight"
G = torch.arange(1.0, 10.0).reshape(3, 3)


def updates_of(
    changes: Sequence[Mapping[str, Tensor]],
    *,
    slices: Sequence[Slice] | None = None,
    samples: Sequence[int] | None = None,
    masks: Sequence[Mapping[str, Tensor]] | None = None,
    blueprint: Blueprint = BLUEPRINT,
) -> Updates:
    return Updates.of(changes, blueprint, slices=slices, samples=samples, masks=masks)


def rows_and_columns(kept: Sequence[int]) -> Slice:
    """Keeps the same units on both sides of the matrix."""
    outer, inner = (BLUEPRINT.params[MATRIX][d][0][0] for d in (0, 1))
    return Slice.of({outer: kept, inner: kept}, BLUEPRINT)


def moved(model: Mapping[str, Tensor], found: Updates, weights: Floats) -> dict[str, Tensor]:
    return {name: model[name] + change for name, change in found.mean(weights).items()}


# --- one by one -------------------------------------------------------------------------------


def test_updates_come_one_by_one_in_the_coordinates_of_the_whole_model() -> None:
    slices = [rows_and_columns((0, 2)), Slice()]
    small_one = cut({MATRIX: G}, slices[0], BLUEPRINT)
    reports: list[Report] = [{"loss": 0.5, "channels": (1.0, 2.0)}, {}]
    masks = [{}, {MATRIX: torch.tensor([[1.0], [0.0], [1.0]]).expand(3, 3)}]
    found = Updates.of(
        [small_one, {MATRIX: G, "2.bias": torch.ones(3)}],
        BLUEPRINT,
        slices=slices,
        samples=[3, 5],
        staleness=[0, 2],
        masks=masks,
        reports=reports,
    )
    one, two = found
    assert (one.device, one.samples, one.staleness, one.sent_fraction) == (0, 3.0, 0, 1.0)
    assert (two.device, two.samples, two.staleness, two.slice) == (1, 5.0, 2, Slice())
    assert (one.slice, one.report) == (slices[0], reports[0])
    corners = torch.tensor([[True, False, True], [False] * 3, [True, False, True]])
    assert torch.equal(one.covered[MATRIX], corners)
    assert torch.equal(one.delta[MATRIX], G * corners)
    assert torch.equal(one.local_delta[MATRIX], small_one[MATRIX])
    assert one.delta.keys() == one.covered.keys() == {MATRIX}  # it trained no other tensor
    rows = torch.tensor([True, False, True])
    assert torch.equal(two.covered[MATRIX], rows[:, None].expand(3, 3))
    assert torch.equal(two.delta[MATRIX], G * rows[:, None])
    assert two.covered["2.bias"].all()
    assert found[-1].device == 1
    with pytest.raises(IndexError):
        found[2]


def test_the_mean_written_one_by_one_is_the_mean() -> None:
    noise = torch.Generator().manual_seed(3)
    slices = [rows_and_columns(kept) for kept in ((0, 1), (1, 2), (0, 1, 2))]
    trees = [
        {n: torch.randn(BLUEPRINT.local(s).shape(n), generator=noise) for n in BLUEPRINT.params}
        for s in slices
    ]
    found = updates_of(trees, slices=slices, samples=[1, 2, 5])
    total = {name: torch.zeros(BLUEPRINT.shape(name)) for name in BLUEPRINT.params}
    mass = {name: torch.zeros(BLUEPRINT.shape(name)) for name in BLUEPRINT.params}
    for update in found:
        for name, delta in update.delta.items():
            total[name] += update.samples * delta
            mass[name] += update.samples * update.covered[name]
    model = {name: torch.randn(value.shape, generator=noise) for name, value in total.items()}
    moved = add_delta(model, found.mean(found.samples))
    for name in BLUEPRINT.params:
        expected = model[name] + total[name] / mass[name]
        torch.testing.assert_close(moved[name], expected)
    assert add_delta(model, {})[MATRIX] is model[MATRIX]


def test_a_reported_number_is_an_array_and_nan_where_there_is_none() -> None:
    reports: list[Report] = [{"loss": 0.5}, {}, {"loss": math.inf}, {"loss": "low"}]
    found = Updates.of([{}] * 4, BLUEPRINT, reports=reports)
    assert found.report("loss").tolist()[0] == 0.5
    assert np.isnan(found.report("loss")[1:]).all()
    assert found.take([0]).report("loss").tolist() == [0.5]
    assert found.take([]).report("loss").shape == (0,)


# --- reductions -------------------------------------------------------------------------------


def test_1_1_fedavg_example() -> None:
    start = torch.zeros(2)
    models = [torch.tensor(w) for w in ((1.0, 2.0), (3.0, 0.0), (5.0, 4.0))]
    found = updates_of([{"4.bias": w - start} for w in models], samples=[10, 20, 30])
    new = moved({"4.bias": start}, found, found.samples)
    torch.testing.assert_close(new["4.bias"], torch.tensor([3.6666667, 2.3333333]))


@pytest.mark.parametrize(
    ("kept", "expected"),
    [
        ((0, 2), [[1, 3, 3], [5, 6, 7], [7, 9, 9]]),  # §1.4 FedDrop
        ((0, 1), [[1, 2, 4], [4, 5, 7], [8, 9, 10]]),  # §1.5 HeteroFL
    ],
)
def test_1_4_and_1_5_overlap_examples(kept: tuple[int, ...], expected: list[list[float]]) -> None:
    part = rows_and_columns(kept)
    small = cut({MATRIX: torch.full((3, 3), -1.0)}, part, BLUEPRINT)
    found = updates_of([{MATRIX: torch.ones(3, 3)}, small], slices=[Slice(), part])
    new = moved({MATRIX: G}, found, np.ones(2))
    assert new[MATRIX].tolist() == expected


def test_1_3_fedpmt_layer_example() -> None:
    model = {
        "0.bias": torch.ones(3),
        "2.bias": torch.full((3,), 2.0),
        "4.bias": torch.full((2,), 3.0),
    }
    changes = [
        {"4.bias": torch.full((2,), -0.3)},
        {"2.bias": torch.full((3,), -0.2), "4.bias": torch.full((2,), -0.1)},
        {
            "0.bias": torch.full((3,), -0.4),
            "2.bias": torch.full((3,), -0.6),
            "4.bias": torch.full((2,), -0.5),
        },
    ]
    new = moved(model, updates_of(changes), np.ones(3))
    for name, value in (("0.bias", 0.6), ("2.bias", 1.6), ("4.bias", 2.7)):
        torch.testing.assert_close(new[name], torch.full_like(model[name], value))


def test_rows_that_are_masked_do_not_count() -> None:
    mask = torch.tensor([[1.0], [0.0], [1.0]]).expand(3, 3)
    one, two = torch.full((3, 3), 2.0), torch.full((3, 3), 4.0)
    found = updates_of([{MATRIX: one}, {MATRIX: two}], masks=[{MATRIX: mask}, {}])
    assert found.mean(np.ones(2))[MATRIX][:, 0].tolist() == [3.0, 4.0, 3.0]
    none = updates_of([{MATRIX: one}], masks=[{MATRIX: mask}])
    assert none.covered()[MATRIX][:, 0].tolist() == [True, False, True]


def test_masks_keep_double_precision() -> None:
    mask = torch.tensor([[1.0], [0.0], [1.0]]).expand(3, 3)  # as it comes off the wire
    changes = [
        {MATRIX: torch.full((3, 3), value, dtype=torch.float64)} for value in (0.1, 0.7, 0.3)
    ]
    found = updates_of(changes, masks=[{MATRIX: mask}] * 3, samples=[1, 2, 4])
    expected = (0.1 * 1 + 0.7 * 2 + 0.3 * 4) / 7
    assert found.mean(found.samples)[MATRIX][0, 0].item() == pytest.approx(expected, rel=1e-15)


def test_devices_without_samples_do_not_count_and_nobody_at_all_changes_nothing() -> None:
    ones, twos = {MATRIX: torch.ones(3, 3)}, {MATRIX: torch.full((3, 3), 2.0)}
    found = updates_of([ones, twos], samples=[0, 5])
    assert torch.equal(found.mean(found.samples)[MATRIX], twos[MATRIX])
    assert found.mean(np.zeros(2)) == {}
    broken = updates_of([{MATRIX: torch.full((3, 3), torch.nan)}, twos], samples=[0, 5])
    assert torch.equal(broken.mean(broken.samples)[MATRIX], twos[MATRIX])
    assert Mean("equal").weigh(found).tolist() == [0.0, 1.0]


@given(st.integers(1, 6), st.floats(0.1, 1e6))
def test_a_common_factor_of_the_weights_changes_no_bit(count: int, factor: float) -> None:
    noise = torch.Generator().manual_seed(count)
    found = updates_of([{MATRIX: torch.randn(3, 3, generator=noise)} for _ in range(count)])
    weights = np.full(count, float(int(factor) or 1))
    assert torch.equal(found.mean(weights)[MATRIX], found.mean(np.ones(count))[MATRIX])


@st.composite
def several(draw: st.DrawFn) -> Updates:
    noise = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    slices, changes = [], []
    for _ in range(draw(st.integers(1, 5))):
        kept = sorted(draw(st.sets(st.integers(0, 2), min_size=1)))
        slices.append(rows_and_columns(kept))
        full = {
            name: torch.randn(BLUEPRINT.shape(name), generator=noise) for name in BLUEPRINT.params
        }
        changes.append(cut(full, slices[-1], BLUEPRINT))
    return updates_of(changes, slices=slices, samples=draw_samples(draw, len(slices)))


def draw_samples(draw: st.DrawFn, count: int) -> list[int]:
    return draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))


@given(several())
def test_comparisons_agree_with_dense_vectors(found: Updates) -> None:
    vectors, masks = dense(found)
    noise = torch.Generator().manual_seed(len(found))
    tree = {n: torch.randn(BLUEPRINT.shape(n), generator=noise) for n in BLUEPRINT.params}
    flat = torch.cat([tree[name].flatten() for name in BLUEPRINT.params]).double()
    np.testing.assert_allclose(
        found.tree_norms(tree), (masks * flat).norm(dim=1).numpy(), rtol=1e-6
    )
    both = masks.prod(0) * vectors
    np.testing.assert_allclose(found.gram(common=True), (both @ both.T).numpy(), rtol=1e-6)
    sets = Counter(tuple(column) for column in masks.T.tolist() if any(column))
    regions = found.regions()
    counted = zip(regions.devices.tolist(), regions.coordinates.tolist(), strict=True)
    assert Counter(counted) == Counter((int(sum(s)), count) for s, count in sets.items())


@given(several(), st.data())
def test_some_rows_are_arrivals_of_their_own(found: Updates, data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(0, len(found) - 1), unique=True, min_size=1))
    part = found.take(rows)
    assert part.device.tolist() == found.device[rows].tolist()
    assert part.samples.tolist() == found.samples[rows].tolist()
    np.testing.assert_allclose(part.gram(), found.gram()[np.ix_(rows, rows)], rtol=1e-9, atol=1e-12)
    weights = np.zeros(len(found))
    weights[rows] = found.samples[rows]
    ordered = found.take(sorted(rows))
    mean = found.mean(weights)
    assert small.identical(ordered.mean(ordered.samples), mean)
    everybody = found.take(range(len(found)))
    assert small.identical(everybody.mean(everybody.samples), found.mean(found.samples))


def test_comparisons_count_masked_coordinates_as_not_trained() -> None:
    mask = torch.tensor([[1.0], [0.0], [1.0]]).expand(3, 3)
    ones = {MATRIX: torch.ones(3, 3), "2.bias": torch.ones(3)}
    found = updates_of([ones, {MATRIX: torch.ones(3, 3)}], masks=[{MATRIX: mask}, {}])
    assert found.norms().tolist() == pytest.approx([3.0, 3.0])
    assert found.tree_norms(ones).tolist() == pytest.approx([3.0, 3.0])
    assert found.dots(ones).tolist() == [9.0, 9.0]
    assert found.gram(common=True).tolist() == [[6.0, 6.0], [6.0, 6.0]]
    assert found.gram().tolist() == [[9.0, 6.0], [6.0, 9.0]]
    regions = found.regions()
    assert sorted(zip(*map(np.ndarray.tolist, regions), strict=True)) == [(1, 3), (1, 3), (2, 6)]


def test_a_broken_update_spoils_only_its_own_products() -> None:
    changes = [{MATRIX: torch.full((3, 3), value)} for value in (1.0, torch.nan, 2.0)]
    gram = updates_of(changes).gram(common=True)
    assert np.isnan(gram[1]).all()
    assert gram[np.ix_([0, 2], [0, 2])].tolist() == [[9.0, 18.0], [18.0, 36.0]]
    assert np.isnan(updates_of(changes).norms()).tolist() == [False, True, False]


@given(several())
def test_reductions_agree_with_dense_vectors(found: Updates) -> None:
    vectors, masks = dense(found)
    weights = torch.tensor(found.samples / found.samples.sum())
    total = (weights[:, None] * masks * vectors).sum(0)
    mass = (weights[:, None] * masks).sum(0)
    expected = torch.where(mass > 0, total / mass, 0.0)
    mean = found.mean(found.samples)
    flat = torch.cat([mean[name].flatten().double() for name in BLUEPRINT.params if name in mean])
    torch.testing.assert_close(flat, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.gram(), (vectors @ vectors.T).numpy(), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(found.norms(), vectors.norm(dim=1).numpy(), rtol=1e-6)
    np.testing.assert_allclose(found.dots(mean), (vectors @ expected).numpy(), rtol=1e-4, atol=1e-5)
    covered = torch.cat([found.covered()[name].flatten() for name in BLUEPRINT.params])
    assert torch.equal(covered, masks.sum(0) > 0)


def dense(found: Updates) -> tuple[Tensor, Tensor]:
    """Every update as one full vector, and its mask; written without the code under test."""
    vectors, masks = [], []
    for change, slice_ in ((each.local_delta, each.slice) for each in found):
        row, mask = [], []
        for name in BLUEPRINT.params:
            full, held = torch.zeros(BLUEPRINT.shape(name)), torch.zeros(BLUEPRINT.shape(name))
            full[place(name, slice_, BLUEPRINT)] = change[name]
            held[place(name, slice_, BLUEPRINT)] = 1.0
            row.append(full.flatten())
            mask.append(held.flatten())
        vectors.append(torch.cat(row))
        masks.append(torch.cat(mask))
    return torch.stack(vectors).double(), torch.stack(masks).double()


AGGREGATORS: list[Aggregate] = [
    Mean("samples"),
    Mean("equal", discount=0.5),
    AngleWeighted(),
    Subset(),
    Subset(AngleWeighted()),
    Diagnosed(),
    Diagnosed(Subset(ServerOptimised(AngleWeighted()))),
    ServerOptimised(Mean(), ServerSgd(lr=0.5, momentum=0.9)),
    ServerOptimised(Mean(), ServerAdam()),
    ServerOptimised(AngleWeighted(), ServerSgd(lr=0.5, momentum=0.9)),
    ServerOptimised(Subset(Mean("equal"), share=0.5), ServerAdam()),
    Clipped(),
    TrimmedMean(),
    CoordinateMedian(),
]


@dataclass(frozen=True)
class Seen:
    """As much of a view as an aggregator looks at; the server's loss falls with every call."""

    blueprint: Blueprint = BLUEPRINT
    asked: list[int] = field(default_factory=list)

    def server_loss(self, params: Params, key: Tensor) -> float:
        self.asked.append(int(key))
        return 1.0 / len(self.asked)


@pytest.mark.parametrize("aggregate", AGGREGATORS, ids=str)
@pytest.mark.parametrize("kept", [[(0, 2)], [(0, 2), (0, 2), (2,)], [(0,), (2,), (0, 2)]], ids=str)
def test_uncovered_coordinates_keep_their_value(
    aggregate: Aggregate, kept: list[tuple[int, ...]]
) -> None:
    noise = torch.Generator().manual_seed(7)

    def tree() -> dict[str, Tensor]:
        return {n: torch.randn(BLUEPRINT.shape(n), generator=noise) for n in BLUEPRINT.params}

    model, everything = tree(), updates_of([tree(), tree()])
    slices = [rows_and_columns(each) for each in kept]
    some = updates_of([cut(tree(), each, BLUEPRINT) for each in slices], slices=slices)
    first = step(aggregate, model, aggregate.init(None), everything)  # type: ignore[arg-type]
    second = step(aggregate, first.model, first.state, some)
    for name, covered in some.covered().items():
        assert torch.equal(second.model[name][~covered], first.model[name][~covered])
        assert not torch.equal(second.model[name][covered], first.model[name][covered])


def step(
    aggregate: Aggregate, model: Mapping[str, Tensor], state: object, found: Updates
) -> Aggregated:
    return aggregate(model, found, Seen(), state, torch.tensor(0))  # type: ignore[arg-type]


def test_server_momentum_and_adam_follow_their_formulas() -> None:
    model, change = {"4.bias": torch.zeros(2)}, torch.tensor([1.0, -2.0])
    found = updates_of([{"4.bias": change}])
    momentum = ServerOptimised(Mean(), ServerSgd(lr=0.5, momentum=0.9))
    one = step(momentum, model, momentum.init(None), found)  # type: ignore[arg-type]
    two = step(momentum, one.model, one.state, found)
    torch.testing.assert_close(one.model["4.bias"], 0.5 * change)
    torch.testing.assert_close(two.model["4.bias"], 0.5 * change + 0.5 * 1.9 * change)
    adam = ServerOptimised(Mean(), ServerAdam(lr=0.1, betas=(0.9, 0.99), epsilon=1e-3))
    new = step(adam, model, adam.init(None), found).model["4.bias"]  # type: ignore[arg-type]
    expected = 0.1 * 0.1 * change / ((0.01 * change.square()).sqrt() + 1e-3)
    torch.testing.assert_close(new, expected)


@pytest.mark.parametrize(
    "aggregate",
    [
        ServerOptimised(Subset(share=0.5), ServerSgd(1.0, 0.9)),
        ServerOptimised(Diagnosed(Subset(share=0.5)), ServerSgd(1.0, 0.9)),
        ServerOptimised(Mean(), ServerSgd(1.0, 0.9)),
    ],
    ids=str,
)
@pytest.mark.parametrize("answers", [1, 2], ids=["once", "twice"])
def test_momentum_does_not_move_what_only_those_trained_who_did_not_count(
    aggregate: ServerOptimised, answers: int
) -> None:
    """One device alone has the third unit; it is excluded as adverse, or has no samples."""
    part, idle = rows_and_columns((0, 1)), aggregate.inner == Mean()
    agreed = [cut({MATRIX: torch.full((3, 3), v)}, part, BLUEPRINT) for v in (1.0, 1.1, 1.2)]
    changes = [*agreed, {MATRIX: torch.full((3, 3), -1.0)}]
    slices, samples = [part] * 3 + [Slice()], [5, 5, 5, 0 if idle else 5]
    found = updates_of(changes, slices=slices, samples=samples).take([0, 1, 2] + [3] * answers)
    everything = updates_of([{MATRIX: torch.ones(3, 3)}] * 2)
    state = aggregate.init(None)  # type: ignore[arg-type]
    first = step(aggregate, {MATRIX: G}, state, everything)
    second = step(aggregate, first.model, first.state, found)
    assert idle or second.diagnostics["excluded"] == (3,) * answers
    stays = first.model[MATRIX] == second.model[MATRIX]
    assert stays.tolist() == [[False, False, True]] * 2 + [[True] * 3]
