"""Triton kernels for stacks on a CUDA device: convolutions of many devices, and dropout by key.

Only imported where Triton is: `has_kernels` says whether it can be. Tensors are contiguous,
with channels last: samples [devices, batch, height, width, channels], weights [devices, taps,
inputs, outputs], where a tap is one place of the filter.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_ONE = 16  # the least size of a product of tiles
_WEIGHTS = 32  # inputs of a program that differentiates weights: 64 took up to three times as long


@triton.jit
def _convolution_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    batch: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    down: tl.tensor,
    right: tl.tensor,
    padding: tl.tensor,
    stride: tl.tensor,
    inputs: tl.constexpr,
    outputs: tl.constexpr,
    columns: tl.constexpr,
    taps: tl.constexpr,
    tile: tl.constexpr,
    tile_out: tl.constexpr,
    tile_in: tl.constexpr,
    biased: tl.constexpr,
    precision: tl.constexpr,
) -> None:
    device = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * tile + tl.arange(0, tile)
    channel = tl.program_id(2) * tile_out + tl.arange(0, tile_out)
    total = batch * down * right
    sample = place // (down * right)
    row = (place % (down * right)) // right * stride - padding
    column = place % right * stride - padding
    x += device * batch * height * width * inputs
    weight += device * taps * inputs * outputs
    summed = tl.zeros((tile, tile_out), dtype=tl.float32)
    if inputs % tile_in == 0:
        for tap in range(taps):
            own_row = row + tap // columns
            own_column = column + tap % columns
            inside = (place < total) & (own_row >= 0) & (own_row < height)
            inside = inside & (own_column >= 0) & (own_column < width)
            base = ((sample * height + own_row) * width + own_column) * inputs
            for first in range(0, inputs, tile_in):
                entry = first + tl.arange(0, tile_in)
                left = tl.load(x + base[:, None] + entry[None, :], mask=inside[:, None], other=0.0)
                right_ = tl.load(
                    weight + (tap * inputs + entry)[:, None] * outputs + channel[None, :],
                    mask=(channel < outputs)[None, :],
                    other=0.0,
                )
                summed = tl.dot(left, right_, summed, input_precision=precision)
    else:
        # Few input channels: taps and channels are summed over together.
        for first in range(0, taps * inputs, tile_in):
            entry = first + tl.arange(0, tile_in)
            tap = entry // inputs
            own_row = row[:, None] + (tap // columns)[None, :]
            own_column = column[:, None] + (tap % columns)[None, :]
            inside = (place < total)[:, None] & (entry < taps * inputs)[None, :]
            inside = inside & (own_row >= 0) & (own_row < height)
            inside = inside & (own_column >= 0) & (own_column < width)
            base = (sample[:, None] * height + own_row) * width + own_column
            left = tl.load(x + base * inputs + (entry % inputs)[None, :], mask=inside, other=0.0)
            right_ = tl.load(
                weight + entry[:, None] * outputs + channel[None, :],
                mask=(entry < taps * inputs)[:, None] & (channel < outputs)[None, :],
                other=0.0,
            )
            summed = tl.dot(left, right_, summed, input_precision=precision)
    if biased:
        own = tl.load(bias + device * outputs + channel, mask=channel < outputs, other=0.0)
        summed += own.to(tl.float32)[None, :]
    tl.store(
        out + (device * total + place[:, None]) * outputs + channel[None, :],
        summed.to(out.dtype.element_ty),
        mask=(place < total)[:, None] & (channel < outputs)[None, :],
    )


@triton.jit
def _weight_kernel(
    x: tl.tensor,
    gradient: tl.tensor,
    out: tl.tensor,
    devices: tl.tensor,
    batch: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    down: tl.tensor,
    right: tl.tensor,
    padding: tl.tensor,
    stride: tl.tensor,
    part: tl.constexpr,
    inputs: tl.constexpr,
    outputs: tl.constexpr,
    columns: tl.constexpr,
    taps: tl.constexpr,
    by_tap: tl.constexpr,
    tile_in: tl.constexpr,
    tile_out: tl.constexpr,
    tile: tl.constexpr,
    precision: tl.constexpr,
) -> None:
    device = (tl.program_id(1) % devices).to(tl.int64)
    share = tl.program_id(1) // devices
    channel = tl.program_id(2) * tile_out + tl.arange(0, tile_out)
    total = batch * down * right
    if by_tap:
        blocks: tl.constexpr = (inputs + tile_in - 1) // tile_in
        tap = tl.program_id(0) // blocks
        own = tl.program_id(0) % blocks * tile_in + tl.arange(0, tile_in)
        entry = tap * inputs + own
        counted = own < inputs
    else:
        # Few input channels: a program has some taps of all of them.
        entry = tl.program_id(0) * tile_in + tl.arange(0, tile_in)
        tap = (entry // inputs)[:, None]
        own = entry % inputs
        counted = entry < taps * inputs
    tap_row = tap // columns - padding
    tap_column = tap % columns - padding
    x += device * batch * height * width * inputs
    gradient += device * total * outputs
    summed = tl.zeros((tile_in, tile_out), dtype=tl.float32)
    for first in range(0, part, tile):
        near = first + tl.arange(0, tile)
        place = share * part + near
        counts = (near < part) & (place < total)
        sample = place // (down * right)
        row = (place % (down * right)) // right * stride
        column = place % right * stride
        # [tile], or [tile_in, tile] where a program has several taps.
        if by_tap:
            own_row = row + tap_row
            own_column = column + tap_column
            inside = counts & (own_row >= 0) & (own_row < height)
            inside = inside & (own_column >= 0) & (own_column < width)
            base = ((sample * height + own_row) * width + own_column) * inputs
            left = tl.load(
                x + base[None, :] + own[:, None],
                mask=inside[None, :] & counted[:, None],
                other=0.0,
            )
        else:
            own_row = row[None, :] + tap_row
            own_column = column[None, :] + tap_column
            inside = counts[None, :] & (own_row >= 0) & (own_row < height)
            inside = inside & (own_column >= 0) & (own_column < width)
            base = ((sample[None, :] * height + own_row) * width + own_column) * inputs
            left = tl.load(x + base + own[:, None], mask=inside & counted[:, None], other=0.0)
        right_ = tl.load(
            gradient + place[:, None] * outputs + channel[None, :],
            mask=counts[:, None] & (channel < outputs)[None, :],
            other=0.0,
        )
        summed = tl.dot(left, right_, summed, input_precision=precision)
    out += (share * devices + device) * taps * inputs * outputs
    tl.store(
        out + entry[:, None] * outputs + channel[None, :],
        summed,
        mask=counted[:, None] & (channel < outputs)[None, :],
    )


@triton.jit
def _kept_kernel(
    key: tl.tensor, out: tl.tensor, count: tl.tensor, least: tl.tensor, tile: tl.constexpr
) -> None:
    device = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    # The constants of `anyfleet.rng`, written as unsigned integers.
    z = (tl.load(key + device) + (place + 1) * -0x61C8864680B583EB).to(tl.uint64)
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = (z ^ (z >> 31)) >> 11
    tl.store(out + device * count + place, z.to(tl.int64) >= least, mask=place < count)


def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, columns: int, padding: int, stride: int
) -> Tensor:
    """Return the convolutions of a stack, [devices, batch, rows, columns, outputs].

    `columns` is the width of the filter.
    """
    devices, batch, height, width, inputs = x.shape
    taps, outputs = weight.shape[1], weight.shape[3]
    down = (height + 2 * padding - taps // columns) // stride + 1
    right = (width + 2 * padding - columns) // stride + 1
    out = torch.empty(devices, batch, down, right, outputs, device=x.device, dtype=x.dtype)
    tile, warps, stages = _tiles(x.dtype, _precision(x), inputs, outputs)
    tile_out, tile_in = min(128, _power(outputs)), _inner_tile(inputs, taps)
    grid = (triton.cdiv(batch * down * right, tile), devices, triton.cdiv(outputs, tile_out))
    _convolution_kernel[grid](
        x,
        weight,
        x if bias is None else bias,
        out,
        batch,
        height,
        width,
        down,
        right,
        padding,
        stride,
        inputs,
        outputs,
        columns,
        taps,
        tile,
        tile_out,
        tile_in,
        bias is not None,
        _precision(x),
        num_warps=warps,
        num_stages=stages,
    )
    return out


def weight_gradient(
    x: Tensor, gradient: Tensor, taps: int, columns: int, padding: int, stride: int
) -> Tensor:
    """Return the gradients of the weights of a stack, float32 [devices, taps, inputs, outputs]."""
    devices, batch, height, width, inputs = x.shape
    down, right, outputs = gradient.shape[2:]
    tile_out = min(128, _power(outputs))
    by_tap = inputs >= _ONE
    tile_in = min(_WEIGHTS, _power(inputs if by_tap else taps * inputs))
    total = batch * down * right
    blocks = taps * triton.cdiv(inputs, tile_in) if by_tap else triton.cdiv(taps * inputs, tile_in)
    wide = triton.cdiv(outputs, tile_out)
    # Enough programs for all multiprocessors, by a rule: a sum has the same order in every run.
    shares = max(1, min(8, 1024 // (blocks * wide * devices), total // 512))
    out = torch.empty(shares, devices, taps, inputs, outputs, device=x.device, dtype=torch.float32)
    _weight_kernel[(blocks, devices * shares, wide)](
        x,
        gradient,
        out,
        devices,
        batch,
        height,
        width,
        down,
        right,
        padding,
        stride,
        -(-total // shares),
        inputs,
        outputs,
        columns,
        taps,
        by_tap,
        tile_in,
        tile_out,
        64,
        _precision(x),
        num_warps=4,
        num_stages=3,
    )
    return out.sum(0) if shares > 1 else out[0]


def kept(key: Tensor, count: int, least: int) -> Tensor:
    """Return which of `count` numbers of each key are at least `least`, bool [keys, count]."""
    out = torch.empty(len(key), count, device=key.device, dtype=torch.bool)
    _kept_kernel[(triton.cdiv(count, 1024), len(key))](key, out, count, least, 1024)
    return out


def _precision(x: Tensor) -> str:
    """Return how float32 is multiplied: as torch's own products are at this time."""
    return "tf32" if x.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee"


def _tiles(dtype: torch.dtype, precision: str, inputs: int, outputs: int) -> tuple[int, int, int]:
    """Return places, warps and stages of a program: what was fastest on an H200."""
    if dtype == torch.bfloat16:
        return 128, 4, 3
    if inputs < _ONE:
        return 256, 8, 3
    if precision == "ieee":
        return 64, 4, 2
    return (256, 8, 2) if outputs > 32 else (128, 8, 2)


def _inner_tile(inputs: int, taps: int) -> int:
    """Return how many terms of a sum a program takes at once."""
    if inputs % _ONE == 0:
        return next(size for size in (64, 32, 16) if inputs % size == 0)
    return min(32, _power(taps * inputs))


def _power(number: int) -> int:
    """Return the least power of two that a tile may have and that is not below a number."""
    return max(_ONE, 1 << (number - 1).bit_length())
