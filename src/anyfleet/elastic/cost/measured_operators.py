"""The work of one call that has no rule, as torch counts it on tensors without data."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from anyfleet.elastic.execution.interpret import Getter, caller, held
from anyfleet.elastic.execution.modes import STATIC, Run
from anyfleet.elastic.execution.plain import plainly
from anyfleet.elastic.program import BATCH, Arg, Held, Items, Node, Value

Shape = tuple[int, ...]
Operand = Value | Held
Operands = dict[Operand, Tensor]
Call = Callable[[dict[str, Tensor]], Any]


@dataclass(frozen=True)
class Measured:
    """Work forward, and of the gradient of each operand."""

    forward: int
    gradients: tuple[tuple[Arg, int], ...]


def measure(node: Node, shapes: Mapping[str, Shape], sizes: Mapping[str, int]) -> Measured | None:
    """None if the call cannot be run alone, or if torch counts nothing in it.

    `shapes` has parameters, buffers and constants by name and results by name after a dot.
    """
    # One that is used twice has both its gradients counted at once.
    operands = tuple(dict.fromkeys(_operands((*node.args, *node.options.values()))))
    meta = torch.device("meta")
    run = Run(STATIC, sizes[BATCH], None, None, torch.float32, meta, {})
    try:
        call = partial(_call, caller(node, sizes), run)
        with plainly(), torch.enable_grad():
            empty = {arg: torch.empty(_shape(arg, shapes), device=meta) for arg in operands}
            forward = _forward(call, empty)
            gradients = tuple((arg, _backward(call, empty, arg)) for arg in operands)
    except (RuntimeError, LookupError, TypeError, ValueError):
        # An index or a mask that is not a number, for one: nothing to multiply there.
        return None
    return Measured(forward, gradients) if forward else None


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
    """Work for the gradient of one operand."""
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


def _shape(arg: Operand, shapes: Mapping[str, Shape]) -> Shape:
    return shapes[arg.name if isinstance(arg, Held) else "." + arg.name]
