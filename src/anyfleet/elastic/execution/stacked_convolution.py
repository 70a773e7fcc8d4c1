"""Convolution of a stack of devices, each with weights of its own.

Torch maps a convolution over weights as one with a group for each device. On a CUDA device cuDNN
runs that as hundreds of small kernels; here forward and both backward passes are single kernels
(see `kernels`), chosen by rule, not by a measurement that a resumed run would have to repeat: on an
H200 they were the fastest for every layer of CIFAR-10 networks that was tried, but for the weights
of a first layer. On a CPU one convolution after the other takes a third of the time of the grouped
one where there are few input channels; with more of them the grouped one is faster.
"""

from functools import lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import custom_op
from torch.nn.functional import pad
from torch.nn.grad import conv2d_input, conv2d_weight

KERNEL_TYPES = (torch.float32, torch.bfloat16)
_FEW = 8  # input channels
_PAIR = 2  # input channels
_SMALL = 32  # weights of an output


class Shift(NamedTuple):
    """How a square filter moves over the samples, and their size."""

    stride: int
    padding: int
    height: int
    width: int


@lru_cache(maxsize=1)
def has_kernels() -> bool:
    """Return whether the kernels for stacks can be imported."""
    return find_spec("triton") is not None


def fits(x: Tensor, weight: Tensor, stride: list[int], padding: list[int], further: bool) -> bool:
    """Return whether this convolution has a form of its own; `further`: dilated or grouped."""
    size = weight.shape[-1]
    by_kernel = x.device.type == "cuda" and has_kernels() and x.dtype in KERNEL_TYPES
    return (
        (by_kernel or (x.device.type == "cpu" and weight.shape[1] < _FEW))
        and not further
        and x.ndim == weight.ndim == 4
        and weight.shape[-2] == size
        and len({*stride}) == len({*padding}) == 1
        and padding[0] < size
    )


def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int
) -> Tensor:
    """Return the convolution of one device; under `vmap`, of all of them."""
    if torch.is_autocast_enabled(x.device.type):
        kind = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(kind), weight.to(kind)
        bias = None if bias is None else bias.to(kind)
    shift = Shift(stride, padding, *x.shape[-2:])
    out: Tensor = _Convolution.apply(x, weight, bias, shift)  # type: ignore[no-untyped-call]
    return out


