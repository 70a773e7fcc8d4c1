"""Batch norm over the rows that count, which saves for backward only what torch's own does."""

import math
from typing import Any

import torch
from torch import Tensor


def masked_batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, rows: Tensor, eps: float
) -> Tensor:
    """Normalise [N, C, …] by the statistics of the entries that count.

    `rows` marks them; it has size 1 along the channels and wherever the batch does not lie.
    """
    out: Tensor = _MaskedNorm.apply(x, weight, bias, rows, eps)  # type: ignore[no-untyped-call]
    return out


def statistics(x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and biased variance per channel over the rows that count, and their number."""
    over = _over(x)
    weights = rows.to(x.dtype)
    repeated = (n for n, own in zip(x.shape, rows.shape, strict=True) if own == 1)
    count = (weights.sum() * (math.prod(repeated) // x.shape[1])).clamp(min=1)
    mean = (x * weights).sum(over) / count
    # Padded rows are zeroed before squaring so that nothing in them can reach the result.
    centred = (x - _spread(mean, x)) * weights
    return mean, (centred * centred).sum(over) / count, count


class _MaskedNorm(torch.autograd.Function):
    """A masked norm that saves its input and its mask, and none of the maps in between.

    The statistics are computed again in the backward pass, so that it is itself a plain function of
    what was saved and can be differentiated once more.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, rows: Tensor, eps: float
    ) -> Tensor:
        mean, variance, _ = statistics(x, rows)
        scale = torch.rsqrt(variance + eps)
        scale = scale if weight is None else scale * weight
        out = (x - _spread(mean, x)) * _spread(scale, x)
        return out if bias is None else out + _spread(bias, x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        del output
        x, weight, bias, rows, eps = inputs
        ctx.save_for_backward(x, weight, rows)
        ctx.eps, ctx.biased = eps, bias is not None

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        x, weight, rows = ctx.saved_tensors
        mean, variance, count = statistics(x, rows)
        scale = torch.rsqrt(variance + ctx.eps)
        normal = (x - _spread(mean, x)) * _spread(scale, x)
        total = gradient.sum(_over(x))
        along = (gradient * normal).sum(_over(x))
        # Only rows that count moved the mean and the variance.
        moved = (_spread(total, x) + normal * _spread(along, x)) * (rows.to(x.dtype) / count)
        scale = scale if weight is None else scale * weight
        own = (gradient - moved) * _spread(scale, x)
        return own, None if weight is None else along, total if ctx.biased else None, None, None


def _over(x: Tensor) -> tuple[int, ...]:
    return (0, *range(2, x.ndim))


def _spread(channel: Tensor, x: Tensor) -> Tensor:
    return channel.reshape(1, -1, *(1,) * (x.ndim - 2))
