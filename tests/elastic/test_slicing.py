"""Slices: canonical, checked; cutting and pasting are exact."""

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn
from torch.func import grad

from anyfleet.elastic import Blueprint, Slice, SliceError, cut, cut_stack, paste, place, trace
from anyfleet.elastic.indexing import Index, moved
from tests.helpers.nets import FAMILIES, NETS, traced


def free_axes(blueprint: Blueprint) -> dict[str, int]:
    return {name: axis.size for name, axis in blueprint.axes.items() if axis.free}


def slices(blueprint: Blueprint, whole: frozenset[str] = frozenset()) -> st.SearchStrategy[Slice]:
    """Any index sets, in any order, on the axes that may be cut."""
    one = {
        name: st.lists(st.integers(0, size - 1), min_size=1, max_size=size, unique=True)
        for name, size in free_axes(blueprint).items()
        if name not in whole
    }
    return st.fixed_dictionaries(one).map(lambda keep: Slice.of(keep, blueprint))


@pytest.mark.parametrize("name", NETS)
def test_paste_is_the_inverse_of_cut(name: str) -> None:
    net = traced(name)
    everything = {**net.params, **net.buffers}

    @given(slices(net.blueprint))
    @settings(max_examples=10)
    def check(slice: Slice) -> None:
        small = cut(everything, slice, net.blueprint)
        local = net.blueprint.local(slice)
        assert {n: tuple(t.shape) for n, t in small.items()} == {n: local.shape(n) for n in small}
        marked = {n: t + 1 for n, t in small.items()}
        pasted = paste(marked, everything, slice, net.blueprint)
        for tensor, again in zip(
            marked.values(), cut(pasted, slice, net.blueprint).values(), strict=True
        ):
            assert torch.equal(tensor, again)
        for tensor_name, tensor in pasted.items():
            changed = int((tensor != everything[tensor_name]).sum())
            assert changed == small[tensor_name].numel()
        same = paste(small, everything, slice, net.blueprint)
        assert all(torch.equal(same[n], everything[n]) for n in everything)

    check()


def test_a_stack_is_cut_like_each_of_its_devices() -> None:
    net = traced("lenet")
    slice = Slice.of({"c1": (3, 0), "c2": (2, 3, 4)}, net.blueprint)
    stack = {name: torch.stack([value, value + 1]) for name, value in net.params.items()}
    for row, found in enumerate(zip(*cut_stack(stack, slice, net.blueprint).values(), strict=True)):
        whole = {name: value + row for name, value in net.params.items()}
        due = cut(whole, slice, net.blueprint).values()
        assert all(torch.equal(*pair) for pair in zip(found, due, strict=True))


def test_lists_of_indices_are_moved_and_runs_stay() -> None:
    lists, run = (torch.tensor([3, 0]), torch.tensor([5, 1, 4])), slice(1, 4)
    kept = {"weight": (lists[1], lists[0], run), "bias": (lists[1],), "scalar": ()}
    found = moved(kept, "cpu")
    assert found.keys() == kept.keys()
    assert found["weight"][2] is run
    assert torch.equal(index_of(found["weight"][0]), lists[1])
    assert torch.equal(index_of(found["weight"][1]), lists[0])
    assert found["bias"][0] is found["weight"][0]
    assert moved({"bias": (run,)}, "meta") == {"bias": (run,)}


def index_of(index: Index) -> Tensor:
    assert isinstance(index, Tensor)
    return index


def test_place_works_in_place_with_scattered_indices() -> None:
    net = traced("lenet")
    slice = Slice.of({"c1": (3, 0), "c2": (5, 1, 4)}, net.blueprint)
    for name in net.params:
        where = place(name, slice, net.blueprint)
        total = torch.zeros_like(net.params[name])
        total[where] += cut(net.params, slice, net.blueprint)[name]
        assert torch.equal(cut({name: total}, slice, net.blueprint)[name], total[where])
        assert int((total != 0).sum()) == total[where].numel()


def test_leading_slices_are_views() -> None:
    net = traced("resnet_basic")
    small = cut(net.params, net.blueprint.prefix(0.5), net.blueprint)
    for name, tensor in small.items():
        assert tensor.data_ptr() == net.params[name].data_ptr()
        assert tensor.untyped_storage().data_ptr() == net.params[name].untyped_storage().data_ptr()


def test_flattened_channels_own_consecutive_columns() -> None:
    net = traced("lenet")
    small = cut(net.params, Slice.of({"c2": (2,)}, net.blueprint), net.blueprint)
    assert torch.equal(small["f1.weight"], net.params["f1.weight"][:, 8:12])


def test_paste_leaves_its_arguments_alone() -> None:
    net = traced("lenet")
    before = {name: tensor.clone() for name, tensor in net.params.items()}
    slice = Slice.of({"c1": (1,)}, net.blueprint)
    part = {n: torch.zeros_like(t) for n, t in cut(net.params, slice, net.blueprint).items()}
    pasted = paste(part, net.params, slice, net.blueprint)
    assert all(torch.equal(before[n], net.params[n]) for n in before)
    assert float(pasted["c1.weight"][1].abs().sum()) == 0.0


