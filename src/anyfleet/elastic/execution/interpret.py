"""`apply`: a program as a pure function of parameters, buffers and inputs."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch._ops import OpOverload

from anyfleet.elastic.blueprint import Blueprint
from anyfleet.elastic.execution.modes import Mode, Run
from anyfleet.elastic.execution.replaced_operators import SPECIAL
from anyfleet.elastic.plain_tensors import plain_tensors
from anyfleet.elastic.program import (
    BATCH,
    CREATIONS,
    Arg,
    Constant,
    Held,
    Items,
    Linear,
    Named,
    Node,
    Size,
    Value,
    dtype_of,
    length,
    value_names,
)
from anyfleet.elastic.tracing.mixed_rows import mixed_rows
from anyfleet.errors import ProgramError

_OP = re.compile(r"aten\.([A-Za-z0-9_]+)\.([A-Za-z0-9_]+)")
# ATen operators that reach outside the program.
_REFUSED = frozenset({"from_file", "set_", "resize_", "_print"})


def apply(
    blueprint: Blueprint,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    inputs: Tensor | tuple[Tensor, ...],
    mode: Mode,
    *,
    valid: Tensor | None = None,
    key: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Run a program; return its output, and the buffers after it.

    `blueprint` is that of the (small) model itself: `blueprint.local(slice)`. `valid` [B] marks the
    rows that are not padding; `key` addresses dropout and other random draws (a network that draws
    in evaluation too takes the same draw every time without one). Pure: works under
    `torch.func.grad` and `vmap`.
    """
    tensors = inputs if isinstance(inputs, tuple) else (inputs,)
    own = blueprint.evaluation is not None and mode.forward == "evaluation"
    plan = _plan(blueprint, evaluating=own)
    if len(tensors) != len(plan.inputs):
        raise ValueError(
            f"the network takes {len(plan.inputs)} inputs, got {len(tensors)}: pass one each"
        )
    dtype, device = _home(params, tensors)
    valid, key = _padding(plan, _on(valid, device)), _on(key, device)
    batch, sizes = tensors[0].shape[0], blueprint.sizes
    run = Run(mode, batch, valid, key, dtype, device, dict(buffers), sizes)
    values = dict(zip(plan.inputs, tensors, strict=True))
    for name, tensor in (*params.items(), *buffers.items()):
        values[held(name)] = tensor
    if plan.constants:
        values.update(_constants(blueprint, own, dtype, str(device)))
    for step in plan.steps:
        step(values, run)
    if mode.update == "module":
        run.updates.update({name: values[value].detach() for name, value in plan.updates})
    return values[plan.output], run.updates


def _home(
    params: Mapping[str, Tensor], inputs: tuple[Tensor, ...]
) -> tuple[torch.dtype, torch.device]:
    for tensor in (*params.values(), *inputs):
        if tensor.is_floating_point():
            return tensor.dtype, tensor.device
    return torch.get_default_dtype(), inputs[0].device


def _padding(plan: "_Plan", valid: Tensor | None) -> Tensor | None:
    """Return the mask of a network whose samples stay apart; raise ValueError if they do not.

    A network whose samples meet takes samples alone, without padding: its mask is None.
    """
    if valid is None or not plan.mixed:
        return valid
    if _functorch.is_batchedtensor(valid) or not bool(valid.all()):
        raise ValueError(
            f"{plan.mixed[0]}: the rows of a minibatch see each other, so none of them may be "
            "padding and devices cannot be stacked. Pass the samples alone, without `valid`."
        )
    return None


def _on(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device)


# A dot-prefixed name cannot be the name of a node, so both kinds of value share one dictionary.
def held(name: str) -> str:
    """Return the key under which a parameter, buffer or constant is among the values."""
    return "." + name


Values = dict[str, Any]
Step = Callable[[Values, Run], None]
Getter = Callable[[Values, Run], Any]


@dataclass(frozen=True)
class _Plan:
    """A program resolved for one set of sizes."""

    inputs: tuple[str, ...]
    constants: Mapping[str, Constant]
    steps: tuple[Step, ...]
    updates: tuple[tuple[str, str], ...]
    output: str
    mixed: tuple[str, ...]  # where rows see each other


@lru_cache(maxsize=256)
def _plan(blueprint: Blueprint, *, evaluating: bool) -> _Plan:
    program = blueprint.evaluated if evaluating else blueprint.program
    sizes = blueprint.sizes
    kept = {program.output, *(value for _, value in program.updates)}
    last: dict[str, int] = {}
    for position, node in enumerate(program.nodes):
        for name in (*value_names(node.arguments), node.name):
            last[name] = position
    dead: dict[int, list[str]] = {}
    for name, position in last.items():
        if name not in kept:
            dead.setdefault(position, []).append(name)
    return _Plan(
        tuple(i.name for i in program.inputs),
        program.constants,
        tuple(_step(node, sizes, tuple(dead.get(i, ()))) for i, node in enumerate(program.nodes)),
        program.updates,
        program.output,
        mixed_rows(blueprint, evaluating=evaluating),
    )


