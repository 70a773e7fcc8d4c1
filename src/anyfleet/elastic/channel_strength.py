"""The strength of channels: the weights that produce them, and their order by norm."""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from anyfleet.arrays import Floats
from anyfleet.elastic.blueprint import Blueprint
from anyfleet.elastic.program import Arg, Held, Items, Node, Value, value_names
from anyfleet.elastic.slicing import Params
from anyfleet.formulas import anycost_channel_norms, anycost_channel_order

# Where an operator takes its weights, and which of their dimensions is that of the output.
_FIRST, _SECOND, _PRODUCT = ((1, 0),), ((1, 1),), ((0, -2), (1, -1))
_OUTPUTS: Mapping[str, tuple[tuple[int, int], ...]] = {
    **dict.fromkeys(("linear", "conv1d", "conv2d", "conv3d"), _FIRST),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d"), _SECOND),
    **dict.fromkeys(("matmul", "mm", "bmm"), _PRODUCT),
    "embedding": ((0, 1),),
}
_TURNED = frozenset({"t", "numpy_T"})
_SWAPPED = frozenset({"transpose", "swapaxes"})


def channel_order(params: Params, blueprint: Blueprint) -> dict[str, tuple[int, ...]]:
    """Return the indices of every axis that may be cut, by descending norm (specification §1.12.1).

    The norm is that of the incoming weights; where several layers produce an axis, their squared
    norms add up. Biases, scales of norms and whatever else is added to or multiplied with
    activations do not count. Ties, and axes that no weight produces, stay in natural order. Other
    names than those of the blueprint are ignored.
    """
    found: dict[str, list[Floats]] = {}
    for name, position in producers(blueprint):
        for axis, rows in _rows(params[name], position, name, blueprint):
            found.setdefault(axis, []).append(rows)
    return {
        name: _ordered(found[name]) if name in found else tuple(range(axis.size))
        for name, axis in blueprint.axes.items()
        if axis.free
    }


def _ordered(producers: list[Floats]) -> tuple[int, ...]:
    return tuple(anycost_channel_order(anycost_channel_norms(producers)).tolist())


def _rows(
    weight: Tensor, position: int, name: str, blueprint: Blueprint
) -> Iterator[tuple[str, Floats]]:
    """Yield each axis of an output dimension, with the norms of the weights of its indices."""
    others = [i for i in range(weight.ndim) if i != position]
    norms = torch.linalg.vector_norm(weight.detach(), dim=others, dtype=torch.float64).cpu().numpy()
    start = 0
    for product in blueprint.dims(name)[position]:
        shape = [blueprint.sizes[axis] for axis in product]
        part = norms[start : start + int(np.prod(shape))].reshape(shape)
        start += part.size
        for place, axis in enumerate(product):
            yield axis, np.moveaxis(part, place, 0).reshape(shape[place], -1)


class _Weight(NamedTuple):
    """A parameter on its way to where it is used, and what each dimension of it was at first."""

    name: str
    dims: tuple[int, ...]


@lru_cache(maxsize=256)
def producers(blueprint: Blueprint) -> tuple[tuple[str, int], ...]:
    """Return (parameter, dimension) pairs: the output dimension of every weight.

    Weights of linear layers, convolutions, embeddings and matrix products; also transposed or
    changed element by element before. Each counts once, however often it is applied.
    """
    weights: dict[str, _Weight] = {}
    active = {given.name for given in blueprint.program.inputs}
    found: dict[tuple[str, int], None] = {}
    for node in blueprint.program.nodes:
        found |= dict.fromkeys(_produced(node, weights, active, blueprint))
        moved = _moved(node, weights, blueprint)
        if moved is not None:
            weights[node.name] = moved
        if active.intersection(value_names(node.arguments)):
            active.add(node.name)
    return tuple(found)


def _produced(
    node: Node, weights: Mapping[str, _Weight], active: set[str], blueprint: Blueprint
) -> Iterator[tuple[str, int]]:
    outputs = _OUTPUTS.get(node.operator, ())
    if outputs is _PRODUCT and not active.intersection(value_names(node.args)):
        return  # weights multiplied with each other are no layer
    for argument, dimension in outputs:
        weight = _weight(node.args[argument], weights, blueprint)
        if weight is not None and len(weight.dims) > 1:
            yield weight.name, weight.dims[dimension]


def _weight(arg: Arg, weights: Mapping[str, _Weight], blueprint: Blueprint) -> _Weight | None:
    if isinstance(arg, Held) and arg.name in blueprint.params:
        return _Weight(arg.name, tuple(range(len(blueprint.params[arg.name]))))
    return weights.get(arg.name) if isinstance(arg, Value) else None


def _moved(node: Node, weights: Mapping[str, _Weight], blueprint: Blueprint) -> _Weight | None:
    """Return the weight that a node transposes or changes element by element, or None."""
    weight = _weight(node.args[0], weights, blueprint) if node.args else None
    if weight is None:
        return None
    dims, operator = weight.dims, node.operator
    if operator in _OUTPUTS:
        return None
    if operator in _TURNED:
        return _Weight(weight.name, dims[::-1])
    if operator in _SWAPPED:
        one, other = (int(arg) % len(dims) for arg in node.args[1:] if isinstance(arg, int))
        swapped = {one: other, other: one}
        return _Weight(weight.name, tuple(dims[swapped.get(i, i)] for i in range(len(dims))))
    if operator == "permute" and isinstance(node.args[1], Items):
        order = [int(item) for item in node.args[1].items if isinstance(item, int)]
        return _Weight(weight.name, tuple(dims[i] for i in order))
    table = blueprint.params[weight.name]
    return weight if node.dims == tuple(table[i] for i in dims) else None
