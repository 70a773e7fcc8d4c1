"""Reductions of the same updates in stacks of all sizes, orders and layouts: the same bits."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from anyfleet.arrays import Ints, distinct
from anyfleet.core import ordered_stacks
from anyfleet.core import stacks as module
from anyfleet.core.messages import Params
from anyfleet.core.stacks import Replies, Stack, lengths
from anyfleet.core.updates import Updates
from anyfleet.elastic import Slice, place, trace
from anyfleet.elastic.slicing import indices_along
from anyfleet.parts.aggregate import Aio, AngleWeighted, Clipped, Diagnosed, Mean, Subset
from tests.core.test_updates import Seen
from tests.helpers import small

NETWORK = nn.Sequential(
    nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 8), nn.ReLU(), nn.Linear(8, 1)
)
BLUEPRINT = trace(NETWORK, (torch.zeros(2, 1, 4, 4),))
AXES = tuple(BLUEPRINT.counts(1.0))
COUNT = 23
Layout = Callable[[Tensor], Tensor]


def some_slices(kind: str) -> list[Slice]:
    draw = np.random.default_rng(5)
    if kind == "whole":
        return [Slice()] * COUNT
    if kind == "widths":
        return [BLUEPRINT.prefix((1.0, 0.5, 0.25)[row % 3]) for row in range(COUNT)]
    personal = [
        {axis: draw.permutation(BLUEPRINT.axes[axis].size)[:3].tolist() for axis in AXES}
        for _ in range(COUNT)
    ]
    return [Slice.of(keep, BLUEPRINT) for keep in personal]


def tree_of(slice_: Slice, noise: torch.Generator, dtype: torch.dtype) -> dict[str, Tensor]:
    local = BLUEPRINT.local(slice_)
    return {n: torch.randn(local.shape(n), generator=noise, dtype=dtype) for n in BLUEPRINT.params}


def updates_in_stacks(
    kind: str,
    size: int,
    *,
    layout: Layout = lambda value: value,
    masks: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Updates:
    """The same updates whatever `size`: stacks of so many, which arrive in another order."""
    noise, slices = torch.Generator().manual_seed(3), some_slices(kind)
    trees = [tree_of(slice_, noise, dtype) for slice_ in slices]
    flags = [
        {n: (torch.rand(v.shape, generator=noise) < 0.6).float() for n, v in tree.items()}
        for tree in trees
    ]
    order = np.random.default_rng(size).permutation(COUNT) if size < COUNT else np.arange(COUNT)
    shapes = distinct([slices[row].shape(BLUEPRINT) for row in order])[1]
    found: list[Stack] = []
    stack_index, places = np.empty(COUNT, dtype=np.int64), np.empty(COUNT, dtype=np.int64)
    for shape in np.unique(shapes)[::-1]:
        alike = order[shapes == shape]
        for start in range(0, len(alike), size):
            rows = alike[start : start + size]
            stack_index[rows], places[rows] = len(found), np.arange(len(rows))
            found.append(
                Stack(
                    trees={"delta": stacked([trees[row] for row in rows], layout)},
                    masks=stacked([flags[row] for row in rows], layout) if masks else {},
                    kept=stacked([flags[row - 1] for row in rows], layout)
                    if kind == "whole"
                    else {},
                    report={"loss": np.sin(rows)},
                )
            )
    return Updates.stacked(
        Replies(
            order=np.arange(COUNT),
            device=np.arange(COUNT),
            samples=1 + np.arange(COUNT) % 7,
            bits=np.ones(COUNT),
            delivered_width=np.ones(COUNT),
            stack_index=stack_index,
            place=places,
            stacks=tuple(found),
        ),
        BLUEPRINT,
        **listed(slices),
        staleness=np.zeros(COUNT, dtype=np.int64),
        sent_fraction=np.linspace(0.1, 1, COUNT),
    )


def listed(slices: Sequence[Slice]) -> dict[str, Any]:
    different, index = distinct(slices)
    return {"slices": different, "slice_index": index}


def stacked(trees: Sequence[Params], layout: Layout) -> dict[str, Tensor]:
    return {name: layout(torch.stack([tree[name] for tree in trees])) for name in trees[0]}


def results(found: Updates) -> dict[str, Any]:
    """All reductions, and what aggregators that weigh by them make of the updates."""
    tree = found.mean(found.samples)
    model = {name: torch.zeros(BLUEPRINT.shape(name)).to(tree[name]) for name in BLUEPRINT.params}
    parts = (Mean(), AngleWeighted(), Clipped(), Aio(), Subset(share=0.5), Diagnosed())
    seen: Any = Seen(blueprint=BLUEPRINT)
    models = {
        str(part): part(model, found, seen, part.init(seen), torch.tensor(1)).model
        for part in parts
    }
    return {
        **models,
        "mean": tree,
        "median": found.median(),
        "trimmed": found.trimmed(0.2),
        "covered": found.covered(),
        "norms": found.norms(),
        "sizes": found.root_mean_squares(),
        "dots": found.dots(tree),
        "lengths": found.tree_norms(tree),
        "gram": found.gram(),
        "common": found.gram(common=True),
        "regions": np.stack(found.regions()),
        "loss": found.report("loss"),
    }


def assert_same_bits(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert one.keys() == two.keys()
    for name, value in one.items():
        if isinstance(value, np.ndarray):
            assert value.tobytes() == two[name].tobytes(), name
        else:
            assert small.identical(value, two[name]), name


@pytest.mark.parametrize("masks", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("kind", ["whole", "widths", "personal"])
def test_stacks_of_any_size_in_any_order_give_the_same_bits(kind: str, masks: bool) -> None:
    together = results(updates_in_stacks(kind, COUNT, masks=masks))
    for size in (1, 3, 7):
        assert_same_bits(results(updates_in_stacks(kind, size, masks=masks)), together)
    one_by_one = updates_in_stacks(kind, COUNT, masks=masks)
    by_hand = Updates.of(
        [each.local_delta for each in one_by_one],
        BLUEPRINT,
        slices=one_by_one.slices,
        samples=one_by_one.samples,
        sent_fraction=one_by_one.sent_fraction,
        bits=one_by_one.bits,
        masks=[each.local_mask for each in one_by_one],
        reports=[each.report for each in one_by_one],
    )
    if kind != "whole":  # these do not say what a codec sent
        assert_same_bits(results(by_hand), together)


def test_updates_of_stacks_that_come_in_turn_are_gathered_stack_by_stack() -> None:
    (in_turn,) = updates_in_stacks("whole", 7)._ordered
    (at_once,) = updates_in_stacks("whole", COUNT)._ordered
    assert len(in_turn.runs) > 4 * len(in_turn._fragments) == 16
    assert not at_once._fragments
    for name in at_once.tree:
        assert torch.equal(in_turn.values(name), at_once.values(name))


def inside_a_larger_tensor(value: Tensor) -> Tensor:
    """As if cut out of one flat buffer of all parameters: rows lie apart, and not aligned."""
    flat = value.flatten(1)
    buffer = torch.full((len(flat), flat.shape[1] + 5), torch.nan, dtype=value.dtype)
    buffer[:, 3:-2] = flat
    return buffer[:, 3:-2].view(value.shape)


def devices_last(value: Tensor) -> Tensor:
    """As if devices were the last axis in memory."""
    return value.movedim(0, -1).contiguous().movedim(-1, 0)


@pytest.mark.parametrize("layout", [inside_a_larger_tensor, devices_last])
@pytest.mark.parametrize("kind", ["whole", "widths", "personal"])
def test_the_layout_of_a_stack_changes_no_bit(kind: str, layout: Layout) -> None:
    plain, other = (updates_in_stacks(kind, COUNT, layout=each) for each in (torch.clone, layout))
    assert_same_bits(results(other), results(plain))


@pytest.mark.parametrize("block", [1, 64])
@pytest.mark.parametrize("kind", ["whole", "widths", "personal"])
def test_small_blocks_find_the_same(kind: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = updates_in_stacks(kind, 7, masks=True, dtype=torch.float64)
    expected = results(found)
    monkeypatch.setattr(module, "_CACHED", block)
    for name, value in results(replace(found)).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("masks", [False, True], ids=["whole", "masked"])
def test_large_slices_are_placed_tensor_by_tensor_with_the_same_bits(
    masks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = updates_in_stacks("widths", 7, masks=masks)
    expected = results(found)
    monkeypatch.setattr(ordered_stacks, "_INDEXED", 0)
    assert_same_bits(results(replace(found)), expected)


def test_tensors_keep_the_types_that_they_have() -> None:
    slices = some_slices("widths")[:3]
    noise = torch.Generator().manual_seed(3)
    trees = [tree_of(slice_, noise, torch.float64) for slice_ in slices]
    halves = [{**tree, "0.bias": tree["0.bias"].half()} for tree in trees]
    one, two = (
        Updates.of(each, BLUEPRINT, slices=slices).mean(np.ones(3)) for each in (trees, halves)
    )
    assert {name for name, value in two.items() if value.dtype == torch.float16} == {"0.bias"}
    for name, value in two.items():
        tolerance = 1e-3 if name == "0.bias" else 0
        torch.testing.assert_close(value.double(), one[name], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("masks", [False, True], ids=["whole", "masked"])
def test_personal_slices_are_reduced_as_if_placed_one_by_one(masks: bool) -> None:
    found = updates_in_stacks("personal", COUNT, masks=masks, dtype=torch.float64)
    assert len(set(found.slices)) == COUNT
    assert len(found._ordered) == 1
    vectors = torch.stack([flat(update.delta) for update in found])
    trained = torch.stack([flat(update.covered) for update in found]).double()
    weights = torch.from_numpy(found.samples)[:, None]
    mean = (weights * vectors).sum(0) / (weights * trained).sum(0)
    torch.testing.assert_close(flat(found.mean(found.samples)), mean.nan_to_num(0.0))
    torch.testing.assert_close(torch.from_numpy(found.gram()), vectors @ vectors.T)
    tree = found.mean(np.ones(COUNT))
    np.testing.assert_allclose(found.dots(tree), vectors @ flat(tree))
    np.testing.assert_allclose(found.tree_norms(tree), (trained * flat(tree)).norm(dim=1))
    assert torch.equal(flat(found.covered()), trained.sum(0) > 0)


def flat(tree: Params) -> Tensor:
    return torch.cat([tree[name].flatten() for name in BLUEPRINT.params])


@pytest.mark.parametrize("kind", ["whole", "widths", "personal"])
def test_an_update_without_weight_may_be_anything(kind: str) -> None:
    found = updates_in_stacks(kind, 7)
    weights = found.samples * (np.arange(COUNT) % 4 > 0)
    left = np.flatnonzero(weights)
    expected = found.take(left).mean(weights[left])
    factors = np.where(weights > 0, 1.0, np.nan)
    assert small.identical(found.scaled(factors).mean(weights), expected)
    assert np.isnan(found.scaled(factors).norms()).tolist() == (weights == 0).tolist()


def test_updates_scaled_twice_and_taken_twice_are_those_of_their_rows() -> None:
    found = updates_in_stacks("widths", 3, dtype=torch.float64)
    rows: Ints = np.array([5, 2, 5, 11])
    twice = found.scaled(np.full(COUNT, 2.0)).take(rows).scaled(np.array([1.0, 1.0, 0.5, 3.0]))
    for update, row, factor in zip(twice, rows, (2.0, 2.0, 1.0, 6.0), strict=True):
        before = found[int(row)]
        for name, value in update.local_delta.items():
            torch.testing.assert_close(value, factor * before.local_delta[name])
    np.testing.assert_allclose(twice.norms(), found.norms()[rows] * (2.0, 2.0, 1.0, 6.0))


def test_lengths_of_a_stack_are_those_of_its_devices() -> None:
    tree = {"a": torch.tensor([[3.0, 0.0], [1e30, 0.0], [torch.nan, 1.0]]), "b": torch.ones(3) * 4}
    found = lengths(tree)
    assert found.dtype == torch.float64
    assert found[0].item() == 5.0
    # In single precision the square would be infinite.
    assert found[1].item() == pytest.approx(1e30)
    assert torch.isnan(found).tolist() == [False, False, True]


@pytest.mark.parametrize("name", list(BLUEPRINT.params))
def test_indices_of_several_slices_are_those_of_each(name: str) -> None:
    slices = tuple(dict.fromkeys(some_slices("personal")))
    whole = torch.arange(BLUEPRINT.numel([name])).reshape(BLUEPRINT.shape(name))
    along = indices_along(name, slices, BLUEPRINT)
    for row, slice_ in enumerate(slices):
        own = [each[row if len(each) > 1 else 0] for each in along]
        assert torch.equal(
            whole[torch.meshgrid(*own, indexing="ij")], whole[place(name, slice_, BLUEPRINT)]
        )


def test_lengths_of_single_precision_have_nine_digits_whatever_the_size_of_numbers() -> None:
    made = torch.Generator().manual_seed(0)
    rows = torch.randn(4, 1000, generator=made) * torch.tensor([1e-30, 1e-3, 1e3, 1e30])[:, None]
    found = lengths({"a": rows})
    torch.testing.assert_close(found, rows.double().norm(dim=1), rtol=1e-8, atol=0.0)
    # Nobody's length depends on who else is in the stack.
    alone = [lengths({"a": row[None]})[0] for row in rows]
    assert torch.equal(found, torch.stack(alone))
    rows[1, 3] = torch.inf
    assert lengths({"a": rows}).isfinite().tolist() == [True, False, True, True]
