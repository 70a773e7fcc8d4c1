"""The module itself as a witness: run with other tensors, without dropout, in float64."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from anyfleet import rng
from anyfleet.elastic.blueprint import Blueprint

Params = Mapping[str, Tensor]

_DROPS = frozenset(
    {
        functional.dropout,
        functional.dropout1d,
        functional.dropout2d,
        functional.dropout3d,
        functional.alpha_dropout,
        functional.feature_alpha_dropout,
        torch.dropout,
        torch.dropout_,
        torch.feature_dropout,
        torch.feature_dropout_,
    }
)
# Where the functions that drop inside take their rate.
_RATES = {functional.scaled_dot_product_attention: 4, functional.multi_head_attention_forward: 10}


class WithoutDropout(TorchFunctionMode):
    """Every dropout passes its input on, wherever the module calls it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _DROPS:
            return args[0] if args else kwargs["input"]
        given = dict(kwargs or {})
        at = _RATES.get(func)
        if at is not None and len(args) > at:
            args = (*args[:at], 0.0, *args[at + 1 :])
        elif at is not None:
            given["dropout_p"] = 0.0
        return func(*args, **given)


@contextmanager
def _double() -> Iterator[None]:
    """Tensors that the module makes for itself are float64 too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@dataclass(frozen=True)
class Bench:
    """A module, tensors for it and inputs; `fewer` has another batch size."""

    original: nn.Module
    blueprint: Blueprint
    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    inputs: tuple[Tensor, ...]
    fewer: tuple[Tensor, ...]
    key: Tensor

    def module(
        self, params: Params, buffers: Params, inputs: tuple[Tensor, ...], *, training: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """What the module itself returns, and its buffers afterwards."""
        self.original.train(training)
        moved = {name: tensor.clone() for name, tensor in buffers.items()}
        with WithoutDropout(), _double():
            out = functional_call(self.original, {**params, **moved}, inputs)
        return _first(out), moved

    def gradients(self, params: Params, *, training: bool) -> tuple[Tensor, dict[str, Tensor]]:
        """The module's output and the gradient of a random sum of it."""
        return self.differentiate(
            lambda p: self.module(p, self.buffers, self.inputs, training=training)[0], params
        )

    def differentiate(
        self, function: Callable[[dict[str, Tensor]], Tensor], params: Params
    ) -> tuple[Tensor, dict[str, Tensor]]:
        leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in params.items()}
        with torch.enable_grad():
            out = function(leaves)
            weights = rng.normal(rng.fold(self.key, "loss"), out.numel()).reshape(out.shape)
            total = (out * weights).sum()
        found = torch.autograd.grad(
            total, list(leaves.values()), materialize_grads=True, allow_unused=True
        )
        return out.detach(), dict(zip(leaves, found, strict=True))


def bench(
    module: nn.Module, inputs: tuple[Tensor, ...], blueprint: Blueprint, key: Tensor
) -> Bench:
    """Tensors near the module's own, disturbed so that zeros and ones cannot hide an error."""
    params = {n: _disturbed(p.detach(), rng.fold(key, n)) for n, p in module.named_parameters()}
    held = dict(module.named_buffers())
    buffers = {n: held[n].clone() for n in blueprint.buffers}
    for site in blueprint.norms:
        if site.mean is not None and site.variance is not None:
            buffers[site.mean] = _disturbed(buffers[site.mean], rng.fold(key, site.mean))
            own = rng.uniform(rng.fold(key, site.variance), buffers[site.variance].numel())
            buffers[site.variance] = 0.5 + own
    rows = max(4, inputs[0].shape[0])
    many = tuple(_rows(x, rows, rng.fold(key, f"input {i}")) for i, x in enumerate(inputs))
    return Bench(module, blueprint, params, buffers, many, tuple(x[:3] for x in many), key)


def _disturbed(tensor: Tensor, key: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor + 0.1 * rng.normal(key, tensor.numel()).reshape(tensor.shape)


def _rows(x: Tensor, rows: int, key: Tensor) -> Tensor:
    times = -(-rows // x.shape[0])
    tiled = x.repeat(times, *(1,) * (x.ndim - 1))[:rows]
    return _disturbed(tiled.double(), key) if x.is_floating_point() else tiled


def _first(out: Any) -> Tensor:
    while not isinstance(out, Tensor):
        out = next(iter(out.values() if isinstance(out, Mapping) else out))
    return out
