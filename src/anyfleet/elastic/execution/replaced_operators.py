"""Operators that `apply` runs in a form of its own: masks, statistics, random keys, speed."""

import math
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch.func import vjp

from anyfleet.elastic.batch_rows import row_mask
from anyfleet.elastic.execution import random_operators as draws
from anyfleet.elastic.execution import stacked_pooling
from anyfleet.elastic.execution.masked_norm import masked_batch_norm, statistics
from anyfleet.elastic.execution.modes import Run, Special
from anyfleet.elastic.execution.stacked_convolution import convolution as stacked_convolution
from anyfleet.elastic.execution.stacked_convolution import fits
from anyfleet.elastic.program import Node


def batch_norm(run: Run, args: list[Any], node: Node) -> Tensor:
    """Run batch norm over the rows that count, and move the running statistics by the mode."""
    x, weight, bias, mean, variance, training, momentum, eps = args[:8]
    use_running = mean is not None and (run.mode.statistics == "running" or not training)
    if use_running:
        return torch.batch_norm(x, weight, bias, mean, variance, False, 0.0, eps, False)
    rows = None if run.valid is None else row_mask(run.valid, node.dims or (), run.sizes)
    if run.mode.update != "none" and mean is not None and training:
        own_mean, own_variance, count = _statistics(x.detach(), rows)
        if run.mode.update != "own":
            own_variance = own_variance * (count / (count - 1).clamp(min=1))
        _update(run, node, (own_mean, own_variance), momentum)
    if rows is None:
        return torch.batch_norm(x, weight, bias, None, None, True, 0.0, eps, False)
    return masked_batch_norm(x, weight, bias, rows, eps)


def instance_norm(run: Run, args: list[Any], node: Node) -> Tensor:
    """Run instance norm: torch's own would move the running statistics it is given in place."""
    x, weight, bias, mean, variance, by_sample, momentum, eps, fast = args
    if mean is not None and (run.mode.statistics == "running" or not by_sample):
        return torch.batch_norm(x, weight, bias, mean, variance, False, 0.0, eps, False)
    if mean is not None and run.mode.update != "none":
        over = tuple(range(2, x.ndim))
        found = torch.var_mean(x.detach(), over, correction=run.mode.update != "own")
        names = [getattr(arg, "name", "") for arg in node.args[3:5]]
        for name, each in zip(names, found[::-1], strict=True):
            before = run.updates[name]
            own = _over_samples(run, each, node)
            after = before + momentum * (own - before) if run.mode.update == "module" else own
            seen = torch.ones((), device=x.device) if run.valid is None else run.valid.any()
            run.updates[name] = torch.where(seen.bool(), after.to(before.dtype), before)
    return torch.instance_norm(x, weight, bias, None, None, True, momentum, eps, fast)


def _over_samples(run: Run, values: Tensor, node: Node) -> Tensor:
    """Return the mean of [N, C] over the rows that count."""
    rows = None if run.valid is None else row_mask(run.valid, node.dims or (), run.sizes)
    if rows is None:
        return values.mean(0)
    weights = rows.reshape(-1, 1).to(values.dtype)
    return (values * weights).sum(0) / weights.sum().clamp(min=1)


