"""The work of a program in FLOP: forward, and backward down to the first trained layer.

Most calls are counted from their shapes by a rule. A call without one runs on tensors without
data, and torch counts what it is made of.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from anyfleet.elastic.blueprint import Blueprint
from anyfleet.elastic.cost.passes import Shape, named, needed, own, shapes, tracked
from anyfleet.elastic.execution.interpret import Getter, caller, held
from anyfleet.elastic.execution.modes import STATIC, Run
from anyfleet.elastic.plain_tensors import plain_tensors
from anyfleet.elastic.program import BATCH, Arg, Held, Items, Node, Value
from anyfleet.elastic.tracing.rules import RULES

# Operators without an axis rule that move and compare, but multiply nothing.
_MOVING = """
    acos acosh addcdiv addcmul argsort asin asinh atan atan2 atanh ceil channel_shuffle cosh
    cosine_similarity count_nonzero cummax cummin cumprod diag diag_embed diagonal diff erfc
    erfinv exp2 expand_as fmod frac gather getitem glu grid_sampler_2d gumbel_softmax hardshrink
    im2col index index_add index_copy index_fill index_put index_select isfinite isinf isnan
    kthvalue lerp log10 log2 logaddexp masked_scatter masked_select median meshgrid mode
    moveaxis movedim nan_to_num narrow_copy nll_loss nll_loss_nd one_hot pixel_shuffle
    pixel_unshuffle remainder repeat repeat_interleave roll rot90 round scatter scatter_add
    searchsorted sinc sinh softshrink sort take take_along_dim tan tile topk trunc unfold
    upsample_bicubic2d view_as xlogy
"""
_IDLE = frozenset(_MOVING.split())


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of one batch; a multiply-add counts as two."""

    forward: int
    backward: int


@dataclass(frozen=True)
class Contraction:
    """The work of one product of operands: forward, and for the gradient of each operand."""

    forward: int
    gradients: tuple[tuple[Arg, int], ...]
    # Work of the backward pass that is there once for all operands.
    again: int = 0


@lru_cache(maxsize=4096)
def count(blueprint: Blueprint, first: int = 0, batch: int = 1) -> Flops:
    """Return the FLOP of one batch of the (small) model that trains the layers from `first` on."""
    sizes = {**blueprint.sizes, BATCH: batch}
    known = shapes(blueprint, batch)
    gradients, alive = tracked(blueprint, first), needed(blueprint)
    forward = backward = 0
    for node in blueprint.program.nodes:
        work = _work(node, known, sizes)
        if work is None:
            continue
        forward += work.forward
        if own(node) in gradients and node.name in alive:
            backward += work.again + sum(n for arg, n in work.gradients if named(arg) & gradients)
    return Flops(forward, backward)


def uncounted(blueprint: Blueprint) -> tuple[Node, ...]:
    """Return the calls whose work nobody knows how to count."""
    sizes = {**blueprint.sizes, BATCH: 2}
    known = shapes(blueprint, 2)
    nodes = blueprint.program.nodes
    return tuple(n for n in nodes if _is_unknown(n) and _work(n, known, sizes) is None)


def _work(node: Node, shapes: Mapping[str, Shape], sizes: Mapping[str, int]) -> Contraction | None:
    """Return the work of a call, by rule or as torch counts it; None if there is none to count."""
    rule = _RULES.get(node.operator)
    if rule is not None:
        return rule(node, shapes)
    if not _is_unknown(node):
        return None
    return _measured(node, shapes, sizes)


def _is_unknown(node: Node) -> bool:
    name = node.operator
    return name not in _RULES and name not in RULES and name not in _IDLE


def _shape(arg: Arg, shapes: Mapping[str, Shape]) -> Shape:
    """Return the shape of an operand."""
    if isinstance(arg, Held):
        return shapes[arg.name]
    if isinstance(arg, Value):
        return shapes["." + arg.name]
    raise TypeError(f"{arg!r} is not a tensor")


def _weighted(node: Node, shapes: Mapping[str, Shape]) -> Contraction:
    """Count a linear layer or a convolution: an output element sums over a row of the weight."""
    weight = _shape(node.args[1], shapes)
    work = 2 * math.prod(shapes[own(node)]) * math.prod(weight[1:])
    return Contraction(work, ((node.args[0], work), (node.args[1], work)))


def _transposed(node: Node, shapes: Mapping[str, Shape]) -> Contraction:
    weight = _shape(node.args[1], shapes)
    work = 2 * math.prod(_shape(node.args[0], shapes)) * math.prod(weight[1:])
    return Contraction(work, ((node.args[0], work), (node.args[1], work)))


def _product(node: Node, shapes: Mapping[str, Shape]) -> Contraction:
    inner = _shape(node.args[0], shapes)[-1]
    work = 2 * math.prod(shapes[own(node)]) * inner
    return Contraction(work, ((node.args[0], work), (node.args[1], work)))


