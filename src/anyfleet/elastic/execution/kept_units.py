"""Which units a dropout keeps: hashed numbers against a rate, in one kernel on a CUDA device."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from anyfleet import rng
from anyfleet.elastic.execution.stacked_convolution import has_kernels

_DIGITS = 53  # of a float64 in [0, 1)


def kept(key: Tensor, count: int, rate: float) -> Tensor:
    """Return where `rng.uniform(key, count)` is at least `rate`, which lies in (0, 1)."""
    # A number k / 2**53 is at least the rate if k is at least this: scaling by 2**53 is exact.
    least = math.ceil(rate * 2.0**_DIGITS)
    if key.device.type == "cuda" and has_kernels():
        found: Tensor = _Kept.apply(key, count, least)  # type: ignore[no-untyped-call]
        return found
    return ((rng.bits(key, count) >> (64 - _DIGITS)) & ((1 << _DIGITS) - 1)) >= least


class _Kept(torch.autograd.Function):
    """The comparison, with a rule for stacks."""

    @staticmethod
    def forward(key: Tensor, count: int, least: int) -> Tensor:
        found: Tensor = _kept(key.reshape(1), count, least)[0]
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        del inputs
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(info: Any, dims: Any, key: Tensor, count: int, least: int) -> tuple[Tensor, int]:
        del info, dims
        return _kept(key.contiguous(), count, least), 0


@custom_op("anyfleet::kept_units", mutates_args=())
def _kept(key: Tensor, count: int, least: int) -> Tensor:
    """Return the comparison for many keys, bool [keys, count]."""
    from anyfleet.elastic.execution.kernels import kept

    return kept(key, count, least)


@_kept.register_fake
def _(key: Tensor, count: int, least: int) -> Tensor:
    del least
    return key.new_empty(len(key), count, dtype=torch.bool)
