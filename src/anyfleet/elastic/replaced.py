"""The operators that `apply` teaches something: batch norm masks and statistics, dropout keys."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch._C import _functorch

from anyfleet import rng
from anyfleet.elastic.program import Node

# -scale * alpha of SELU.
_SELU_LIMIT = -1.7580993408473766


@dataclass(frozen=True)
class Mode:
    """How random and statistical layers behave.

    `statistics`: batch norm normalises by the batch or by its running buffers. `update`: what
    becomes of the running buffers: kept ("none"), moved by the module's own momentum ("module"),
    or replaced by the exact mean and unbiased variance of this batch ("exact", for cumulative
    averaging by the caller).
    """

    dropout: bool
    statistics: Literal["batch", "running"]
    update: Literal["none", "module", "exact"] = "none"


TRAIN = Mode(dropout=True, statistics="batch", update="module")
STATIC = Mode(dropout=True, statistics="batch")
EVALUATE = Mode(dropout=False, statistics="running")
EVALUATE_BATCH = Mode(dropout=False, statistics="batch")
COLLECT = Mode(dropout=False, statistics="batch", update="exact")


@dataclass
class Run:
    """What one execution of a program knows besides its values."""

    mode: Mode
    batch: int
    valid: Tensor | None
    key: Tensor | None
    dtype: torch.dtype
    device: torch.device
    updates: dict[str, Tensor]


Special = Callable[[Run, list[Any], Node], Tensor]


def batch_norm(run: Run, args: list[Any], node: Node) -> Tensor:
    x, weight, bias, mean, variance, training, momentum, eps = args[:8]
    use_running = mean is not None and (run.mode.statistics == "running" or not training)
    if use_running:
        return torch.batch_norm(x, weight, bias, mean, variance, False, 0.0, eps, False)
    rows = _rows(run, x)
    if run.mode.update != "none" and mean is not None and training:
        own_mean, own_variance, count = _statistics(x.detach(), rows)
        unbiased = own_variance * (count / (count - 1).clamp(min=1))
        _update(run, node, (own_mean, unbiased), momentum)
    if rows is None:
        return torch.batch_norm(x, weight, bias, None, None, True, 0.0, eps, False)
    centre, spread, _ = _statistics(x, rows)
    shape = (1, -1, *(1,) * (x.ndim - 2))
    scale = torch.rsqrt(spread + eps)
    scale = scale if weight is None else scale * weight
    out: Tensor = (x - centre.reshape(shape)) * scale.reshape(shape)
    return out if bias is None else out + bias.reshape(shape)


def _rows(run: Run, x: Tensor) -> Tensor | None:
    """Which rows count; a batch flattened with something else repeats its mask."""
    if run.valid is None:
        return None
    times = x.shape[0] // run.batch
    mask = run.valid.unsqueeze(1).expand(run.batch, times).reshape(-1)
    return mask.reshape(-1, *(1,) * (x.ndim - 1))


def _statistics(x: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and biased variance per channel over the rows that count, and their number."""
    over = (0, *range(2, x.ndim))
    if rows is None:
        variance, mean = torch.var_mean(x, over, correction=0)
        return (
            mean,
            variance,
            torch.tensor(float(x.numel() // x.shape[1]), device=x.device, dtype=x.dtype),
        )
    weights = rows.to(x.dtype)
    count = (weights.sum() * math.prod(x.shape[2:])).clamp(min=1)
    shape = (1, -1, *(1,) * (x.ndim - 2))
    mean = (x * weights).sum(over) / count
    # Padded rows are zeroed before squaring so that nothing in them can reach the result.
    centred = (x - mean.reshape(shape)) * weights
    return mean, (centred * centred).sum(over) / count, count


def _update(run: Run, node: Node, own: tuple[Tensor, Tensor], momentum: float | None) -> None:
    """Move the running statistics; a batch without a valid row changes nothing."""
    names = [getattr(arg, "name", "") for arg in node.args[3:5]]
    counter = f"{names[0].rpartition('.')[0]}.num_batches_tracked"
    seen = torch.ones((), device=own[0].device) if run.valid is None else run.valid.any()
    step: float | Tensor = momentum or 0.0
    if counter in run.updates:
        count = run.updates[counter] + seen.to(run.updates[counter].dtype)
        run.updates[counter] = count
        step = 1.0 / count.clamp(min=1) if momentum is None else step
    for name, statistic in zip(names, own, strict=True):
        before = run.updates[name]
        after = statistic if run.mode.update == "exact" else before + step * (statistic - before)
        run.updates[name] = torch.where(seen.bool(), after.to(before.dtype), before)


def dropout(run: Run, args: list[Any], node: Node) -> Tensor:
    """Zeroes units."""
    return _dropped(run, args[0], args[1], node)


def feature_dropout(run: Run, args: list[Any], node: Node) -> Tensor:
    """Zeroes whole channels."""
    return _dropped(run, args[0], args[1], node, by_channel=True)


def alpha_dropout(run: Run, args: list[Any], node: Node) -> Tensor:
    """Sets units to the limit of SELU; mean and variance stay."""
    return _dropped(run, args[0], args[1], node, floor=_SELU_LIMIT)


def feature_alpha_dropout(run: Run, args: list[Any], node: Node) -> Tensor:
    """The same for whole channels."""
    return _dropped(run, args[0], args[1], node, by_channel=True, floor=_SELU_LIMIT)


def _dropped(
    run: Run, x: Tensor, rate: float, node: Node, *, by_channel: bool = False, floor: float = 0.0
) -> Tensor:
    if not run.mode.dropout or rate == 0.0:
        return x
    if run.key is None:
        where = node.where or node.name
        raise ValueError(f"{where} drops at random: pass a key, or a Mode without dropout")
    shape = (*x.shape[:2], *(1,) * (x.ndim - 2)) if by_channel else tuple(x.shape)
    # Draw i belongs to element i of the flattened tensor, so padding at the end changes nothing.
    kept = rng.uniform(rng.fold(run.key, node.site), math.prod(shape)).reshape(shape) >= rate
    limit = torch.full((), floor, dtype=x.dtype, device=x.device)
    if rate >= 1.0:
        return torch.where(kept, x, limit)
    scale = ((1.0 - rate) * (1.0 + rate * floor * floor)) ** -0.5 if floor else 1.0 / (1.0 - rate)
    if not floor:
        return torch.where(kept, x * scale, limit)
    return torch.where(kept, x, limit) * scale - scale * floor * rate


def attention(run: Run, args: list[Any], node: Node) -> Tensor:
    """Scaled dot-product attention; written out where it must drop by key or is stacked."""
    query, key, value, mask, rate, causal, scale, grouped = args
    drops = run.mode.dropout and rate
    if not drops and not _stacked(query):
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, mask, 0.0, bool(causal), scale=scale, enable_gqa=bool(grouped)
        )
    if grouped:
        times = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    weights = _dropped(run, torch.softmax(scores, -1), rate if drops else 0.0, node)
    mixed: Tensor = weights @ value
    return mixed


def _stacked(tensor: Tensor) -> bool:
    """Whether this runs under vmap: the fused kernels would fall back to a slow loop there."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        if _functorch.is_batchedtensor(tensor):
            return True
        tensor = _functorch.get_unwrapped(tensor)
    return False


SPECIAL: dict[str, Special] = {
    "aten.batch_norm.default": batch_norm,
    "aten.dropout.default": dropout,
    "aten.feature_dropout.default": feature_dropout,
    "aten.alpha_dropout.default": alpha_dropout,
    "aten.feature_alpha_dropout.default": feature_alpha_dropout,
    "aten.scaled_dot_product_attention.default": attention,
}
