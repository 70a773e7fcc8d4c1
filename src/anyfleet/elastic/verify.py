"""Numeric self-check of a blueprint against its module."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from anyfleet import rng
from anyfleet.elastic.aliases import aliases, share_buffers
from anyfleet.elastic.blueprint import Blueprint, Slice
from anyfleet.elastic.errors import VerifyError
from anyfleet.elastic.evidence import Bench, bench
from anyfleet.elastic.interpret import apply
from anyfleet.elastic.modes import EVALUATE, Mode
from anyfleet.elastic.slicing import cut, paste
from anyfleet.elastic.statistics import statistical_axes
from anyfleet.elastic.tracer import trace

Tree = dict[str, Tensor]

# Training without its noise; moving the buffers too.
_STILL = Mode(dropout=False, statistics="batch")
_MOVING = Mode(dropout=False, statistics="batch", update="module")
# Relative to the largest value; the check runs in float64.
_TOLERANCE = 1e-7
_EXPECTED = (RuntimeError, ValueError, KeyError, IndexError, TypeError)


@dataclass(frozen=True)
class Check:
    """One question that was asked, and the answer."""

    name: str
    ok: bool
    detail: str = ""


@dataclass(frozen=True)
class Report:
    """Every check; `ok` if none failed."""

    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    @property
    def problems(self) -> tuple[str, ...]:
        """One line per failed check."""
        return tuple(f"{c.name}: {c.detail}" for c in self.checks if not c.ok)

    def require(self) -> None:
        """Raise VerifyError if anything failed."""
        if not self.ok:
            raise VerifyError(
                "the blueprint does not describe the module:\n" + "\n".join(self.problems)
            )


def verify(
    module: nn.Module,
    example_inputs: Tensor | tuple[Tensor, ...],
    blueprint: Blueprint | None = None,
    *,
    trials: int = 2,
    seed: int = 0,
) -> Report:
    """Compare the blueprint (default: a fresh trace) with the module itself, in float64.

    The program equals the module when evaluating and when training, also for another batch size;
    random draws are left out on both sides, and those in evaluation are counted. For random index
    sets on every axis the dense model equals the masked module, and so do the gradients; axes
    that enter the statistics of a norm or the scale of attention are kept whole there, and are
    checked by permutation instead: a reordered model is the same function. `paste(cut())` is
    exact.
    """
    found = blueprint or trace(module, example_inputs)
    inputs = (example_inputs,) if isinstance(example_inputs, Tensor) else tuple(example_inputs)
    key = rng.root(seed, "verify")
    twin = copy.deepcopy(module).double()
    share_buffers(twin, aliases(module))
    checks = [_checked("tables", partial(_tables, twin, found))]
    if not checks[0].ok:
        return Report(tuple(checks))
    table = bench(twin, inputs, _quiet(found), key)
    checks += [
        _checked("drawing", partial(_drawing, table, found)),
        _checked("evaluating", partial(_evaluating, table)),
        _checked("training", partial(_training, table)),
    ]
    for trial in range(trials):
        own = rng.fold(key, trial)
        checks.append(_checked(f"slice {trial}", partial(_slice, table, _subset(found, own))))
        checks.append(_checked(f"permutation {trial}", partial(_permutation, table, own)))
        checks.append(_checked(f"every axis {trial}", partial(_every_axis, table, own)))
    return Report(tuple(checks))


def _quiet(blueprint: Blueprint) -> Blueprint:
    """The same without draws in evaluation, to be compared with a module that does not draw."""
    program, *others = (
        replace(program, nodes=tuple(replace(node, always=False) for node in program.nodes))
        for program in blueprint.programs
    )
    return replace(blueprint, program=program, evaluation=next(iter(others), None))


def _drawing(table: Bench, blueprint: Blueprint) -> str:
    known, real = sum(node.always for node in blueprint.evaluated.nodes), table.drawn()
    if known == real:
        return ""
    return f"{real} calls of the module draw at random in evaluation, {known} of the blueprint"


def _checked(name: str, question: Callable[[], str]) -> Check:
    try:
        detail = question()
    except _EXPECTED as error:
        detail = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return Check(name, not detail, detail)


def _tables(module: nn.Module, blueprint: Blueprint) -> str:
    buffers = dict(module.named_buffers(remove_duplicate=False))
    state = {**dict(module.named_parameters()), **buffers}
    constants = [name for program in blueprint.programs for name in program.constants]
    held = {*blueprint.params, *blueprint.buffers, *constants}
    missing = sorted(set(state) - held - aliases(module).keys())
    if missing:
        return f"no table for {', '.join(missing)}"
    for name in (*blueprint.params, *blueprint.buffers):
        if name not in state or tuple(state[name].shape) != blueprint.shape(name):
            return f"{name} has shape {blueprint.shape(name)} in the table"
    layered = [p for layer in blueprint.layers for p in layer.params]
    if sorted(layered) != sorted(blueprint.params):
        return "the layers do not hold every parameter once"
    return ""


def _evaluating(table: Bench) -> str:
    for inputs in (table.inputs, table.fewer):
        want = table.module(table.params, table.buffers, inputs, training=False)[0]
        got, _ = apply(table.blueprint, table.params, table.buffers, inputs, EVALUATE)
        if problem := differs(got, want, f"the output for batch {len(inputs[0])}"):
            return problem
    return ""


def _training(table: Bench) -> str:
    want, moved = table.module(table.params, table.buffers, table.inputs, training=True)
    got, own = apply(table.blueprint, table.params, table.buffers, table.inputs, _MOVING)
    problems = [differs(got, want, "the output")]
    problems += [differs(own[name], moved[name], name) for name in table.blueprint.buffers]
    return next(filter(None, problems), "")


def _slice(table: Bench, slice: Slice) -> str:
    """The dense small model against the module with everything else zero."""
    full, zeros = table.blueprint, {k: torch.zeros_like(v) for k, v in table.params.items()}
    small = cut(table.params, slice, full)
    masked = paste(small, zeros, slice, full)
    if any(not torch.equal(v, small[k]) for k, v in cut(masked, slice, full).items()):
        return "paste(cut()) is not exact"
    buffers = cut(table.buffers, slice, full)
    for training in (False, True):
        want, wanted = table.gradients(masked, training=training)
        mode = _STILL if training else EVALUATE
        run = partial(apply, full.local(slice), buffers=buffers, inputs=table.inputs, mode=mode)
        got, gained = table.differentiate(_output_of(run), small)
        problems = [differs(got, want, "the output of the dense model")]
        wanted = cut(wanted, slice, full)
        problems += [
            differs(gained[k], wanted[k], f"the gradient of {k}", _largest(wanted)) for k in small
        ]
        if problem := next(filter(None, problems), ""):
            return problem + (" in training" if training else " in evaluation")
    return ""


def _permutation(table: Bench, key: Tensor) -> str:
    """A model whose axes are all reordered is the same function."""
    full = table.blueprint
    orders = {
        name: rng.permutation(rng.fold(key, name), torch.ones(axis.size, dtype=torch.bool)).tolist()
        for name, axis in full.axes.items()
        if axis.free
    }
    slice = Slice.of(orders, full)
    params, buffers = cut(table.params, slice, full), cut(table.buffers, slice, full)
    want, _ = apply(full, table.params, table.buffers, table.inputs, EVALUATE)
    got, _ = apply(full.local(slice), params, buffers, table.inputs, EVALUATE)
    return differs(got, want, "the output of the reordered model")


def _every_axis(table: Bench, key: Tensor) -> str:
    """With everything cut the small model still runs and has finite gradients."""
    full = table.blueprint
    slice = _subset(full, key, whole=frozenset())
    params, buffers = cut(table.params, slice, full), cut(table.buffers, slice, full)
    run = partial(apply, full.local(slice), buffers=buffers, inputs=table.inputs, mode=_STILL)
    out, gradients = table.differentiate(_output_of(run), params)
    whole, _ = apply(full, table.params, table.buffers, table.inputs, _STILL)
    if out.shape != whole.shape:
        return f"the output has shape {tuple(out.shape)}"
    finite = all(bool(torch.isfinite(t).all()) for t in (out, *gradients.values()))
    return "" if finite else "something is not finite"


def _subset(blueprint: Blueprint, key: Tensor, whole: frozenset[str] | None = None) -> Slice:
    """Random indices, in random order, on every axis that may be cut."""
    kept = statistical_axes(blueprint) if whole is None else whole
    chosen: dict[str, list[int]] = {}
    for name, axis in blueprint.axes.items():
        if axis.free and name not in kept:
            own = rng.fold(key, name)
            order = rng.permutation(own, torch.ones(axis.size, dtype=torch.bool))
            chosen[name] = order[: 1 + int(rng.uniform(own, 1) * axis.size)].tolist()
    return Slice.of(chosen, blueprint)


def _output_of(run: Callable[..., tuple[Tensor, dict[str, Tensor]]]) -> Callable[[Tree], Tensor]:
    return lambda params: run(params=params)[0]


def _largest(tree: dict[str, Tensor]) -> float:
    return max((float(t.abs().max()) for t in tree.values() if t.numel()), default=0.0)


def differs(got: Tensor, want: Tensor, what: str, scale: float = 0.0) -> str:
    """A sentence if two tensors differ by more than rounding; a NaN differs from everything."""
    if got.shape != want.shape:
        return f"{what} has shape {tuple(got.shape)} instead of {tuple(want.shape)}"
    if not got.numel():
        return ""
    error = float((got - want).abs().max())
    limit = _TOLERANCE * max(float(want.abs().max()), scale, 1e-30)
    return "" if error <= limit else f"{what} differs by {error:.3g}"
