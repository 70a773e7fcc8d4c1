"""The forward and the backward pass of a program: shapes, and which tensors have a gradient.

Results and parameters share one namespace here; a leading dot marks a result.
"""

from collections.abc import Mapping
from functools import lru_cache

from anyfleet.elastic.blueprint import Blueprint
from anyfleet.elastic.program import BATCH, Arg, Dim, Node, held_names, length, value_names

ITEM = 4  # bytes of a number: models are trained in float32
Shape = tuple[int, ...]

_WITHOUT = """
    argmax argmin bernoulli bitwise_and bitwise_not bitwise_or detach empty_like eq exponential
    floor full_like ge gt le logical_and logical_not logical_or lt ne ones_like rand_like
    randn_like sign uniform zeros_like
"""
_NO_GRADIENT = frozenset(_WITHOUT.split())


def own(node: Node) -> str:
    """Return the name of a node's result."""
    return "." + node.name


def named(arg: Arg) -> set[str]:
    """Return the names of the tensors in an argument."""
    return {*held_names((arg,)), *("." + name for name in value_names((arg,)))}


@lru_cache(maxsize=4096)
def tracked(blueprint: Blueprint, first: int) -> frozenset[str]:
    """Return the tensors that have a gradient when the layers from `first` on are trained."""
    found = set(blueprint.trained(first))
    for node in blueprint.program.nodes:
        if node.operator not in _NO_GRADIENT and any(named(arg) & found for arg in node.arguments):
            found.add(own(node))
    return frozenset(found)


@lru_cache(maxsize=256)
def needed(blueprint: Blueprint) -> frozenset[str]:
    """Return the nodes that the output depends on: the backward pass comes to no other."""
    names = {blueprint.program.output}
    for node in reversed(blueprint.program.nodes):
        if node.name in names:
            names.update(value_names(node.arguments))
    return frozenset(names)


def shapes(blueprint: Blueprint, batch: int) -> dict[str, Shape]:
    """Return the shape of everything that is one tensor."""
    sizes = {**blueprint.sizes, BATCH: batch}

    def shape(dims: tuple[Dim, ...]) -> Shape:
        return tuple(length(dim, sizes) for dim in dims)

    program = blueprint.program
    held: Mapping[str, tuple[Dim, ...]] = {
        **blueprint.params,
        **blueprint.buffers,
        **{name: constant.dims for name, constant in program.constants.items()},
    }
    return {
        **{name: shape(dims) for name, dims in held.items()},
        **{"." + given.name: shape(given.dims) for given in program.inputs},
        **{own(node): shape(node.dims) for node in program.nodes if node.dims is not None},
    }
