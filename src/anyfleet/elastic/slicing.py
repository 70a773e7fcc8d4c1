"""Small tensors cut out of large ones and put back, and channels put in another order."""

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from anyfleet.elastic.blueprint import Blueprint, Slice
from anyfleet.elastic.indexing import Index, broadcast, index, indices_of, moved, take
from anyfleet.elastic.plain_tensors import plain_tensors
from anyfleet.errors import SliceError

Params = Mapping[str, Tensor]

_WHOLE = slice(None)


def cut(tree: Params, slice: Slice, blueprint: Blueprint) -> dict[str, Tensor]:
    """Return the small tensors of any subset of names; runs of indices give views, no copies."""
    indices = _indices(slice, blueprint, _device(tree))
    return {name: take(tensor, indices[name]) for name, tensor in tree.items()}


def cut_stack(tree: Params, slice: Slice, blueprint: Blueprint) -> dict[str, Tensor]:
    """Return the small tensors of a stack [devices, …], of any subset of names."""
    indices = _indices(slice, blueprint, _device(tree))
    return {name: take(tensor, indices[name], lead=1) for name, tensor in tree.items()}


def _device(tree: Params) -> str:
    """Return where the tensors of a tree are."""
    return next((str(tensor.device) for tensor in tree.values()), "cpu")


def paste(part: Params, onto: Params, slice: Slice, blueprint: Blueprint) -> dict[str, Tensor]:
    """Return `onto` with the tensors of `part` written where the slice lies; new tensors."""
    pasted = dict(onto)
    for name, small in part.items():
        target = onto[name].clone()
        target[place(name, slice, blueprint, str(target.device))] = small
        pasted[name] = target
    return pasted


def paste_stack(
    part: Params, onto: Params, slice: Slice, blueprint: Blueprint
) -> dict[str, Tensor]:
    """Return stacks [devices, …] with those of `part` written where the slice lies."""
    pasted = dict(onto)
    for name, small in part.items():
        target = onto[name].clone()
        target[(_WHOLE, *place(name, slice, blueprint, str(target.device)))] = small
        pasted[name] = target
    return pasted


def place(name: str, slice: Slice, blueprint: Blueprint, device: str = "cpu") -> tuple[Index, ...]:
    """Return where the slice lies in a tensor: `t[place(…)] = v` and `t[place(…)] += v` work."""
    return _places(slice, blueprint, device)[name]


def indices_along(
    name: str, slices: tuple[Slice, ...], blueprint: Blueprint, device: str = "cpu"
) -> tuple[Tensor, ...]:
    """Return the coordinates that slices keep along each dimension of a tensor: [slices, kept].

    The slices must keep as many indices of the same axes. Along a dimension that they keep whole,
    all share one row.
    """
    return _several(slices, blueprint, device)[name]


@lru_cache(maxsize=512)
def _indices(slice: Slice, blueprint: Blueprint, device: str) -> dict[str, tuple[Index, ...]]:
    if device != "cpu":
        with plain_tensors():
            return moved(_indices(slice, blueprint, "cpu"), device)
    kept, sizes = dict(slice.keep), blueprint.sizes
    tables = {**blueprint.params, **blueprint.buffers}
    with plain_tensors():
        # Few dimensions differ: that of the channels of a layer occurs in all of its tensors.
        found = {
            dim: index(dim, kept, sizes)
            for dim in dict.fromkeys(dim for dims in tables.values() for dim in dims)
        }
    return {name: tuple(found[dim] for dim in dims) for name, dims in tables.items()}


@lru_cache(maxsize=512)
def _places(slice: Slice, blueprint: Blueprint, device: str) -> dict[str, tuple[Index, ...]]:
    indices = _indices(slice, blueprint, device)
    with plain_tensors():
        return {n: broadcast(rows, blueprint.shape(n), device) for n, rows in indices.items()}


@lru_cache(maxsize=8)
def _several(
    slices: tuple[Slice, ...], blueprint: Blueprint, device: str
) -> dict[str, tuple[Tensor, ...]]:
    tables, sizes = {**blueprint.params, **blueprint.buffers}, blueprint.sizes
    with plain_tensors():
        kept = {axis: torch.tensor([s.kept(axis) for s in slices]) for axis, _ in slices[0].keep}
        return {
            name: tuple(indices_of(dim, kept, sizes).to(device) for dim in dims)
            for name, dims in tables.items()
        }


def permute(
    tree: Params, orders: Mapping[str, Sequence[int]], blueprint: Blueprint
) -> dict[str, Tensor]:
    """Return the tree with the indices of some axes in a new order, wherever an axis occurs.

    Place i of an axis holds what index `order[i]` held before. Any subset of parameters and
    buffers; a model of which all are permuted alike is the same function. For export: a run never
    needs it, as a slice says which indices it has.
    """
    for axis, order in orders.items():
        known = blueprint.axes.get(axis)
        if known is not None and known.free and len(order) != known.size:
            raise SliceError(
                f"axis {axis!r} has {known.size} indices, and an order names each of them once; "
                f"got {len(order)}"
            )
    slice_ = Slice.of(orders, blueprint)
    _refuse_constants(slice_, blueprint)
    return cut(tree, slice_, blueprint)


def _refuse_constants(slice_: Slice, blueprint: Blueprint) -> None:
    """Raise SliceError if constants of the network run along a reordered axis.

    No tree holds them, so they would keep the old order.
    """
    for axis, kept in slice_.keep:
        alone = blueprint.local(Slice(((axis, kept),)))
        pairs = zip(blueprint.programs, alone.programs, strict=True)
        moved = [
            name
            for before, after in pairs
            for name, constant in after.constants.items()
            if constant != before.constants[name]
        ]
        if moved:
            raise SliceError(
                f"axis {axis!r} cannot be reordered: constants of the network run along it "
                f"({', '.join(moved)}), and no tree holds them. Leave the axis out, or make them "
                "persistent buffers"
            )