@lru_cache(maxsize=64)
def _constants(
    blueprint: Blueprint, evaluating: bool, dtype: torch.dtype, device: str
) -> dict[str, Tensor]:
    """Return the constants of a program where it runs: copied there once, not in every pass."""
    with plain_tensors():
        tensors = {
            name: constant.tensor()
            for name, constant in _plan(blueprint, evaluating=evaluating).constants.items()
        }
        return {
            held(name): t.to(device, dtype if t.is_floating_point() else t.dtype)
            for name, t in tensors.items()
        }


def _step(node: Node, sizes: Mapping[str, int], dead: tuple[str, ...]) -> Step:
    """Return one call with everything that can be known beforehand already resolved."""
    call = caller(node, sizes)
    name = node.name

    def step(values: Values, run: Run) -> None:
        values[name] = call(values, run)
        # Freed as soon as possible: only autograd may keep activations alive.
        for gone in dead:
            del values[gone]

    return step


def caller(node: Node, sizes: Mapping[str, int]) -> Getter:
    """Return the call of one node, as a function of the values it needs (see `held`)."""
    ready, getters = _arguments(node.args, sizes)
    special = SPECIAL.get(node.op)
    if special is not None:
        return lambda values, run: special(run, _filled(ready, getters, values, run), node)
    if node.op == "getitem":
        return lambda values, run: (filled := _filled(ready, getters, values, run))[0][filled[1]]
    function = resolve(node.op)
    options = {k: _getter(v, sizes) for k, v in node.options.items()}
    if node.operator in CREATIONS:
        options["device"] = lambda values, run: run.device
    if not options:
        return lambda values, run: function(*_filled(ready, getters, values, run))
    return lambda values, run: function(
        *_filled(ready, getters, values, run), **{k: get(values, run) for k, get in options.items()}
    )


def _arguments(
    args: tuple[Arg, ...], sizes: Mapping[str, int]
) -> tuple[list[Any], list[tuple[int, Getter]]]:
    """Return the arguments that are always the same, and how to get the others."""
    ready: list[Any] = []
    getters: list[tuple[int, Getter]] = []
    for position, arg in enumerate(args):
        fixed, value = _fixed(arg, sizes)
        ready.append(value)
        if not fixed:
            getters.append((position, _getter(arg, sizes)))
    return ready, getters


def _filled(
    ready: list[Any], getters: list[tuple[int, Getter]], values: Values, run: Run
) -> list[Any]:
    args = ready.copy()
    for position, get in getters:
        args[position] = get(values, run)
    return args


def _fixed(arg: Arg, sizes: Mapping[str, int]) -> tuple[bool, Any]:
    """Return whether an argument is the same in every run, and what it then is."""
    if isinstance(arg, Size):
        has_batch = any(BATCH in product for product in arg.dim)
        return (False, None) if has_batch else (True, length(arg.dim, sizes))
    if isinstance(arg, Items):
        items = [_fixed(item, sizes) for item in arg.items]
        return all(fixed for fixed, _ in items), [value for _, value in items]
    if isinstance(arg, Value | Held | Linear):
        return False, None
    if isinstance(arg, Named):
        return arg.text != "model", None if arg.text == "model" else _named(arg.text)
    return True, arg


def _getter(arg: Arg, sizes: Mapping[str, int]) -> Getter:
    fixed, value = _fixed(arg, sizes)
    if fixed:
        return lambda values, run: value
    if isinstance(arg, Value | Held):
        name = held(arg.name) if isinstance(arg, Held) else arg.name
        return lambda values, run: values[name]
    if isinstance(arg, Items):
        getters = [_getter(item, sizes) for item in arg.items]
        return lambda values, run: [get(values, run) for get in getters]
    if isinstance(arg, Linear):
        times, plus = arg.times, arg.plus
        return lambda values, run: plus + times * run.batch
    if isinstance(arg, Size) and any(product.count(BATCH) > 1 for product in arg.dim):
        # Pairs of samples.
        dim = arg.dim
        return lambda values, run: length(dim, {**sizes, BATCH: run.batch})
    if isinstance(arg, Size):
        # Linear in the batch: two numbers are known beforehand.
        constant = length(arg.dim, {**sizes, BATCH: 0})
        slope = length(arg.dim, {**sizes, BATCH: 1}) - constant
        return lambda values, run: constant + slope * run.batch
    return lambda values, run: run.dtype


def _named(text: str) -> Any:
    if text.endswith("_format") or text == "channels_last":
        return getattr(torch, text)
    return dtype_of(text)


def resolve(op: str) -> "OpOverload[..., Any]":
    """Return the ATen operator of that name; raise ProgramError for anything else."""
    found = _OP.fullmatch(op)
    packet = (
        getattr(torch.ops.aten, found.group(1), None)
        if found and found.group(1) not in _REFUSED
        else None
    )
    overload = getattr(packet, found.group(2), None) if found and packet is not None else None
    if not isinstance(overload, OpOverload):
        raise ProgramError(f"a program may only call ATen operators, not {op!r}")
    return overload
