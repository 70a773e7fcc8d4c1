"""Activation memory: the bytes that autograd saves for the backward pass."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from anyfleet.elastic.blueprint import Blueprint
from anyfleet.elastic.interpret import apply
from anyfleet.elastic.modes import STATIC
from anyfleet.elastic.program import BATCH, dtype_of, length


@lru_cache(maxsize=1024)
def saved_bytes(blueprint: Blueprint, first: int = 0, batch: int = 1) -> int:
    """Bytes saved by one training pass of the (small) model in float32.

    Each storage counts once, however often it is saved. Parameters and buffers do not count (the
    device holds them anyway); the input batch does, when a trained layer needs it. Nothing is
    allocated: the program runs on tensors without data.
    """
    trained = set(blueprint.trained(first))
    # Whatever mode the caller is in, this is about training.
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        params = {n: _empty(blueprint, n).requires_grad_(n in trained) for n in blueprint.params}
        buffers = {n: _empty(blueprint, n) for n in blueprint.buffers}
        sizes = {**blueprint.sizes, BATCH: batch}
        inputs = tuple(
            torch.zeros([length(dim, sizes) for dim in given.dims], dtype=_dtype(given.dtype))
            for given in blueprint.program.inputs
        )
        ledger = Ledger((*params.values(), *buffers.values()))
        with saved_tensors_hooks(ledger.save, lambda saved: saved):
            apply(
                blueprint, params, buffers, inputs, STATIC, key=torch.zeros((), dtype=torch.int64)
            )
    return ledger.nbytes


class Ledger:
    """Counts saved storages, each once, except those of `held`."""

    def __init__(self, held: tuple[Tensor, ...]) -> None:
        # Storages are kept alive so that the address of a freed one cannot be taken for it.
        self._known = {_address(tensor): tensor for tensor in held}
        self.nbytes = 0

    def save(self, tensor: Tensor) -> Tensor:
        address = _address(tensor)
        if address not in self._known:
            self._known[address] = tensor
            self.nbytes += tensor.untyped_storage().nbytes()
        return tensor


def _address(tensor: Tensor) -> int:
    storage: Any = tensor.untyped_storage()
    return int(storage._cdata)  # noqa: SLF001 - fake storages have no data pointer


def _empty(blueprint: Blueprint, name: str) -> Tensor:
    counter = name.endswith("num_batches_tracked")
    return torch.zeros(blueprint.shape(name), dtype=torch.int64 if counter else torch.float32)


def _dtype(text: str) -> torch.dtype:
    return torch.float32 if text == "model" else dtype_of(text)
