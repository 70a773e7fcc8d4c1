"""Calls of a program that let one sample of a minibatch see another, apart from batch norm.

Everywhere else the rows of a minibatch may be padded, because a row that is no sample reaches no
other row. A network with such a call runs on its samples alone: minibatches are not padded and
devices are not stacked.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from anyfleet.elastic.batch_rows import Place, outside, places
from anyfleet.elastic.blueprint import Blueprint
from anyfleet.elastic.program import (
    BATCH,
    Arg,
    Dim,
    Held,
    Items,
    Linear,
    Node,
    Program,
    Size,
    Value,
    length,
    value_names,
)
from anyfleet.elastic.tracing.rules import RULES, elementwise

Dims = tuple[Dim, ...]
Operand = Value | Held

# They move dimensions or make a tensor of a shape; every row stays its own.
_UNMOVED = """
unsqueeze squeeze expand expand_as permute transpose swapaxes movedim t numpy_T tril triu
new_zeros new_ones new_full new_empty type_as detach contiguous clone alias lift_fresh_copy
arange eye
"""
_RESHAPES = """
view reshape _unsafe_view flatten unflatten view_as reshape_as repeat_interleave
"""
_HARMLESS = frozenset(_UNMOVED.split())
_PASSED = frozenset(("to", "_to_copy", "unsqueeze", "expand", "clone", "detach"))
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
# Matrices in the last two dimensions, all of whose entries meet.
_MATRICES = frozenset(
    ("cholesky", "det", "inverse", "logdet", "matrix_power", "pinverse", "slogdet")
)
_SPATIAL = re.compile(r"([123])d(?:_|$)")


@dataclass(frozen=True)
class _Call:
    """A call with its arguments by name, and the dimensions of what goes in and comes out."""

    node: Node
    base: str
    given: Mapping[str, Any]
    numbers: frozenset[str]  # arguments that are numbers rather than sizes
    operands: tuple[Dims, ...]
    named: Mapping[str, Dims]
    out: tuple[Dims, ...]
    sizes: Mapping[str, int]
    counting: frozenset[str]  # values that number the samples: 0, 1, 2 …

    def at(self, dims: Dims) -> tuple[Place, ...]:
        return places(dims, self.sizes)

    @property
    def source(self) -> Dims:
        return self.operands[0]


@lru_cache(maxsize=256)
def mixed_rows(blueprint: Blueprint, *, evaluating: bool = False) -> tuple[str, ...]:
    """Return one line for every call on the way to the output through which samples mix.

    It reads the program of training, or the one of evaluation.
    """
    program = blueprint.evaluated if evaluating else blueprint.program
    sizes, known = blueprint.sizes, _known(program, blueprint)
    counting: set[str] = set()
    found: list[str] = []
    live = _live(program)
    for node in (node for node in program.nodes if node.name in live):
        if node.op == "getitem":
            continue
        call = _call(node, program, known, sizes, frozenset(counting))
        if _counts(call):
            counting.add(node.name)
        if reason := _reason(call):
            found.append(f"{call.base} ({node.where or 'the outermost module'}) {reason}")
    return tuple(dict.fromkeys(found))


def _known(program: Program, blueprint: Blueprint) -> dict[Operand, Dims]:
    """Return the dimensions of every value, parameter, buffer and constant."""
    found: dict[Operand, Dims] = {Value(given.name): given.dims for given in program.inputs}
    found |= {Value(node.name): node.dims for node in program.nodes if node.dims is not None}
    found |= {Held(name): dims for name, dims in {**blueprint.params, **blueprint.buffers}.items()}
    return found | {Held(name): constant.dims for name, constant in program.constants.items()}


def _live(program: Program) -> set[str]:
    """Return what the output or a buffer depends on."""
    live = {program.output, *(value for _, value in program.updates)}
    for node in reversed(program.nodes):
        if node.name in live:
            live |= set(value_names(node.arguments))
    return live


def _call(
    node: Node,
    program: Program,
    known: Mapping[Operand, Dims],
    sizes: Mapping[str, int],
    counting: frozenset[str],
) -> _Call:
    _, base, overload = node.op.split(".")
    schema: Any = getattr(getattr(torch.ops.aten, base), overload)._schema  # noqa: SLF001
    arguments = schema.arguments
    given = {argument.name: argument.default_value for argument in arguments}
    given |= dict(zip((a.name for a in arguments), node.args, strict=False)) | dict(node.options)
    named = {
        name: known[arg]
        for name, arg in given.items()
        if isinstance(arg, Value | Held) and arg in known
    }
    operands = tuple(
        known[leaf]
        for arg in given.values()
        for leaf in _leaves(arg)
        if isinstance(leaf, Value | Held) and leaf in known
    )
    out = (node.dims,) if node.dims is not None else _parts(node, program)
    numbers = frozenset(a.name for a in arguments if not _is_size(a))
    return _Call(node, base, given, numbers, operands, named, out, sizes, counting)


def _is_size(argument: Any) -> bool:
    """Return whether an argument takes whole numbers only: sizes, positions and counts."""
    text = str(argument.real_type).replace("Optional[", "").replace("List[", "")
    return text.rstrip("]") == "int"


def _parts(node: Node, program: Program) -> tuple[Dims, ...]:
    """Return the dimensions of those results of a call that are used."""
    return tuple(
        other.dims
        for other in program.nodes
        if other.op == "getitem" and other.args[0] == Value(node.name) and other.dims is not None
    )


def _leaves(arg: Any) -> Iterator[Arg]:
    if isinstance(arg, Items | list | tuple):  # a default is a plain list
        for item in arg.items if isinstance(arg, Items) else arg:
            yield from _leaves(item)
    else:
        yield arg


def _counts(call: _Call) -> bool:
    """Return whether the result numbers the samples, so that row i holds i."""
    if call.base == "arange":
        start, step = call.given.get("start", 0), call.given.get("step", 1)
        return bool(start == 0 and step == 1 and call.given["end"] == Size(((BATCH,),)))
    passed = call.base in _PASSED or call.base in _RESHAPES.split()
    first = call.node.args[0]
    return passed and isinstance(first, Value) and first.name in call.counting


def _reason(call: _Call) -> str:
    """Return how samples meet in a call; empty if each stays by itself."""
    if _number(call):
        return "computes with the number of samples"
    inputs = [dims for dims in call.operands if call.at(dims)]
    if not inputs and any(len(call.at(dims)) > 1 for dims in call.out):
        return "compares samples with each other"  # a table of ones, [B, B]
    if not inputs or call.base in _HARMLESS:
        return ""
    if any(len(call.at(dims)) > 1 for dims in inputs):
        return ""  # said where they first met
    if any(len(call.at(dims)) > 1 for dims in call.out):
        return "compares samples with each other"
    rule = _RULES.get(call.base)
    if rule is None and (call.base.startswith("linalg_") or call.base in _MATRICES):
        rule = _matrix
    if rule is None and (RULES.get(call.base) is elementwise or "other" in call.named):
        rule = _aligned
    if rule is None and (spatial := _SPATIAL.search(call.base)):
        count = int(spatial.group(1))
        return _over(call, range(len(call.source) - count, len(call.source)))
    return (rule or _other)(call)


def _number(call: _Call) -> bool:
    """Return whether the batch is used as a number: as a value rather than as a size."""
    everything = (leaf for arg in call.given.values() for leaf in _leaves(arg))
    if any(isinstance(leaf, Linear) for leaf in everything):
        return True
    if call.base in ("arange", "eye"):
        return False
    named = call.numbers | ({"steps"} if call.base == "linspace" else set())
    leaves = (leaf for name in named for leaf in _leaves(call.given.get(name)))
    return any(isinstance(leaf, Size) and _has_batch(leaf.dim) for leaf in leaves)


def _has_batch(dim: Dim) -> bool:
    return any(BATCH in product for product in dim)


def _over(call: _Call, dims: Any) -> str:
    """Return a reason if one of these dimensions of the first operand holds the batch."""
    rank = len(call.source)
    chosen = {int(d) % rank for d in dims if -rank <= int(d) < rank}
    meets = any(place.dim in chosen for place in call.at(call.source))
    return "runs over the batch" if meets else ""


def _other(call: _Call) -> str:
    """Judge a call by its `dim`, and by whether the batch is still there afterwards."""
    if call.base in ("take", "masked_scatter", "put"):
        return "picks samples"
    for name in ("dim", "dims", "dimension"):
        if name in call.given:
            chosen = [leaf for leaf in _leaves(call.given[name]) if leaf is not None]
            everything = range(len(call.source))
            if reason := _over(call, chosen or everything):
                return reason
    # A call with another tensor: the batch of each is in the same place of the result, or gone.
    before = {(p.outer, p.inner) for dims in call.operands for p in call.at(dims)}
    after = {(p.outer, p.inner) for dims in call.out for p in call.at(dims)}
    if not after:
        return "reduces the batch"
    return "" if after <= before else "moves samples in a way that is not known"


def _aligned(call: _Call) -> str:
    """Judge an elementwise call: the samples of all operands meet one to one."""
    found = {
        (place.dim - len(dims), place.outer, place.inner)
        for dims in call.operands
        for place in call.at(dims)
    }
    return "" if len(found) < 2 else "compares samples with each other"


def _reshaped(call: _Call) -> str:
    """Judge a reshape: what lay around the samples, and inside them, still does."""
    (result,) = call.out
    before, after = (
        {outside(dims, place, call.sizes) for place in call.at(dims)}
        for dims in (call.source, result)
    )
    return "" if before == after else "cuts rows in another way"


def _product(call: _Call) -> str:
    left, right = call.operands[:2]
    contracted = [
        *(place for place in call.at(left) if place.dim == len(left) - 1),
        *(place for place in call.at(right) if place.dim == max(0, len(right) - 2)),
    ]
    if contracted:
        return "sums over the batch"
    # Leading dimensions meet one to one, counted from the right.
    met = {
        (place.dim - len(dims), place.outer, place.inner)
        for dims in (left, right)
        for place in call.at(dims)
        if place.dim < len(dims) - 2
    }
    return "" if len(met) < 2 else "compares samples with each other"


def _linear(call: _Call) -> str:
    x, weight = call.operands[:2]
    if any(place.dim == len(x) - 1 for place in call.at(x)):
        return "sums over the batch"
    return "compares samples with each other" if call.at(x) and call.at(weight) else ""


def _convolution(call: _Call) -> str:
    x, weight = call.named["input"], call.named["weight"]
    channel = len(x) - len(weight) + 1
    groups = call.given["groups"]
    by_sample = isinstance(groups, Size) and _has_batch(groups.dim)
    for place in call.at(x):
        if place.dim > channel or (place.dim == channel and not by_sample):
            return "runs over the batch"
    return "compares samples with each other" if call.at(weight) and not by_sample else ""


def _attention(call: _Call) -> str:
    places_in = [(dims, call.at(dims)) for dims in call.operands[:3]]
    if any(place.dim >= len(dims) - 2 for dims, found in places_in for place in found):
        return "runs over the batch"
    met = {(p.dim - len(dims), p.outer, p.inner) for dims, found in places_in for p in found}
    return "" if len(met) < 2 else "compares samples with each other"


def _instance_norm(call: _Call) -> str:
    return _over(call, range(2, len(call.source)))


def _group_norm(call: _Call) -> str:
    return _over(call, range(1, len(call.source)))


def _layer_norm(call: _Call) -> str:
    count = len(list(_leaves(call.given["normalized_shape"])))
    return _over(call, range(len(call.source) - count, len(call.source)))


def _recurrent(call: _Call) -> str:
    x = call.source
    own = 0 if call.given["batch_first"] else 1
    return "" if all(p.dim == own and len(x) == 3 for p in call.at(x)) else "runs over the batch"


def _matrix(call: _Call) -> str:
    if "dim" in call.given:
        return _other(call)
    rank = len(call.source)
    return _over(call, range(rank - 2, rank)) or _other(call)


def _index(call: _Call) -> str:
    """Judge x[i, j]: the batch may only be indexed by the numbers of the samples."""
    indices = list(_leaves(call.given["indices"]))
    for place in call.at(call.source):
        index = indices[place.dim] if place.dim < len(indices) else None
        own = isinstance(index, Value) and index.name in call.counting
        if index is not None and not (own and (place.outer, place.inner) == (1, 1)):
            return "picks samples"
    return ""


def _einsum(call: _Call) -> str:
    """Judge a sum of products: all batches have one letter, and the result has it too."""
    equation = str(call.given["equation"]).replace(" ", "")
    before, arrow, after = equation.partition("->")
    letters = {
        _letters(term, len(dims))[place.dim]
        for term, dims in zip(before.split(","), call.operands, strict=True)
        for place in call.at(dims)
    }
    if arrow:
        kept = all(letter in after or ("..." in after and letter[0] == ".") for letter in letters)
    else:
        kept = all(before.count(letter) < 2 for letter in letters)
    return "" if len(letters) == 1 and kept else "sums over the batch"


def _letters(term: str, rank: int) -> list[str]:
    """Return the letter of each dimension; those of an ellipsis are .1, .2 … from the right."""
    head, _, tail = term.partition("...")
    return [*head, *(f".{n}" for n in range(rank - len(head) - len(tail), 0, -1)), *tail]


def _narrowed(call: _Call) -> str:
    """Judge a slice: all samples, or whole views of all of them."""
    (result,) = call.out
    at = int(call.given["dim"]) % len(call.source)
    if all(place.dim != at for place in call.at(call.source)):
        return ""
    before, after = (length(dims[at], call.sizes) for dims in (call.source, result))
    if call.source[at] == result[at] and before == after:
        return ""
    return "" if _views(call, at, (result,)) else "picks samples"


def _divided(call: _Call) -> str:
    at = int(call.given["dim"]) % len(call.source)
    if all(place.dim != at for place in call.at(call.source)):
        return ""
    return "" if call.base != "unbind" and _views(call, at, call.out) else "picks samples"


def _views(call: _Call, at: int, parts: tuple[Dims, ...]) -> bool:
    """Return whether each part holds every sample, with as many entries inside it as before."""
    (source,) = (place for place in call.at(call.source) if place.dim == at)
    return bool(parts) and all(
        [place.inner for place in call.at(dims) if place.dim == at] == [source.inner]
        for dims in parts
    )


def _joined(call: _Call) -> str:
    """Judge a concatenation: along the batch, every part holds all samples in the same way."""
    at = int(call.given["dim"]) % len(call.source)
    (result,) = call.out
    found = [call.at(dims) for dims in call.operands]
    along = [place.inner for own in found for place in own if place.dim == at]
    if not along:
        met = {place for own in found for place in own}
        return "" if len(met) == 1 else "compares samples with each other"
    if len(along) < len(found) or len(set(along)) > 1:
        return "puts samples behind one another"
    end = [place for place in call.at(result) if place.dim == at]
    return "" if [place.inner for place in end] == along[:1] else "puts samples behind one another"


def _stacked(call: _Call) -> str:
    met = {place for dims in call.operands for place in call.at(dims)}
    return "" if len(met) == 1 else "compares samples with each other"


_Rule = Callable[[_Call], str]
_RULES: Mapping[str, _Rule] = {
    **dict.fromkeys(_RESHAPES.split(), _reshaped),
    **dict.fromkeys(("matmul", "mm", "bmm", "mv", "dot"), _product),
    **dict.fromkeys(_RECURRENT, _recurrent),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _convolution),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _convolution),
    **dict.fromkeys(("slice", "narrow"), _narrowed),
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "unbind", "tensor_split"), _divided),
    **dict.fromkeys(("cat", "concat"), _joined),
    **dict.fromkeys(("index", "index_put"), _index),
    **dict.fromkeys(("layer_norm", "rms_norm"), _layer_norm),
    # Its statistics are masked, wherever the batch lies.
    "batch_norm": lambda _: "",
    "einsum": _einsum,
    "group_norm": _group_norm,
    "instance_norm": _instance_norm,
    "linear": _linear,
    "scaled_dot_product_attention": _attention,
    "stack": _stacked,
}