def _statistics(x: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and biased variance per channel over the rows that count, and their number."""
    if rows is not None:
        return statistics(x, rows)
    variance, mean = torch.var_mean(x, (0, *range(2, x.ndim)), correction=0)
    return mean, variance, x.new_full((), float(x.numel() // x.shape[1]))


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
        moved = run.mode.update == "module"
        after = before + step * (statistic - before) if moved else statistic
        run.updates[name] = torch.where(seen.bool(), after.to(before.dtype), before)


def attention(run: Run, args: list[Any], node: Node) -> Tensor:
    """Run scaled dot-product attention, written out where it drops by key or is stacked."""
    query, key, value, mask, rate, causal, scale, grouped = args
    drops = draws.drawing(run, node) and rate
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
    weights = draws.dropped(run, torch.softmax(scores, -1), rate if drops else 0.0, node)
    mixed: Tensor = weights @ value
    return mixed


def max_pool(_run: Run, args: list[Any], _node: Node) -> Tensor:
    """Pool in another way than torch: the same numbers and gradients in less time.

    On a CPU torch's kernel looks for the place of every maximum with a branch that nobody can
    predict, and would take longer than the convolution before it; so it would for a stack on a
    CUDA device.
    """
    x, kernel, *further = args
    if stacked_pooling.fits(x, kernel, further) and _stacked(x):
        return stacked_pooling.max_pool(x, kernel)
    if x.device.type != "cpu" or len(kernel) != 2:
        return torch.max_pool2d(x, kernel, *further)
    padded = len(further) > 1  # or dilated, or rounded up
    if not x.requires_grad and not padded:
        return _pooled_by_rows(x, kernel, (further[0] if further else None) or kernel)
    if x.numel() < _WORTH_TRANSPOSING:
        return torch.max_pool2d(x, kernel, *further)
    return _pooled_by_places(x, kernel, further)


def _pooled_by_rows(x: Tensor, kernel: list[int], stride: list[int]) -> Tensor:
    """Pool by rows and then by columns, for a result that no gradient will be asked of."""
    rows = reduce(torch.maximum, x.unfold(-2, kernel[0], stride[0]).unbind(-1))
    pooled: Tensor = reduce(torch.maximum, rows.unfold(-1, kernel[1], stride[1]).unbind(-1))
    return pooled.contiguous()


def _pooled_by_places(x: Tensor, kernel: list[int], further: list[Any]) -> Tensor:
    """Pool by finding the places of the maxima, and then taking what is there.

    With its channels last, torch finds the places for several channels at a time; with its channels
    first, it is faster at taking and at giving gradients back.
    """
    last = x.detach().movedim(-3, -1).contiguous().movedim(-1, -3)
    places = torch.ops.aten.max_pool2d_with_indices(last, kernel, *further)[1]
    return x.flatten(-2).gather(-1, places.flatten(-2)).view(places.shape)


def convolution(_run: Run, args: list[Any], _node: Node) -> Tensor:
    """Run a convolution; that of a stack in a form of its own, where that is faster."""
    x, weight, bias, stride, padding, dilation, groups = (*args, *_CONVOLUTION[len(args) :])
    further = groups != 1 or set(dilation) != {1}
    if fits(x, weight, stride, padding, further) and _stacked(weight):
        return stacked_convolution(x, weight, bias, stride[0], padding[0])
    return torch.conv2d(x, weight, bias, stride, padding, dilation, groups)


def average_pool(_run: Run, args: list[Any], _node: Node) -> Tensor:
    """Pool to a given size; a stack to one entry by a mean.

    Torch has no rule for a stack whose channels lie last, as they do after a convolution of ours.
    """
    x, size = args
    if _stacked(x) and set(size) == {1}:
        mean: Tensor = x.mean((-2, -1), keepdim=True)
        return mean
    return torch.nn.functional.adaptive_avg_pool2d(x, size)


def view(_run: Run, args: list[Any], _node: Node) -> Tensor:
    """Return a tensor in another shape; a copy if its channels lie last, as kernels of ours do."""
    x, shape = args
    found: Tensor = x.reshape(shape)
    return found


# What the arguments of a convolution are where they are left out.
_CONVOLUTION: tuple[Any, ...] = (None, None, None, [1, 1], [0, 0], [1, 1], 1)


def recurrent(_run: Run, args: list[Any], node: Node) -> Any:
    """Run a recurrent layer, also in a stack.

    Without derivatives torch has no rule for a stack; to be differentiated, the layer is taken
    apart. So it is differentiated here, with respect to nothing: no activation is kept.
    """
    _, layer, overload = node.op.split(".")
    function = getattr(getattr(torch.ops.aten, layer), overload)
    top: Any = _functorch.peek_interpreter_stack()
    if top is None or top.key() != _functorch.TransformType.Vmap:
        return function(*args)
    return vjp(lambda _nothing: function(*args), {})[0]


def _stacked(tensor: Tensor) -> bool:
    """Return whether this runs under vmap, where the fused kernels fall back to a slow loop."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        if _functorch.is_batchedtensor(tensor):
            return True
        tensor = _functorch.get_unwrapped(tensor)
    return False


_WORTH_TRANSPOSING = 1 << 14  # elements; fewer are pooled before another way is prepared
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
SPECIAL: dict[str, Special] = {
    **draws.RANDOM,
    **{f"aten.{layer}.input": recurrent for layer in _RECURRENT},
    "aten.adaptive_avg_pool2d.default": average_pool,
    "aten.batch_norm.default": batch_norm,
    "aten.conv2d.default": convolution,
    "aten.instance_norm.default": instance_norm,
    "aten.max_pool2d.default": max_pool,
    "aten.scaled_dot_product_attention.default": attention,
    "aten.view.default": view,
}