def _added(node: Node, shapes: Mapping[str, Shape]) -> Contraction:
    """Count a product of the second and third operand, added to the first."""
    inner = _shape(node.args[1], shapes)[-1]
    work = 2 * math.prod(shapes[own(node)]) * inner
    return Contraction(work, ((node.args[1], work), (node.args[2], work)))


def _bilinear(node: Node, shapes: Mapping[str, Shape]) -> Contraction:
    """Count one operand that meets the weight, and the result that meets the other operand."""
    weight = _shape(node.args[2], shapes)
    work = 2 * math.prod(shapes[own(node)][:-1]) * weight[0] * (weight[1] + 1) * weight[2]
    return Contraction(work, tuple((arg, work) for arg in node.args[:3]))


def _attention(node: Node, shapes: Mapping[str, Shape]) -> Contraction:
    """Count the scores and the weighted sum.

    The backward pass of the fused kernel computes the scores again. With dropout the attention is
    written out, and the scores are kept.
    """
    query, key, value = (_shape(arg, shapes) for arg in node.args[:3])
    rows = 2 * math.prod(query[:-1]) * key[-2]
    scores, mixed = rows * query[-1], rows * value[-1]
    kept = 2 if node.args[4] else 3
    return Contraction(scores + mixed, (), again=kept * scores + 2 * mixed)


def _recurrent(node: Node, shapes: Mapping[str, Shape]) -> Contraction:
    """Count every weight matrix once per step and sample."""
    weights = node.args[2]
    matrices = weights.items if isinstance(weights, Items) else ()
    numel = sum(math.prod(s) for s in (_shape(w, shapes) for w in matrices) if len(s) == 2)
    work = 2 * math.prod(_shape(node.args[0], shapes)[:-1]) * numel
    return Contraction(work, (), again=2 * work)


_RULES: Mapping[str, Callable[[Node, Mapping[str, Shape]], Contraction]] = {
    "linear": _weighted,
    "conv1d": _weighted,
    "conv2d": _weighted,
    "conv3d": _weighted,
    "conv_transpose1d": _transposed,
    "conv_transpose2d": _transposed,
    "matmul": _product,
    "mm": _product,
    "bmm": _product,
    "mv": _product,
    "dot": _product,
    "addmm": _added,
    "addmv": _added,
    "baddbmm": _added,
    "bilinear": _bilinear,
    "scaled_dot_product_attention": _attention,
    "lstm": _recurrent,
    "gru": _recurrent,
    "rnn_tanh": _recurrent,
    "rnn_relu": _recurrent,
}


# --- calls without a rule ------------------------------------------------------------------------

Operand = Value | Held
Operands = dict[Operand, Tensor]
Call = Callable[[dict[str, Tensor]], Any]


def _measured(
    node: Node, shapes: Mapping[str, Shape], sizes: Mapping[str, int]
) -> Contraction | None:
    """Return the work of a call as torch counts it on tensors without data.

    None if the call cannot be run alone, or if torch counts nothing in it. `shapes` has parameters,
    buffers and constants by name and results by name after a dot.
    """
    # One that is used twice has both its gradients counted at once.
    operands = tuple(dict.fromkeys(_operands(node.arguments)))
    meta = torch.device("meta")
    run = Run(STATIC, sizes[BATCH], None, None, torch.float32, meta, {})
    try:
        call = partial(_call, caller(node, sizes), run)
        with plain_tensors(), torch.enable_grad():
            empty = {arg: torch.empty(_shape(arg, shapes), device=meta) for arg in operands}
            forward = _forward(call, empty)
            gradients = tuple((arg, _backward(call, empty, arg)) for arg in operands)
    except (RuntimeError, LookupError, TypeError, ValueError):
        # An index or a mask that is not a number, for one: nothing to multiply there.
        return None
    return Contraction(forward, gradients) if forward else None


def _operands(args: tuple[Arg, ...]) -> Iterator[Operand]:
    for arg in args:
        if isinstance(arg, Value | Held):
            yield arg
        elif isinstance(arg, Items):
            yield from _operands(arg.items)


def _call(getter: Getter, run: Run, values: dict[str, Tensor]) -> Any:
    return getter(values, run)


def _forward(call: Call, operands: Operands) -> int:
    counter = FlopCounterMode(display=False)
    with counter:
        call({_name(arg): tensor for arg, tensor in operands.items()})
    return int(counter.get_total_flops())


def _backward(call: Call, operands: Operands, of: Operand) -> int:
    """Return the work for the gradient of one operand."""
    leaf = operands[of].clone().requires_grad_()
    values = {_name(arg): tensor for arg, tensor in operands.items()} | {_name(of): leaf}
    results = call(values)
    first: Tensor = results if isinstance(results, Tensor) else results[0]
    counter = FlopCounterMode(display=False)
    with counter:
        torch.autograd.grad(first.sum(), leaf, allow_unused=True)
    return int(counter.get_total_flops())


def _name(arg: Operand) -> str:
    return held(arg.name) if isinstance(arg, Held) else arg.name
