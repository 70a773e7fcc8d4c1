"""Cutting small tensors out of large ones and putting them back."""

from collections.abc import Mapping
from functools import lru_cache

from torch import Tensor

from anyfleet.elastic.blueprint import Blueprint, Slice
from anyfleet.elastic.execution.plain import plainly
from anyfleet.elastic.indexing import Index, broadcast, index, take

Params = Mapping[str, Tensor]


def cut(tree: Params, slice: Slice, blueprint: Blueprint) -> dict[str, Tensor]:
    """The small tensors of any subset of names; runs of indices give views, without a copy."""
    indices = _indices(slice, blueprint)
    return {name: take(tensor, indices[name]) for name, tensor in tree.items()}


def paste(part: Params, onto: Params, slice: Slice, blueprint: Blueprint) -> dict[str, Tensor]:
    """`onto` with the tensors of `part` written at the coordinates the slice holds; new tensors."""
    pasted = dict(onto)
    for name, small in part.items():
        target = onto[name].clone()
        target[place(name, slice, blueprint, str(target.device))] = small
        pasted[name] = target
    return pasted


def place(name: str, slice: Slice, blueprint: Blueprint, device: str = "cpu") -> tuple[Index, ...]:
    """Where the slice lies in a tensor, so that `t[place(…)] = v` and `t[place(…)] += v` work."""
    return _places(slice, blueprint, device)[name]


@lru_cache(maxsize=512)
def _indices(slice: Slice, blueprint: Blueprint) -> dict[str, tuple[Index, ...]]:
    kept, sizes = dict(slice.keep), blueprint.sizes
    tables = {**blueprint.params, **blueprint.buffers}
    with plainly():
        return {n: tuple(index(dim, kept, sizes) for dim in dims) for n, dims in tables.items()}


@lru_cache(maxsize=512)
def _places(slice: Slice, blueprint: Blueprint, device: str) -> dict[str, tuple[Index, ...]]:
    indices = _indices(slice, blueprint)
    with plainly():
        return {n: broadcast(rows, blueprint.shape(n), device) for n, rows in indices.items()}
