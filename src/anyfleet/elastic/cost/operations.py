"""Operations of one local step on a slice, by the counting rules of FedPMT (specification §2).

The rules know networks that are one chain of linear layers and convolutions. This module reads
the layers of such a network from its blueprint; `anyfleet.formulas.fedpmt` counts.
"""

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Literal

from anyfleet.elastic.blueprint import WHOLE, Blueprint, Slice
from anyfleet.elastic.program import BATCH, Dim, Held, Node, held_names, length, value_names
from anyfleet.formulas.fedpmt import (
    Convolution,
    CountedLayer,
    Dense,
    Rule,
    fedpmt_complexity,
    fedpmt_forward_complexity,
)

Counting = Literal["flops", "paper", "declared", "per_batch"]  # "flops": no rule of FedPMT

# Their parameters are left out of the count: the rules have no term for them.
_NORMS = frozenset({"batch_norm", "group_norm", "instance_norm", "layer_norm", "rms_norm"})


def operations(blueprint: Blueprint, slice: Slice, batch: int, rule: Rule) -> float:
    """Return the operations of one mini-batch on a slice, trained from its first layer on."""
    return _operations(blueprint, blueprint.local(slice), slice.first_trained_layer, batch, rule)


@lru_cache(maxsize=4096)
def forward_operations(blueprint: Blueprint, slice: Slice, batch: int, rule: Rule) -> float:
    """Return the operations of one mini-batch on a slice that runs forward only."""
    whole = layers_of(blueprint)
    return fedpmt_forward_complexity(layers_of(blueprint, slice), batch, rule, whole=whole)


@lru_cache(maxsize=4096)
def _operations(
    blueprint: Blueprint, small: Blueprint, first: int, batch: int, rule: Rule
) -> float:
    # Apart from the slice: slices of equal shape share one entry.
    whole = layers_of(blueprint)
    return fedpmt_complexity(layers_of(small), batch, rule, first=first, whole=whole)


def layers_of(blueprint: Blueprint, slice: Slice = WHOLE) -> tuple[CountedLayer, ...]:
    """Return the layers of a slice at its own width, one for each layer of the blueprint.

    Raises:
        ValueError: The network is not a chain of linear layers and convolutions.
    """
    return _read(blueprint.local(slice))


@lru_cache(maxsize=1024)
def _read(small: Blueprint) -> tuple[CountedLayer, ...]:
    # Apart from the slice: slices of equal shape share one entry.
    found: list[CountedLayer] = []
    for node in reversed(list(_chain(small))):
        weights = [name for name in held_names(node.args) if name in small.params]
        if not weights or node.operator in _NORMS:
            continue
        layer = _weighted(node, small)
        number = len(found)
        if number >= len(small.layers) or weights[0] not in small.layers[number].params:
            raise _unknown(node, f"stands where layer {number} of the model should be")
        found.append(layer)
    if len(found) != len(small.layers):
        raise ValueError(
            f"Only {len(found)} of {len(small.layers)} layers lead to the output as linear layers "
            'or convolutions, so FedPMT\'s rules cannot count them. Use counting="flops".'
        )
    return tuple(found)


def _chain(blueprint: Blueprint) -> Iterator[Node]:
    """Yield the calls from the output back to the input, each with a single source."""
    made = {node.name: node for node in blueprint.program.nodes}
    name = blueprint.program.output
    while name in made:
        node = made[name]
        sources = list(value_names(node.arguments))
        if len(sources) != 1:
            raise _unknown(node, f"joins {len(sources)} earlier results")
        yield node
        name = sources[0]


def _weighted(node: Node, blueprint: Blueprint) -> CountedLayer:
    base, dims = node.operator, node.dims or ()
    if base not in ("linear", "conv1d", "conv2d", "conv3d") or not isinstance(node.args[1], Held):
        raise _unknown(node, "is neither a linear layer, a convolution nor a norm")
    if node.args[1].name in blueprint.frozen:
        raise _unknown(node, "has frozen weights")
    outputs, inputs, *window = blueprint.shape(node.args[1].name)
    after = [length(dim, blueprint.sizes) for dim in dims[2:]]
    if dims[:1] != (((BATCH,),),) or (base == "linear" and after):
        raise _unknown(node, "is applied more than once to each sample")
    if base == "linear":
        return Dense(inputs, outputs)
    if length(_dims_before(node, blueprint)[1], blueprint.sizes) != inputs:
        raise _unknown(node, "has groups of channels")
    return Convolution(inputs, outputs, math.prod(window), math.prod(after))


def _dims_before(node: Node, blueprint: Blueprint) -> tuple[Dim, ...]:
    """Return the dimensions of the only source of a call."""
    (name,) = value_names(node.args)
    program = blueprint.program
    known = {given.name: given.dims for given in program.inputs}
    known |= {made.name: made.dims for made in program.nodes if made.dims is not None}
    return known[name]


def _unknown(node: Node, problem: str) -> ValueError:
    return ValueError(
        f"FedPMT's rules count chains of linear layers and convolutions: {node.op} in "
        f'{node.where or "the network"!r} {problem}. Use counting="flops".'
    )
