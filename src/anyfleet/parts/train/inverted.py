"""Inverted dropout for sub-models: what is left of a layer counts for what is missing."""

import math
from collections.abc import Iterator
from functools import lru_cache

from torch import Tensor

from anyfleet.core.messages import Params
from anyfleet.elastic import Blueprint
from anyfleet.elastic.program import Held, Node, held_names

# Operators that sum over channels with a weight: which of the arguments can be that weight, and
# along which of its dimensions they sum.
_SUMS: dict[str, tuple[tuple[int, int], ...]] = {
    **dict.fromkeys(("linear", "conv1d", "conv2d", "conv3d"), ((1, 1),)),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d"), ((1, 0),)),
    **dict.fromkeys(("matmul", "mm", "bmm"), ((1, -2), (0, -1))),
}


def inverted(params: Params, blueprint: Blueprint) -> dict[str, Tensor]:
    """Return the parameters; every weight that takes in a cut layer is divided by its width.

    That width is the share of the layer's channels that is left. It is the same function as
    dividing that layer's activations where they are summed up (specification §1.4):
    W (h / a) = (W / a) h. What only passes channels on (normalisation, depthwise convolution, the
    skip connection of a residual block) stays as it is, and so does a weight that is also used
    otherwise, such as one tied to an embedding.
    """
    new = {name: params[name] * factor for name, factor in _factors(blueprint).items()}
    return {**params, **new}


@lru_cache(maxsize=256)
def _factors(blueprint: Blueprint) -> dict[str, float]:
    """Return by what to multiply the weights of the sub-model that take in cut layers."""
    uses: dict[str, set[int | None]] = {}
    for node in blueprint.program.nodes:
        for name, dim in _uses(node, blueprint):
            uses.setdefault(name, set()).add(dim)
    alone = {name: dim for name, (dim, *others) in uses.items() if not others}
    found = {n: _missing(blueprint, n, dim) for n, dim in alone.items() if dim is not None}
    return {name: factor for name, factor in found.items() if factor != 1}


def _uses(node: Node, blueprint: Blueprint) -> Iterator[tuple[str, int | None]]:
    """Yield the parameters that a call takes; its weight with the dimension that is summed over."""
    options = _SUMS.get(node.operator, ())
    weight = next(((at, dim) for at, dim in options if isinstance(node.args[at], Held)), None)
    for at, arg in enumerate(node.arguments):
        for name in held_names((arg,)):
            rank = len(blueprint.params.get(name, ()))
            if rank and weight is not None and weight[0] == at:
                yield name, max(weight[1], -rank) % rank
            elif rank:
                yield name, None


def _missing(blueprint: Blueprint, name: str, dim: int) -> float:
    """Return how many times as long a dimension is in the whole model."""
    axes = (blueprint.axes[axis] for axis in blueprint.axes_of(name, dim))
    return math.prod(axis.whole / axis.size for axis in axes)
