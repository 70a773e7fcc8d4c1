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
from torch.utils._python_dispatch import TorchDispatchMode

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


# The others are off unless they are told that this is training.
_ON_BY_DEFAULT = frozenset(
    {functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d}
)


class WithoutDropout(TorchFunctionMode):
    """Every dropout passes its input on; `drawn` counts those that would have dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func in _DROPS:
            self.drawn += _active(func, args, given)
            return args[0] if args else given["input"]
        at = _RATES.get(func)
        if at is not None:
            rate = args[at] if len(args) > at else given.get("dropout_p", 0.0)
            self.drawn += bool(rate and given.get("training", True))
            if len(args) > at:
                args = (*args[:at], 0.0, *args[at + 1 :])
            else:
                given["dropout_p"] = 0.0
        return func(*args, **given)


def _active(func: Any, args: Any, given: Mapping[str, Any]) -> bool:
    """Whether a call of dropout would drop; torch's own signatures: input, rate, training."""
    rest = dict(zip(("p", "training"), args[1:], strict=False)) | dict(given)
    on = rest.get("training", rest.get("train", func in _ON_BY_DEFAULT))
    return bool(rest.get("p", 0.5) and on)


class Still(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every other draw is its mean, below any function that draws inside; `drawn` counts them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drawn = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        mean = _MEANS.get(func)
        if mean is None:
            return func(*args, **(kwargs or {}))
        self.drawn += 1
        return mean(func, *args, **(kwargs or {}))


def _filled(value: float) -> Callable[..., Tensor]:
    def made(func: Any, *args: Any, **given: Any) -> Tensor:
        new: Tensor = func(*args, **given)
        return new.fill_(value)

    return made


_aten = torch.ops.aten
_MEANS: Mapping[Any, Callable[..., Tensor]] = {
    _aten.rand.default: _filled(0.5),
    _aten.rand_like.default: _filled(0.5),
    _aten.randn.default: _filled(0.0),
    _aten.randn_like.default: _filled(0.0),
    _aten.bernoulli.default: lambda _, x, **__: x.clone(),
    _aten.bernoulli.p: lambda _, x, chance, **__: torch.full_like(x, chance),
    _aten.uniform_.default: lambda _, x, low=0.0, high=1.0, **__: x.fill_((low + high) / 2),
    _aten.exponential_.default: lambda _, x, rate=1.0, **__: x.fill_(1.0 / rate),
}


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
        with torch.random.fork_rng(devices=[]), WithoutDropout(), Still(), _double():
            out = functional_call(self.original, {**params, **moved}, inputs)
        return _first(out), moved

    def drawn(self) -> int:
        """How many calls of the module draw at random in evaluation."""
        self.original.train(False)
        dropouts, others = WithoutDropout(), Still()
        with torch.random.fork_rng(devices=[]), dropouts, others, _double():
            functional_call(self.original, {**self.params, **self.buffers}, self.inputs)
        return dropouts.drawn + others.drawn

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
    held = dict(module.named_buffers(remove_duplicate=False))
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