class _Convolution(torch.autograd.Function):
    """The convolution, with a rule for stacks."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, shift: Shift) -> Tensor:
        return torch.conv2d(x, weight, bias, shift.stride, shift.padding)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        del output
        x, weight, bias, ctx.shift = inputs
        ctx.save_for_backward(x, weight)
        ctx.biased = bias is not None

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        x, weight = ctx.saved_tensors
        own = weights = None
        # The samples themselves have no gradient: that of the first layer would be for nothing.
        if ctx.needs_input_grad[0]:
            own = _InputGradient.apply(gradient, weight, ctx.shift)  # type: ignore[no-untyped-call]
        if ctx.needs_input_grad[1]:
            size = weight.shape[-1]
            weights = _WeightGradient.apply(gradient, x, size, ctx.shift)  # type: ignore[no-untyped-call]
        return own, weights, gradient.sum((0, 2, 3)) if ctx.biased else None, None

    @staticmethod
    def vmap(
        info: Any, dims: Any, x: Tensor, weight: Tensor, bias: Tensor | None, shift: Shift
    ) -> tuple[Tensor, int]:
        x, weight = devices_first(info, dims, x, weight)
        extra = () if bias is None else devices_first(info, dims[2:], bias)
        if x.device.type == "cpu":
            biases = extra[0] if extra else [None] * len(x)
            own = zip(x, weight, biases, strict=True)
            return torch.stack([_Convolution.forward(*each, shift) for each in own]), 0
        size, whole = weight.shape[-1], [each.contiguous() for each in extra]
        out = _stacked(_last(x), _taps(weight), whole, size, shift.padding, shift.stride)
        return _second(out), 0


class _InputGradient(torch.autograd.Function):
    """The gradient of a convolution's input, from that of its output."""

    @staticmethod
    def forward(gradient: Tensor, weight: Tensor, shift: Shift) -> Tensor:
        shape = (len(gradient), weight.shape[1], shift.height, shift.width)
        way = shift.stride, shift.padding
        found: Tensor = conv2d_input(shape, weight, gradient, *way)  # type: ignore[no-untyped-call]
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        del output
        gradient, weight, ctx.shift = inputs
        ctx.save_for_backward(gradient, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient, weight = ctx.saved_tensors
        (along,) = gradients
        again = _Convolution.apply(along, weight, None, ctx.shift)  # type: ignore[no-untyped-call]
        size = weight.shape[-1]
        weights = _WeightGradient.apply(gradient, along, size, ctx.shift)  # type: ignore[no-untyped-call]
        return again, weights, None

    @staticmethod
    def vmap(
        info: Any, dims: Any, gradient: Tensor, weight: Tensor, shift: Shift
    ) -> tuple[Tensor, int]:
        gradient, weight = devices_first(info, dims, gradient, weight)
        if gradient.device.type == "cpu":
            own = zip(gradient, weight, strict=True)
            return torch.stack([_InputGradient.forward(*each, shift) for each in own]), 0
        size = weight.shape[-1]
        if shift.stride > 1:
            return _grouped_input_gradient(gradient, weight, shift), 0
        # A convolution with the filter turned around, and inputs and outputs exchanged.
        turned = _taps(weight.flip(-2, -1).transpose(1, 2))
        out = _stacked(_last(gradient), turned, [], size, size - 1 - shift.padding, 1)
        return _second(out), 0


class _WeightGradient(torch.autograd.Function):
    """The gradient of a convolution's weights, from that of its output."""

    @staticmethod
    def forward(gradient: Tensor, x: Tensor, size: int, shift: Shift) -> Tensor:
        shape = (gradient.shape[1], x.shape[1], size, size)
        way = shift.stride, shift.padding
        found: Tensor = conv2d_weight(x, shape, gradient, *way)  # type: ignore[no-untyped-call]
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        del output
        gradient, x, _, ctx.shift = inputs
        ctx.save_for_backward(gradient, x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient, x = ctx.saved_tensors
        (along,) = gradients
        again = _Convolution.apply(x, along, None, ctx.shift)  # type: ignore[no-untyped-call]
        own = _InputGradient.apply(gradient, along, ctx.shift)  # type: ignore[no-untyped-call]
        return again, own, None, None

    @staticmethod
    def vmap(
        info: Any, dims: Any, gradient: Tensor, x: Tensor, size: int, shift: Shift
    ) -> tuple[Tensor, int]:
        gradient, x = devices_first(info, dims, gradient, x)
        if x.device.type == "cpu":
            own = zip(gradient, x, strict=True)
            return torch.stack([_WeightGradient.forward(*each, size, shift) for each in own]), 0
        given = _last(x), _last(gradient), size, shift.padding, shift.stride
        taps = _stacked_weight_gradient(*given).unflatten(2, (size, size))
        own = taps[:, : gradient.shape[2], ..., : x.shape[2]]  # without padding
        return own.permute(0, 1, 4, 2, 3).to(x.dtype), 0


@custom_op("anyfleet::stacked_convolution", mutates_args=())
def _stacked(
    x: Tensor, weight: Tensor, bias: list[Tensor], size: int, padding: int, stride: int
) -> Tensor:
    """Return the convolutions of a stack; `bias` holds one tensor, or none."""
    from anyfleet.elastic.execution.kernels import convolution

    return convolution(x, weight, bias[0] if bias else None, size, padding, stride)


@_stacked.register_fake
def _(
    x: Tensor, weight: Tensor, bias: list[Tensor], size: int, padding: int, stride: int
) -> Tensor:
    del bias
    down, right = ((n + 2 * padding - size) // stride + 1 for n in x.shape[2:4])
    return x.new_empty(*x.shape[:2], down, right, weight.shape[1])


@_stacked.register_vmap
def _(
    info: Any,
    dims: Any,
    x: Tensor,
    weight: Tensor,
    bias: list[Tensor],
    size: int,
    padding: int,
    stride: int,
) -> tuple[Tensor, int]:
    """Return the convolutions of several stacks: all devices of all of them are one stack."""
    x, weight = (each.flatten(0, 1) for each in devices_first(info, dims, x, weight))
    biases = [each.flatten(0, 1) for each in devices_first(info, dims[2] or [None], *bias)]
    out = _stacked(x.contiguous(), weight.contiguous(), biases, size, padding, stride)
    return out.unflatten(0, (info.batch_size, -1)), 0


@custom_op("anyfleet::stacked_weight_gradient", mutates_args=())
def _stacked_weight_gradient(
    x: Tensor, gradient: Tensor, size: int, padding: int, stride: int
) -> Tensor:
    """Return the gradients of the weights of a stack, in float32."""
    from anyfleet.elastic.execution.kernels import weight_gradient

    return weight_gradient(x, gradient, size * size, size, padding, stride)


@_stacked_weight_gradient.register_fake
def _(x: Tensor, gradient: Tensor, size: int, padding: int, stride: int) -> Tensor:
    del padding, stride
    shape = len(x), gradient.shape[-1], size * size, x.shape[-1]
    return x.new_empty(shape, dtype=torch.float32)


@_stacked_weight_gradient.register_vmap
def _(
    info: Any, dims: Any, x: Tensor, gradient: Tensor, size: int, padding: int, stride: int
) -> tuple[Tensor, int]:
    """Return the gradients of several stacks: all devices of all of them are one stack."""
    x, gradient = (
        each.flatten(0, 1).contiguous() for each in devices_first(info, dims, x, gradient)
    )
    out = _stacked_weight_gradient(x, gradient, size, padding, stride)
    return out.unflatten(0, (info.batch_size, -1)), 0


def _grouped_input_gradient(gradient: Tensor, weight: Tensor, shift: Shift) -> Tensor:
    """Return the gradients of the inputs as torch maps them, with a group for each device."""
    devices, batch = gradient.shape[:2]
    inputs = weight.shape[2]
    joined = gradient.transpose(0, 1).flatten(1, 2)
    shape = (batch, devices * inputs, shift.height, shift.width)
    found: Tensor = conv2d_input(  # type: ignore[no-untyped-call]
        shape, weight.flatten(0, 1), joined, shift.stride, shift.padding, groups=devices
    )
    return found.reshape(batch, devices, inputs, shift.height, shift.width).transpose(0, 1)


def devices_first(info: Any, dims: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors with the devices first; what they share is repeated."""
    return tuple(
        tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for dim, tensor in zip(dims, tensors, strict=False)
    )


def _last(x: Tensor) -> Tensor:
    """Return samples with their channels last, padded with zeros to `_wide` channels."""
    return _padded(x.permute(0, 1, 3, 4, 2), _wide(x.shape[2]) - x.shape[2])


def _padded(value: Tensor, more: int) -> Tensor:
    """Return a tensor with so many zeros more along its last axis."""
    return pad(value, (0, more)) if more else value.contiguous()


def _wide(channels: int) -> int:
    """Return how many channels are kept: a multiple of four, of which one instruction reads four.

    One or two channels stay as they are: with zeros they would be read no faster.
    """
    return channels if channels <= _PAIR else -(-channels // 4) * 4


def _second(x: Tensor) -> Tensor:
    """Return samples with their channels after the batch, where torch has them; a view."""
    return x.permute(0, 1, 4, 2, 3)


def _taps(weight: Tensor) -> Tensor:
    """Return weights [devices, outputs, inputs, size, size] as [devices, outputs, taps, inputs].

    Inputs are padded as channels are, but for filters that one step of a sum has room for.
    """
    taps = weight.permute(0, 1, 3, 4, 2).flatten(2, 3)
    inputs = weight.shape[2]
    more = _wide(inputs) - inputs if inputs * taps.shape[2] > _SMALL else 0
    return _padded(taps, more)
