"""Two witnesses of one network: the user's module itself, and the traced program.

Both run with given tensors and without random draws, and give the same account (`Seen`), so that a
check compares two accounts and need not know whose they are.
"""

import copy
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from anyfleet import rng
from anyfleet.elastic.blueprint import Blueprint
from anyfleet.elastic.execution.interpret import apply
from anyfleet.elastic.execution.modes import EVALUATE, Mode

Params = Mapping[str, Tensor]
Inputs = tuple[Tensor, ...]

MOVING = Mode(dropout=False, statistics="batch", update="module")

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
    """A mode in which every dropout passes its input on; `drawn` counts those that would drop."""

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
    """Return whether a call of dropout would drop; torch's signatures: input, rate, training."""
    rest = dict(zip(("p", "training"), args[1:], strict=False)) | dict(given)
    on = rest.get("training", rest.get("train", func in _ON_BY_DEFAULT))
    return bool(rest.get("p", 0.5) and on)


class Still(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which every other draw is its mean; `drawn` counts them.

    It works below any function that draws inside. `computed` are the precisions of all real and
    complex results.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drawn = 0
        self.computed: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        mean = _MEANS.get(func)
        if mean is None:
            out = func(*args, **(kwargs or {}))
            for each in out if isinstance(out, list | tuple) else (out,):
                if isinstance(each, Tensor) and (each.is_floating_point() or each.is_complex()):
                    self.computed.add(each.dtype)
            return out
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
def _default(dtype: torch.dtype) -> Iterator[None]:
    """Give tensors that the module makes for itself this precision too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _elsewhere(stirred: int | None) -> Iterator[list[str]]:
    """Put back the generators of Python and numpy; say which of them forward() used.

    They begin where they are, or with the seed `stirred`.
    """
    # Looked up, not imported: nothing here draws from it.
    python: Any = sys.modules["random"]
    before = python.getstate(), np.random.get_state()  # noqa: NPY002
    if stirred is not None:
        python.seed(stirred)
        np.random.seed(stirred)  # noqa: NPY002
    begun = python.getstate(), repr(np.random.get_state())  # noqa: NPY002
    moved: list[str] = []
    try:
        yield moved
    finally:
        if python.getstate() != begun[0]:
            moved.append("Python's random")
        if repr(np.random.get_state()) != begun[1]:  # noqa: NPY002
            moved.append("numpy.random")
        python.setstate(before[0])
        np.random.set_state(before[1])  # noqa: NPY002


@contextmanager
def _again(module: nn.Module, dropouts: WithoutDropout) -> Iterator[None]:
    """Keep dropout away from what a checkpoint runs again: torch leaves such modes out there."""

    def still(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **given: Any) -> Any:
            with dropouts:
                return forward(*args, **given)

        return run

    parts = [part for part in module.modules() if "forward" not in vars(part)]
    for part in parts:
        part.forward = still(part.forward)
    try:
        yield
    finally:
        for part in parts:
            del part.forward


@dataclass(frozen=True)
class Seen:
    """The account of one run; `gradients` is empty where none were asked for."""

    output: Tensor
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    drawn: int = 0
    generators: tuple[str, ...] = ()


class Witness(Protocol):
    """Anything that can run the network."""

    def run(
        self,
        params: Params,
        buffers: Params,
        inputs: Inputs,
        *,
        training: bool,
        loss: Tensor | None = None,
        valid: Tensor | None = None,
    ) -> Seen:
        """Run without draws; with `loss`, also differentiate the sum of output x loss.

        `loss` has the shape of the output or of its first rows. Rows that are not `valid` are
        padding; only a program knows any.
        """


@dataclass(frozen=True)
class Traced:
    """The program as a witness."""

    blueprint: Blueprint

    def run(
        self,
        params: Params,
        buffers: Params,
        inputs: Inputs,
        *,
        training: bool,
        loss: Tensor | None = None,
        valid: Tensor | None = None,
    ) -> Seen:
        """Run the program."""
        leaves = {n: t.detach().clone() for n, t in params.items()}
        mode = MOVING if training else EVALUATE
        with torch.set_grad_enabled(loss is not None):
            for leaf in leaves.values():
                leaf.requires_grad_(loss is not None)
            out, moved = apply(self.blueprint, leaves, buffers, inputs, mode, valid=valid)
        return Seen(out.detach(), _gradients(out, loss, leaves), moved)


@dataclass
class Twin:
    """The module as a witness: a copy in a precision of its own.

    `computed` collects the precisions it computes in, `failed` tells whether it ever raised.
    Tensors are written into the copy rather than swapped for a call, so that whatever runs the
    forward pass again while differentiating (a checkpoint) finds them too.
    """

    module: nn.Module
    dtype: torch.dtype
    converted: bool
    kept: dict[str, Tensor] = field(default_factory=dict)
    computed: set[torch.dtype] = field(default_factory=set)
    failed: bool = False
    stirred: int | None = None  # a seed for the generators of Python and numpy

    @staticmethod
    def of(module: nn.Module, dtype: torch.dtype | None = None) -> "Twin":
        """Return a twin that computes in `dtype`, by default in the module's own precision."""
        twin = copy.deepcopy(module)
        if dtype is not None:
            # As nn.Module.to does, but complex numbers too.
            twin._apply(lambda t: t.to(_like(t, dtype)))  # type: ignore[no-untyped-call]  # noqa: SLF001
        for tensor in twin.parameters():
            tensor.requires_grad_(tensor.is_floating_point() or tensor.is_complex())
        for first, *others in _groups(module):
            shared = twin.get_buffer(first)
            for name in others:
                _register(twin, name, shared)
        kept = {n: b.detach().clone() for n, b in twin.named_buffers()}
        return Twin(twin, dtype or torch.get_default_dtype(), dtype is not None, kept)

    def run(
        self,
        params: Params,
        buffers: Params,
        inputs: Inputs,
        *,
        training: bool,
        loss: Tensor | None = None,
        valid: Tensor | None = None,
    ) -> Seen:
        """Run the module; it knows no padding."""
        if valid is not None:
            raise ValueError("a module cannot be told which rows are padding")
        try:
            return self._run(params, buffers, inputs, training, loss)
        except Exception:
            self.failed = True
            raise

    def _run(
        self, params: Params, buffers: Params, inputs: Inputs, training: bool, loss: Tensor | None
    ) -> Seen:
        self._fill(params, buffers)
        self.module.train() if training else self.module.eval()
        dropouts, others = WithoutDropout(), Still()
        leaves = dict(self.module.named_parameters())
        with (
            torch.random.fork_rng(devices=[]),
            _elsewhere(self.stirred) as generators,
            _default(self.dtype),
            dropouts,
            others,
        ):
            with torch.set_grad_enabled(loss is not None):
                out = _first(self.module(*inputs))
            # A checkpoint that runs again while differentiating moves statistics once more.
            held = dict(self.module.named_buffers(remove_duplicate=False))
            moved = {name: buffer.detach().clone() for name, buffer in held.items()}
            with _again(self.module, dropouts):
                found = _backward(out, loss, leaves)
        self.computed |= others.computed
        drawn = dropouts.drawn + others.drawn
        return Seen(out.detach(), found, moved, drawn, tuple(generators))

    def outputs(
        self, params: Params, buffers: Params, inputs: Inputs, *, training: bool
    ) -> list[tuple[str, list[Tensor], list[Tensor]]]:
        """Run once; return path, inputs and outputs of every inner module, as they end."""
        found: list[tuple[str, list[Tensor], list[Tensor]]] = []

        def note(path: str) -> Callable[[nn.Module, Any, Any], None]:
            return lambda _, given, out: found.append((path, _tensors(given), _tensors(out)))

        handles = [m.register_forward_hook(note(n)) for n, m in self.module.named_modules() if n]
        try:
            self.run(params, buffers, inputs, training=training)
        finally:
            for handle in handles:
                handle.remove()
        return found

    def _fill(self, params: Params, buffers: Params) -> None:
        with torch.no_grad():
            for name, param in self.module.named_parameters():
                param.copy_(params[name])
            for names in _groups(self.module):
                given = [buffers[name] for name in names if name in buffers]
                tensor = given[0] if given else self.kept.get(names[0])
                if tensor is None:
                    continue
                now = self.module.get_buffer(names[0])
                if now.shape == tensor.shape and now.dtype == tensor.dtype:
                    now.copy_(tensor)
                    continue
                # The module put another tensor there.
                tensor = tensor.clone()
                for name in names:
                    _register(self.module, name, tensor)


def _groups(module: nn.Module) -> list[list[str]]:
    """Return the names of every buffer; a shared one has several."""
    found: dict[int, list[str]] = {}
    for name, buffer in module.named_buffers(remove_duplicate=False):
        found.setdefault(id(buffer), []).append(name)
    return list(found.values())


def _register(module: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(path), leaf, tensor)


def _gradients(out: Tensor, loss: Tensor | None, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if loss is None:
        return {}
    known = {n: t for n, t in leaves.items() if t.requires_grad}
    total = _total(out, loss)
    if not total.requires_grad:
        return {n: torch.zeros_like(t) for n, t in known.items()}
    found = torch.autograd.grad(
        total, list(known.values()), allow_unused=True, materialize_grads=True
    )
    return {n: g.detach() for n, g in zip(known, found, strict=True)}


def _backward(out: Tensor, loss: Tensor | None, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the same as `_gradients`, by way of `.grad`: a reentrant checkpoint knows no other."""
    if loss is None:
        return {}
    known = {n: t for n, t in leaves.items() if t.requires_grad}
    for leaf in known.values():
        leaf.grad = None
    total = _total(out, loss)
    if total.requires_grad:
        total.backward()  # type: ignore[no-untyped-call]
    found = {n: torch.zeros_like(t) if t.grad is None else t.grad for n, t in known.items()}
    for leaf in known.values():
        leaf.grad = None
    return {n: g.detach() for n, g in found.items()}


def _total(out: Tensor, loss: Tensor) -> Tensor:
    with torch.enable_grad():
        return (real(out[: len(loss)]) * real(loss)).sum()


def real(tensor: Tensor) -> Tensor:
    """Return a complex tensor as pairs of real numbers, any other as it is."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


@dataclass(frozen=True)
class Bench:
    """Tensors and inputs on which a witness and the program of `blueprint` are compared.

    `others` are further rows, to stand for padding.
    """

    witness: Witness
    blueprint: Blueprint
    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    inputs: Inputs
    others: Inputs
    key: Tensor

    def loss(self, output: Tensor) -> Tensor:
        """Return random weights for a sum of the output."""
        return noise(output, rng.fold(self.key, "loss"))


ROWS = 3  # of a batch; two would let batch norm map every sample to plus or minus one


def bench(
    witness: Witness,
    module: nn.Module,
    inputs: Inputs,
    blueprint: Blueprint,
    key: Tensor,
    dtype: torch.dtype | None,
    count: int = ROWS,
) -> Bench:
    """Return random tensors of the module's kind and rows between the given samples.

    Weights keep their signs and their order of magnitude, so that what must be positive stays so;
    those that are all zero (the last scale of a residual block, the second factor of an adapter)
    become small random numbers, since zeros would hide an error before them. Statistics of batch
    norms are random. Every other buffer stays as it is, and inputs stay between the samples: ids
    stay ids, and numbers stay in their range.
    """

    def cast(tensor: Tensor) -> Tensor:
        return tensor if dtype is None else tensor.to(_like(tensor, dtype))

    params = {
        n: _disturbed(cast(p.detach()), rng.fold(key, n)) for n, p in module.named_parameters()
    }
    held = dict(module.named_buffers(remove_duplicate=False))
    buffers = {n: cast(held[n].detach()).clone() for n in blueprint.buffers}
    for site in blueprint.norms:
        if site.mean is not None and site.variance is not None:
            mean, variance = buffers[site.mean], buffers[site.variance]
            buffers[site.mean] = mean + 0.3 * noise(mean, rng.fold(key, site.mean))
            buffers[site.variance] = 1 + 0.5 * noise(variance, rng.fold(key, site.variance))
    rows = tuple(
        _rows(cast(x.detach()), 2 * count, rng.fold(key, f"input {i}"))
        for i, x in enumerate(inputs)
    )
    few, others = tuple(x[:count] for x in rows), tuple(x[count:] for x in rows)
    return Bench(witness, blueprint, params, buffers, few, others, key)


def noise(like: Tensor, key: Tensor) -> Tensor:
    """Return uniform numbers in (-1, 1); a complex one has two."""
    shape = real(like).shape
    # One key for every block: a long tensor would be hashed at once.
    drawn = rng.uniforms(key.reshape(1), math.prod(shape))[0] * 2 - 1
    numbers = drawn.reshape(shape)
    out = torch.view_as_complex(numbers) if like.is_complex() else numbers
    return out.to(device=like.device, dtype=like.dtype)


def _disturbed(tensor: Tensor, key: Tensor) -> Tensor:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.clone()
    if bool(tensor.any()):
        own = noise(tensor.real if tensor.is_complex() else tensor, key)
        return tensor * (1 + 0.5 * own)
    # All zero: as large as an ordinary initialisation.
    fan_in = tensor.numel() // max(1, tensor.shape[0]) if tensor.ndim > 1 else 10
    return noise(tensor, key) * float(max(1, fan_in) ** -0.5)


def _rows(x: Tensor, rows: int, key: Tensor) -> Tensor:
    """Return the first two samples, and rows whose every entry lies between theirs."""
    one, other = x[:1], x[1:2] if len(x) > 1 else x[:1]
    shape = (rows, *x.shape[1:])
    share = rng.uniforms(key.reshape(1), math.prod(shape))[0].reshape(shape).to(x.device)
    share[0], share[1] = 1.0, 0.0
    if not (x.is_floating_point() or x.is_complex()):
        return torch.where(share > 0.5, one, other)
    share = share.to(x.real.dtype)
    if not torch.equal(one, other):
        mixed: Tensor = one * share + other * (1 - share)
        return mixed
    # Two equal samples would make equal rows; an example of zeros is no sample at all.
    constant = bool((one == one.flatten()[:1]).all())
    varied: Tensor = one + share if constant else one * (1 - 0.2 * share)
    return varied


def _like(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the same kind of number in another precision; whole numbers stay."""
    if tensor.is_complex():
        return dtype.to_complex()
    return dtype if tensor.is_floating_point() else tensor.dtype


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value.detach()]
    items = value.values() if isinstance(value, Mapping) else value
    nested = isinstance(value, Mapping | list | tuple)
    return [tensor for item in items for tensor in _tensors(item)] if nested else []


def _first(out: Any) -> Tensor:
    while not isinstance(out, Tensor):
        out = next(iter(out.values() if isinstance(out, Mapping) else out))
    return out
