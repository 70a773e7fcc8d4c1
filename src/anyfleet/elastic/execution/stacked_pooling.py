"""Max-pooling of a stack of devices on a CUDA device, where windows do not overlap.

Torch's kernels for it take as long as the convolutions before them. Here every maximum is found,
and every gradient given back, by one pass over the samples (see `kernels`); the numbers are those
of torch, also among equal and undefined ones.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.functional import one_hot, pad

from anyfleet.elastic.execution.stacked_convolution import (
    KERNEL_TYPES,
    devices_first,
    has_kernels,
)

_ENTRIES = 64  # of a window: a program reads them one by one


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
        and kernel[0] * kernel[1] <= _ENTRIES
        and len(further) < 2
        and list(further[0] if further and further[0] else kernel) == list(kernel)
        and x.shape[-2] >= kernel[0]
        and x.shape[-1] >= kernel[1]
        and get_proxy_mode() is None
    )


def max_pool(x: Tensor, kernel: list[int]) -> Tensor:
    """Return the maxima of the windows of samples [..., channels, height, width]."""
    window = Window(*kernel, *x.shape[-2:])
    out, _ = _Pooled.apply(x.movedim(-3, -1), window)  # type: ignore[no-untyped-call]
    found: Tensor = out.movedim(-1, -3)
    return found


# Channels are last in what follows, and any number of axes comes first: those of devices, too.


class _Pooled(torch.autograd.Function):
    """Maxima [..., rows, columns, channels], and at which place of its window each was."""

    @staticmethod
    def forward(x: Tensor, window: Window) -> tuple[Tensor, Tensor]:
        if x.is_cuda:
            from anyfleet.elastic.execution.kernels import pool

            return pool(x.contiguous(), *window)
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
    def vmap(info: Any, dims: Any, x: Tensor, window: Window) -> tuple[Any, tuple[int, int]]:
        (first,) = devices_first(info, dims, x)
        return _Pooled.apply(first, window), (0, 0)  # type: ignore[no-untyped-call]


class _Spread(torch.autograd.Function):
    """The gradient of the samples: that of a maximum at its place, and zero elsewhere."""

    @staticmethod
    def forward(gradient: Tensor, places: Tensor, window: Window) -> Tensor:
        if gradient.is_cuda:
            from anyfleet.elastic.execution.kernels import spread

            return spread(gradient.contiguous(), places.contiguous(), *window)
        at = one_hot(places.long(), window.rows * window.columns).bool()
        apart = torch.where(at, gradient.unsqueeze(-1), 0)
        apart = apart.reshape(*places.shape, window.rows, window.columns)
        # [..., down, right, channels, rows, columns] as [..., down, rows, right, columns, channels]
        whole = apart.movedim((-2, -1), (-4, -2)).flatten(-3, -2).flatten(-4, -3)
        *_, height, width, _ = whole.shape
        return pad(whole, (0, 0, 0, window.width - width, 0, window.height - height))

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
    ) -> tuple[Any, int]:
        own = devices_first(info, dims, gradient, places)
        return _Spread.apply(*own, window), 0  # type: ignore[no-untyped-call]


def _windows(x: Tensor, window: Window) -> Tensor:
    """Return the entries of all windows, [..., rows, columns, channels, entries]."""
    (rows, columns), (down, right) = window[:2], (window.down, window.right)
    whole = x[..., : down * rows, : right * columns, :]
    apart = whole.reshape(*x.shape[:-3], down, rows, right, columns, x.shape[-1])
    return apart.movedim((-4, -2), (-2, -1)).flatten(-2)