def test_slice_is_canonical() -> None:
    blueprint = traced("lenet").blueprint
    one = Slice.of({"f1": range(12), "c2": [1, 0], "c1": [0, 1]}, blueprint)
    other = Slice.of({"c1": torch.arange(2).tolist(), "c2": (1, 0)}, blueprint)
    assert one == other
    assert hash(one) == hash(other)
    assert one.kept("c2") == (1, 0)
    assert one.kept("f1") is None
    assert Slice.of({"c1": (1, 2)}, blueprint).shape(blueprint) == Slice.of(
        {"c1": (3, 0)}, blueprint
    ).shape(blueprint)
    assert one != Slice.of({"c1": (0, 1), "c2": (1, 0)}, blueprint, first_trained_layer=1)


@pytest.mark.parametrize(
    ("keep", "complaint"),
    [
        ({"nothing": (0,)}, "unknown axis"),
        ({"f2": (0,)}, "cannot be cut"),
        ({"c1": ()}, "empty"),
        ({"c1": (4,)}, "indices 0 to 3"),
        ({"c1": (-1,)}, "indices 0 to 3"),
        ({"c1": (1, 1)}, "repeated"),
    ],
)
def test_slice_refuses(keep: dict[str, tuple[int, ...]], complaint: str) -> None:
    with pytest.raises(SliceError, match=complaint):
        Slice.of(keep, traced("lenet").blueprint)


def test_slice_refuses_a_layer_that_is_not_there() -> None:
    with pytest.raises(SliceError, match="first trained layer"):
        Slice.of({}, traced("lenet").blueprint, first_trained_layer=4)


def test_counts_round_up_or_to_nearest_and_keep_one() -> None:
    blueprint = traced("lenet").blueprint
    assert blueprint.counts(0.3) == {"c1": 2, "c2": 2, "f1": 4}
    assert blueprint.counts(0.3, "round") == {"c1": 1, "c2": 2, "f1": 4}
    assert blueprint.counts(0.01) == {"c1": 1, "c2": 1, "f1": 1}
    assert blueprint.counts({"f1": 0.5}) == {"f1": 6}
    with pytest.raises(SliceError, match="width"):
        blueprint.counts(1.5)


def test_plain_shares_leave_head_dim_and_groups_whole() -> None:
    attention = traced("language_fused").blueprint
    kinds = {attention.axes[name].kind for name in attention.counts(0.5)}
    assert kinds == {"channels", "heads"}
    groups = traced("vgg_group").blueprint
    assert {groups.axes[name].kind for name in groups.counts(0.5)} == {"channels"}


@pytest.mark.parametrize("name", FAMILIES)
def test_local_blueprint_of_a_local_blueprint(name: str) -> None:
    blueprint = traced(name).blueprint
    half = blueprint.local(blueprint.prefix(0.5))
    assert half.numel() < blueprint.numel()
    assert half.local(half.prefix(0.25)).numel() <= half.numel()
    for axis, whole in blueprint.axes.items():
        assert half.axes[axis].whole == whole.size


def test_mcmahan_cnn_has_the_published_sizes() -> None:
    cnn = nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(3136, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )
    blueprint = trace(cnn, torch.zeros(1, 1, 28, 28))
    widths = (1, 1 / 2, 1 / 4, 1 / 8, 1 / 16)
    sizes = [blueprint.local(blueprint.prefix(width)).numel() for width in widths]
    assert sizes == [1_663_370, 417_482, 105_194, 26_714, 6_890]


def test_sent_parameters_are_those_of_the_trained_layers() -> None:
    blueprint = traced("vgg_batch").blueprint
    assert Slice.of({}, blueprint, first_trained_layer=2).sent(blueprint) == (
        "9.weight",
        "9.bias",
        "12.weight",
        "12.bias",
    )
    assert set(Slice().sent(blueprint)) == set(blueprint.params)


@pytest.mark.parametrize("wrong", [[1.7, 2.2], [1.0], ["1"], [True, False]])
def test_indices_are_whole_numbers(wrong: Any) -> None:
    with pytest.raises(SliceError, match=r"'f1' takes"):
        Slice.of({"f1": wrong}, traced("lenet").blueprint)


def test_first_is_a_whole_number() -> None:
    with pytest.raises(SliceError, match="first trained layer"):
        Slice.of({}, traced("lenet").blueprint, 1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["lenet", "joined"])
def test_a_share_that_is_no_number_is_refused(name: str) -> None:
    """Also where a plain share would cut nothing."""
    with pytest.raises(SliceError, match="width must lie in"):
        traced(name).blueprint.counts(math.nan)


def test_places_found_within_a_transform_serve_afterwards() -> None:
    net = traced("lenet")
    slice = Slice.of({"f1": (9, 2, 5)}, net.blueprint)

    def total(weight: Tensor) -> Tensor:
        return cut({"f2.weight": weight}, slice, net.blueprint)["f2.weight"].sum()

    with torch.inference_mode():
        place("f2.weight", slice, net.blueprint)
    want = torch.zeros_like(net.params["f2.weight"])
    want[:, [9, 2, 5]] = 1
    assert torch.equal(grad(total)(net.params["f2.weight"]), want)
    other = Slice.of({"f1": (3, 1)}, net.blueprint)
    grad(lambda w: cut({"f2.weight": w}, other, net.blueprint)["f2.weight"].sum())(
        net.params["f2.weight"]
    )
    (rows,) = (r for r in place("f2.weight", other, net.blueprint) if isinstance(r, Tensor))
    assert rows.flatten().tolist() == [3, 1]
    assert not rows.is_inference()
