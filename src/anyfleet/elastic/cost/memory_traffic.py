"""The cost of a program besides arithmetic: operator calls, and the bytes that operators touch.

On real machines narrow slices do not get faster in proportion to their arithmetic: every call
takes its time, and activation functions, pooling and normalisation wait for memory.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from anyfleet.elastic.blueprint import Blueprint
from anyfleet.elastic.cost.passes import (
    ITEM,
    Shape,
    named,
    needed,
    own,
    shapes,
    tracked,
)
from anyfleet.elastic.execution.interpret import resolve
from anyfleet.elastic.program import Node

# Batch norm that leaves padding out is written out (masked_norm.py): 1100 MB where its input and
# output have 79 MB, counted over the operators that ResNet-18 runs.
_PASSES = {"batch_norm": 14}
# They read a few rows of a table, not all of it.
_LOOKUPS = frozenset({"embedding", "gather", "index_select"})


@dataclass(frozen=True)
class Traffic:
    """Operator calls and bytes of one batch.

    A call counts in the backward pass where a gradient goes through it, with the same bytes again.
    Views are free. An operator that loops inside (a recurrent layer) is one call.
    """

    forward_calls: int
    backward_calls: int
    forward_bytes: int
    backward_bytes: int


@lru_cache(maxsize=4096)
def count(blueprint: Blueprint, first: int = 0, batch: int = 1) -> Traffic:
    """Return the traffic of one batch of the (small) model that trains layers from `first` on."""
    sizes = shapes(blueprint, batch)
    gradients, alive = tracked(blueprint, first), needed(blueprint)
    calls = [node for node in blueprint.program.nodes if not _is_view(node.op)]
    moved = {node.name: _touched(node, sizes) for node in calls}
    back = [node.name for node in calls if own(node) in gradients and node.name in alive]
    return Traffic(len(calls), len(back), sum(moved.values()), sum(moved[name] for name in back))


@lru_cache(maxsize=1024)
def _is_view(op: str) -> bool:
    return op == "getitem" or bool(resolve(op).is_view)


def _touched(node: Node, sizes: Mapping[str, Shape]) -> int:
    """Return the bytes that go in and come out; a list of tensors is as large as its source."""
    read = {name for arg in node.arguments for name in named(arg)}
    incoming = sum(math.prod(sizes[name]) for name in read if name in sizes)
    outgoing = math.prod(sizes[own(node)]) if own(node) in sizes else incoming
    if node.operator in _LOOKUPS:
        incoming = outgoing
    return ITEM * (incoming + outgoing) * _PASSES.get(node.operator, 1)
