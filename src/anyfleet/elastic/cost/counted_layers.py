"""The layers FedPMT's counting rules know: linear ones and convolutions, in one chain."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import lru_cache

from anyfleet.elastic.blueprint import WHOLE, Blueprint, Slice
from anyfleet.elastic.program import BATCH, Dim, Held, Node, held_names, length, value_names

# Their parameters are left out of the count: the rules have no term for them.
_NORMS = frozenset({"batch_norm", "group_norm", "instance_norm", "layer_norm", "rms_norm"})


@dataclass(frozen=True)
class Dense:
    """A fully connected layer. FedDrop's widths are shares of neurons, hence fractions."""

    inputs: float
    outputs: float

    def __post_init__(self) -> None:
        _check_positive(self)


@dataclass(frozen=True)
class Convolution:
    """A convolution: `window` weights for each pair of channels, at `positions` of its output.

    In the terms of specification §2 `window` is s² and `positions` is m²; windows and maps that are not
    square, or not of two dimensions, are as welcome.
    """

    inputs: float
    outputs: float
    window: int
    positions: int

    def __post_init__(self) -> None:
        _check_positive(self)


CountedLayer = Dense | Convolution


def layers_of(blueprint: Blueprint, slice: Slice = WHOLE) -> tuple[CountedLayer, ...]:
    """The layers of a slice at its own width, one for each layer of the blueprint.

    Raises:
        ValueError: The net is not a chain of linear layers and convolutions.
    """
    return _read(blueprint.local(slice))


@lru_cache(maxsize=1024)
def _read(small: Blueprint) -> tuple[CountedLayer, ...]:
    # Apart from the slice: slices of equal shape share one entry.
    found: list[CountedLayer] = []
    for node in reversed(list(_chain(small))):
        weights = [name for name in held_names(node.args) if name in small.params]
        if not weights or _base(node) in _NORMS:
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
    """The calls from the output back to the input, each with a single source."""
    made = {node.name: node for node in blueprint.program.nodes}
    name = blueprint.program.output
    while name in made:
        node = made[name]
        sources = list(value_names((*node.args, *node.options.values())))
        if len(sources) != 1:
            raise _unknown(node, f"joins {len(sources)} earlier results")
        yield node
        name = sources[0]


def _weighted(node: Node, blueprint: Blueprint) -> CountedLayer:
    base, dims = _base(node), node.dims or ()
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
    """The dimensions of the only source of a call."""
    (name,) = value_names(node.args)
    program = blueprint.program
    known = {given.name: given.dims for given in program.inputs}
    known |= {made.name: made.dims for made in program.nodes if made.dims is not None}
    return known[name]


def _base(node: Node) -> str:
    return node.op.split(".")[1] if "." in node.op else node.op


def _unknown(node: Node, problem: str) -> ValueError:
    return ValueError(
        f"FedPMT's rules count chains of linear layers and convolutions: {node.op} in "
        f'{node.where or "the network"!r} {problem}. Use counting="flops".'
    )


def _check_positive(layer: CountedLayer) -> None:
    for field in fields(layer):
        value = getattr(layer, field.name)
        if not 0 < value < math.inf:
            raise ValueError(
                f"{type(layer).__name__}.{field.name} must be a positive number, got {value}."
            )
