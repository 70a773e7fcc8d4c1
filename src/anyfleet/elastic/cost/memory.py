"""The memory of training: what autograd saves for the backward pass, and the peak of a pass.

Nothing is allocated: programs run on tensors without data.
"""

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from anyfleet import cache
from anyfleet.elastic.blueprint import Blueprint
from anyfleet.elastic.execution.interpret import apply
from anyfleet.elastic.execution.modes import STATIC
from anyfleet.elastic.program import BATCH, dtype_of, length
from anyfleet.elastic.tracing.mixed_rows import mixed_rows

_PRICE = 16  # bytes of a number of bytes in the cache


@lru_cache(maxsize=1024)
def saved_bytes(blueprint: Blueprint, first: int = 0, batch: int = 1) -> int:
    """Return the bytes that one training pass of the (small) model saves in float32.

    Each storage counts once, however often it is saved. Parameters and buffers do not count (the
    device holds them anyway); the input batch does, when a trained layer needs it.
    """
    return _kept("saved", _saved_bytes, blueprint, first, batch)


@lru_cache(maxsize=1024)
def pass_bytes(blueprint: Blueprint, first: int = 0, batch: int = 1) -> int:
    """Return the bytes at the peak of a forward and backward pass of the (small) model in float32.

    Besides the model itself: the batch, activations as long as they are needed, gradients, and what
    operators make in between. The loss is a cross-entropy; most others take less.
    """
    return _kept("pass", _pass_bytes, blueprint, first, batch)


def _kept(
    name: str, compute: Callable[[Blueprint, int, int], int], model: Blueprint, *sizes: int
) -> int:
    """Return a price out of the user's cache, or computed now."""
    first, batch = sizes
    computed = None if cache.home() is None else cache.computed_by(**_torch())
    if computed is None:
        return compute(model, first, batch)
    key = {**computed, "price": name, "model": model.digest.hex(), "first": first, "batch": batch}
    if (kept := cache.read("prices", key)) is not None and len(kept) == _PRICE:
        return int.from_bytes(kept, "little")
    found = compute(model, first, batch)
    cache.write("prices", key, found.to_bytes(_PRICE, "little"))
    return found


def _torch() -> dict[str, object]:
    """Return what decides which kernels torch takes, and so what they hold in memory."""
    return {
        "torch": str(torch.__version__),
        "processor": torch.backends.cpu.get_cpu_capability(),
        "mkldnn": bool(torch._C._get_mkldnn_enabled()),  # noqa: SLF001 - a typed name
        "attention": [
            torch.backends.cuda.flash_sdp_enabled(),  # type: ignore[no-untyped-call]
            torch.backends.cuda.mem_efficient_sdp_enabled(),  # type: ignore[no-untyped-call]
            torch.backends.cuda.math_sdp_enabled(),  # type: ignore[no-untyped-call]
        ],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "number": str(torch.get_default_dtype()),
    }


def _saved_bytes(blueprint: Blueprint, first: int, batch: int) -> int:
    with _pretended():
        params, buffers = _state(blueprint, first)
        inputs, key = _inputs(blueprint, batch), torch.zeros((), dtype=torch.int64)
        ledger = Ledger((*params.values(), *buffers.values()))
        with saved_tensors_hooks(ledger.save, lambda saved: saved):
            apply(blueprint, params, buffers, inputs, STATIC, key=key)
    return ledger.nbytes


def _pass_bytes(blueprint: Blueprint, first: int, batch: int) -> int:
    with _pretended():
        params, buffers = _state(blueprint, first)
        key = torch.zeros((), dtype=torch.int64)
        with Live() as live:
            inputs = _inputs(blueprint, batch)
            valid = None if mixed_rows(blueprint) else torch.ones(batch, dtype=torch.bool)
            output, _ = apply(blueprint, params, buffers, inputs, STATIC, valid=valid, key=key)
            loss = torch.log_softmax(output, -1)[..., 0].sum()
            del output
            wanted = [value for value in params.values() if value.requires_grad]
            if loss.requires_grad:
                torch.autograd.grad(loss, wanted, allow_unused=True)
    peak: int = live.peak
    return peak


def input_bytes(blueprint: Blueprint, batch: int = 1) -> int:
    """Return the bytes of one batch of samples."""
    sizes = {**blueprint.sizes, BATCH: batch}
    return sum(
        _dtype(given.dtype).itemsize * math.prod(length(dim, sizes) for dim in given.dims)
        for given in blueprint.program.inputs
    )


@contextmanager
def _pretended() -> Iterator[None]:
    """Make tensors without data and gradients in here, whatever mode the caller is in."""
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        yield


def _state(blueprint: Blueprint, first: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    trained = set(blueprint.trained(first))
    params = {n: _empty(blueprint, n).requires_grad_(n in trained) for n in blueprint.params}
    return params, {n: _empty(blueprint, n) for n in blueprint.buffers}


def _inputs(blueprint: Blueprint, batch: int) -> tuple[Tensor, ...]:
    sizes = {**blueprint.sizes, BATCH: batch}
    return tuple(
        torch.zeros([length(dim, sizes) for dim in given.dims], dtype=_dtype(given.dtype))
        for given in blueprint.program.inputs
    )


class Ledger:
    """A count of the bytes of saved storages, each once, except those of `held`."""

    def __init__(self, held: tuple[Tensor, ...]) -> None:
        # Storages are kept alive so that the address of a freed one cannot be taken for it.
        self._known = {_address(tensor): tensor for tensor in held}
        self.nbytes = 0

    def save(self, tensor: Tensor) -> Tensor:
        """Count the storage of a tensor and return the tensor."""
        address = _address(tensor)
        if address not in self._known:
            self._known[address] = tensor
            self.nbytes += tensor.untyped_storage().nbytes()
        return tensor


class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A count of the bytes of storages that are made and not yet freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {id(t.untyped_storage()) for t in _tensors((args, kwargs))}
        made = {id(s): s for s in (t.untyped_storage() for t in _tensors(out))}
        for storage in (s for number, s in made.items() if number not in given):
            size = storage.nbytes()
            self.now += size
            weakref.finalize(storage, self._free, size)
        self.peak = max(self.peak, self.now)
        return out

    def _free(self, size: int) -> None:
        self.now -= size


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _address(tensor: Tensor) -> int:
    storage: Any = tensor.untyped_storage()
    return int(storage._cdata)  # noqa: SLF001 - fake storages have no data pointer


def _empty(blueprint: Blueprint, name: str) -> Tensor:
    counter = name.endswith("num_batches_tracked")
    return torch.zeros(blueprint.shape(name), dtype=torch.int64 if counter else torch.float32)


def _dtype(text: str) -> torch.dtype:
    return torch.float32 if text == "model" else dtype_of(text)
