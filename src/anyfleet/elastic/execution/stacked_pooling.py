"""Max-pooling of a stack of devices on a CUDA device, where windows do not overlap.

Torch's kernels for it take as long as the convolutions before them. Here every maximum is found,
and every gradient given back, by one pass over the samples (see `kernels`); the numbers are those
of torch, also among equal and undefined ones.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.library import custom_op
from torch.nn.functional import pad

from anyfleet.elastic.execution.stacked_convolution import KERNEL_TYPES, devices_first, has_kernels


class Window(NamedTuple):
    """The size of a window, and that of the samples."""

    rows: int
    columns: int
    height: int
    width: int

    @property
    def down(self) -> int:
        """The number of windows below each other."""
        return self.height // self.rows

    @property
    def right(self) -> int:
        """The number of windows side by side."""
        return self.width // self.columns


def fits(x: Tensor, kernel: list[int], further: list[Any]) -> bool:
    """Return whether this pooling has a form of its own; `further`: stride, padding and so on.

    A step that is to be compiled keeps torch's operator, which the compiler joins with others.
    """
    return (
        x.is_cuda
        and has_kernels()
        and x.dtype in KERNEL_TYPES
        and len(kernel) == 2
        and len(further) < 2
        and list(further[0] if further and further[0] else kernel) == list(kernel)
        and x.shape[-2] >= kernel[0]
        and x.shape[-1] >= kernel[1]
        and get_proxy_mode() is None
    )


def max_pool(x: Tensor, kernel: list[int]) -> Tensor:
    """Return the maxima of windows of one device's samples; under `vmap`, of all devices'."""
    window = Window(*kernel, *x.shape[-2:])
    out, _ = _Pooled.apply(x, window)  # type: ignore[no-untyped-call]
    found: Tensor = out
    return found


class _Pooled(torch.autograd.Function):
    """Maxima [batch, channels, rows, columns], and which place of its window each was at."""

    @staticmethod
    def forward(x: Tensor, window: Window) -> tuple[Tensor, Tensor]:
        out, places = _windows(x, window).max(-1)
        return out, places.to(torch.uint8)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.window = inputs[1]
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        return _Spread.apply(gradients[0], places, ctx.window), None  # type: ignore[no-untyped-call]

    @staticmethod
    def vmap(
        info: Any, dims: Any, x: Tensor, window: Window
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        del info
        out, places = _pool(_last(x.movedim(dims[0], 0)), window.rows, window.columns)
        return (_second(out), _second(places)), (0, 0)


class _Spread(torch.autograd.Function):
    """The gradient of the samples: that of a maximum at its place, and zero elsewhere."""

    @staticmethod
    def forward(gradient: Tensor, places: Tensor, window: Window) -> Tensor:
        size, spread = window.rows * window.columns, gradient.unsqueeze(-1)
        at = torch.nn.functional.one_hot(places.long(), size).bool()
        found = torch.where(at, spread, 0).reshape(*places.shape, window.rows, window.columns)
        rows = found.transpose(-2, -3).flatten(-2).flatten(-3, -2)
        return pad(rows, (0, window.width - rows.shape[-1], 0, window.height - rows.shape[-2]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        del output
        ctx.window = inputs[2]
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        at = places.long().unsqueeze(-1)
        return _windows(gradients[0], ctx.window).gather(-1, at).squeeze(-1), None, None

    @staticmethod
    def vmap(
        info: Any, dims: Any, gradient: Tensor, places: Tensor, window: Window
    ) -> tuple[Tensor, int]:
        own = [_last(each) for each in devices_first(info, dims, gradient, places)]
        return _second(_spread(own[0], own[1], list(window))), 0


@custom_op("anyfleet::stacked_pool", mutates_args=())
def _pool(x: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Return maxima and their places; channels are last."""
    from anyfleet.elastic.execution.kernels import pool

    return pool(x, rows, columns)


@_pool.register_fake
def _(x: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    *before, height, width, channels = x.shape
    out = x.new_empty(*before, height // rows, width // columns, channels)
    return out, torch.empty_like(out, dtype=torch.uint8)


@_pool.register_vmap
def _(
    info: Any, dims: Any, x: Tensor, rows: int, columns: int
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    """Return the maxima of several stacks: one stack of all of their devices."""
    del info
    return _pool(x.movedim(dims[0], 0).contiguous(), rows, columns), (0, 0)


@custom_op("anyfleet::stacked_spread", mutates_args=())
def _spread(gradient: Tensor, places: Tensor, window: list[int]) -> Tensor:
    """Return the gradient of the samples; channels are last."""
    from anyfleet.elastic.execution.kernels import spread

    return spread(gradient, places, *window)


@_spread.register_fake
def _(gradient: Tensor, places: Tensor, window: list[int]) -> Tensor:
    del places
    return gradient.new_empty(*gradient.shape[:-3], *window[2:], gradient.shape[-1])


@_spread.register_vmap
def _(
    info: Any, dims: Any, gradient: Tensor, places: Tensor, window: list[int]
) -> tuple[Tensor, int]:
    """Return the gradients of several stacks: one stack of all of their devices."""
    own = [each.contiguous() for each in devices_first(info, dims, gradient, places)]
    return _spread(own[0], own[1], window), 0


def _windows(x: Tensor, window: Window) -> Tensor:
    """Return the entries of all windows, [..., rows, columns, entries]."""
    (rows, columns), (down, right) = window[:2], (window.down, window.right)
    whole = x[..., : down * rows, : right * columns]
    apart = whole.reshape(*x.shape[:-2], down, rows, right, columns)
    return apart.transpose(-2, -3).flatten(-2)


def _last(x: Tensor) -> Tensor:
    """Return samples with their channels last, [..., rows, columns, channels]."""
    return x.movedim(-3, -1).contiguous()


def _second(x: Tensor) -> Tensor:
    """Return samples with their channels before rows and columns; a view."""
    return x.movedim(-1, -3)
