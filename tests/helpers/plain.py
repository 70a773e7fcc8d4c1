"""A traced network beside the user's own module, in plain PyTorch: both modes, whole and cut."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call

from anyfleet.elastic import EVALUATE, Blueprint, Mode, Slice, apply, cut, paste, trace

STILL = Mode(dropout=False, statistics="batch")
Tree = Mapping[str, Tensor]


def held(module: nn.Module, blueprint: Blueprint) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Copies of the module's parameters and buffers, by their names in the blueprint."""
    state = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    return {n: state[n] for n in blueprint.params}, {n: state[n] for n in blueprint.buffers}


def gradients(out: Tensor, params: Tree) -> dict[str, Tensor]:
    """Of a sum in which every output counts differently."""
    weights = torch.linspace(-1, 2, out.numel()).reshape(out.shape)
    # Not torch.autograd.grad: a reentrant checkpoint refuses that.
    (out * weights).sum().backward()  # type: ignore[no-untyped-call]
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in params.items()}


def leaves(tree: Tree) -> dict[str, Tensor]:
    return {name: tensor.clone().requires_grad_() for name, tensor in tree.items()}


def first(out: Tensor | tuple[Tensor, ...]) -> Tensor:
    return out if isinstance(out, Tensor) else out[0]


def agrees(module: nn.Module, x: Tensor, slice_: Slice | None = None) -> Blueprint:
    """Assert that program and module agree in output and gradients, in both modes.

    With a slice, the small model is compared to the module whose other weights are zero.
    """
    blueprint = trace(module, x)
    params, buffers = held(module, blueprint)
    slice_ = slice_ or Slice()
    small = cut(params, slice_, blueprint)
    masked = paste(small, {n: torch.zeros_like(p) for n, p in params.items()}, slice_, blueprint)
    for training in (True, False):
        module.train(training)
        own, whole = leaves(small), leaves(masked)
        moved = {name: tensor.clone() for name, tensor in buffers.items()}
        want = first(functional_call(module, {**whole, **moved}, (x,)))
        mode = STILL if training else EVALUATE
        statistics = cut(buffers, slice_, blueprint)
        got, _ = apply(blueprint.local(slice_), own, statistics, x, mode)
        torch.testing.assert_close(got, want)
        wanted = cut(gradients(want, whole), slice_, blueprint)
        for name, gradient in gradients(got, own).items():
            torch.testing.assert_close(gradient, wanted[name], msg=f"{name}, {training=}")
    return blueprint


def every_other(blueprint: Blueprint) -> Slice:
    """Every second channel, in descending order, of each axis that a share cuts."""
    kept = {n: range(a.size - 1, -1, -2) for n, a in blueprint.axes.items() if a.free}
    return Slice.of(kept, blueprint)


def narrowest(blueprint: Blueprint) -> Slice:
    """A single channel of each axis."""
    return Slice.of({n: [a.size - 1] for n, a in blueprint.axes.items() if a.free}, blueprint)
