"""Triton kernels for stacks on a CUDA device: convolutions, pooling, dropout, sums.

Only imported where Triton is: `has_kernels` says whether it can be. Tensors are contiguous,
with channels last: samples [devices, batch, height, width, channels], weights [devices, outputs,
taps, inputs], where a tap is one place of the filter.
"""

from contextlib import AbstractContextManager

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.cuda import device_of

_ONE = 16  # the least size of a product of tiles
_FEW = 32  # weights of an output, which one program differentiates
_PART = 2**14  # entries of a row that one program adds up
_SIDE = 1024  # numbers that a program pools, or spreads


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
    pitch: tl.constexpr,
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
    x += device * batch * height * width * pitch
    weight += (device * outputs + channel[None, :]) * (taps * inputs)
    summed = tl.zeros((tile, tile_out), dtype=tl.float32)
    if inputs % tile_in == 0:
        for tap in range(taps):
            own_row = row + tap // columns
            own_column = column + tap % columns
            inside = (place < total) & (own_row >= 0) & (own_row < height)
            inside = inside & (own_column >= 0) & (own_column < width)
            base = ((sample * height + own_row) * width + own_column) * pitch
            for first in range(0, inputs, tile_in):
                entry = first + tl.arange(0, tile_in)
                left = tl.load(x + base[:, None] + entry[None, :], mask=inside[:, None], other=0.0)
                right_ = tl.load(
                    weight + (tap * inputs + entry)[:, None],
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
            left = tl.load(x + base * pitch + (entry % inputs)[None, :], mask=inside, other=0.0)
            right_ = tl.load(
                weight + entry[:, None],
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
    tile_in: tl.constexpr,
    tile_out: tl.constexpr,
    tile: tl.constexpr,
    precision: tl.constexpr,
) -> None:
    device = (tl.program_id(1) % devices).to(tl.int64)
    share = tl.program_id(1) // devices
    channel = tl.program_id(2) * tile_out + tl.arange(0, tile_out)
    entry = tl.program_id(0) * tile_in + tl.arange(0, tile_in)
    total = batch * down * right
    tap_row = (entry // inputs) // columns - padding
    tap_column = (entry // inputs) % columns - padding
    x += device * batch * height * width * inputs + (entry % inputs)[None, :]
    gradient += device * total * outputs + channel[:, None]
    summed = tl.zeros((tile_out, tile_in), dtype=tl.float32)
    for first in range(0, part, tile):
        near = first + tl.arange(0, tile)
        place = share * part + near
        counts = (near < part) & (place < total)
        own_row = ((place % (down * right)) // right * stride)[:, None] + tap_row[None, :]
        own_column = (place % right * stride)[:, None] + tap_column[None, :]
        inside = counts[:, None] & (entry < taps * inputs)[None, :]
        inside = inside & (own_row >= 0) & (own_row < height)
        inside = inside & (own_column >= 0) & (own_column < width)
        base = ((place // (down * right))[:, None] * height + own_row) * width + own_column
        right_ = tl.load(x + base * inputs, mask=inside, other=0.0)
        left = tl.load(
            gradient + (place * outputs)[None, :],
            mask=counts[None, :] & (channel < outputs)[:, None],
            other=0.0,
        )
        summed = tl.dot(left, right_, summed, input_precision=precision)
    out += (share * devices + device) * taps * inputs * outputs
    tl.store(
        out + channel[:, None] * (taps * inputs) + entry[None, :],
        summed,
        mask=(channel < outputs)[:, None] & (entry < taps * inputs)[None, :],
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


@triton.jit
def _squares_kernel(
    rows: tl.tensor,
    out: tl.tensor,
    entries: tl.tensor,
    pitch: tl.tensor,
    parts: tl.tensor,
    part: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    summed = tl.zeros((tile,), dtype=tl.float64)
    for first in range(0, part, tile):
        entry = tl.program_id(1) * part + first + tl.arange(0, tile)
        own = tl.load(rows + row * pitch + entry, mask=entry < entries, other=0.0).to(tl.float64)
        summed += own * own
    tl.store(out + row * parts + tl.program_id(1), tl.sum(summed))


@triton.jit
def _weighted_sum_kernel(
    rows: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    count: tl.tensor,
    entries: tl.tensor,
    pitch: tl.tensor,
    further: tl.constexpr,
    tile: tl.constexpr,
    ahead: tl.constexpr,
) -> None:
    entry = tl.program_id(0) * tile + tl.arange(0, tile)
    inside = entry < entries
    if further:
        summed = tl.load(out + entry, mask=inside, other=0.0)
    else:
        summed = tl.zeros((tile,), dtype=tl.float64)
    rows += entry
    for first in range(0, count, ahead):
        # Row by row, so that it does not matter in how many calls they are added.
        for near in tl.static_range(ahead):
            row = tl.full((), first + near, dtype=tl.int64)
            there = row < count
            own = tl.load(rows + row * pitch, mask=inside & there, other=0.0).to(tl.float64)
            weight = tl.load(weights + row, mask=there, other=0.0).to(tl.float64)
            summed = tl.where(there, summed + own * weight, summed)
    tl.store(out + entry, summed, mask=inside)


@triton.jit
def _pool_kernel(
    x: tl.tensor,
    out: tl.tensor,
    places: tl.tensor,
    numbers: tl.tensor,
    rows: tl.constexpr,
    columns: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
    down: tl.constexpr,
    right: tl.constexpr,
    channels: tl.constexpr,
    tile: tl.constexpr,
    count: tl.constexpr,
) -> None:
    at = tl.program_id(0).to(count) * tile + tl.arange(0, tile)
    inside = at < numbers
    column = at // channels % right * columns
    row = at // (channels * right) % down * rows
    sample = at // (channels * right * down)
    x += ((sample * height + row) * width + column) * channels + at % channels
    best = tl.load(x, mask=inside, other=0.0)
    place = tl.zeros((tile,), dtype=tl.uint8)
    for tap in tl.static_range(1, rows * columns):
        own = tl.load(
            x + (tap // columns * width + tap % columns) * channels, mask=inside, other=0.0
        )
        # As in torch: the first of equal ones, the last of those that are no number.
        better = (own > best) | (own != own)  # noqa: PLR0124
        best = tl.where(better, own, best)
        place = tl.where(better, tap, place).to(tl.uint8)
    tl.store(out + at, best, mask=inside)
    tl.store(places + at, place, mask=inside)


@triton.jit
def _spread_kernel(
    gradient: tl.tensor,
    places: tl.tensor,
    out: tl.tensor,
    numbers: tl.tensor,
    rows: tl.constexpr,
    columns: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
    down: tl.constexpr,
    right: tl.constexpr,
    channels: tl.constexpr,
    tile: tl.constexpr,
    count: tl.constexpr,
) -> None:
    at = tl.program_id(0).to(count) * tile + tl.arange(0, tile)
    column = at // channels % width
    row = at // (channels * width) % height
    sample = at // (channels * width * height)
    own_row, own_column = row // rows, column // columns
    covered = (at < numbers) & (own_row < down) & (own_column < right)
    window = ((sample * down + own_row) * right + own_column) * channels + at % channels
    tap = row % rows * columns + column % columns
    chosen = tl.load(places + window, mask=covered, other=255) == tap
    own = tl.load(gradient + window, mask=covered, other=0.0)
    tl.store(out + at, tl.where(chosen, own, 0.0), mask=at < numbers)


def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, columns: int, padding: int, stride: int
) -> Tensor:
    """Return the convolutions of a stack, [devices, batch, rows, columns, outputs].

    `columns` is the width of the filter. Samples may have more channels than weights: padding.
    """
    devices, batch, height, width, pitch = x.shape
    outputs, taps, inputs = weight.shape[1:]
    down = (height + 2 * padding - taps // columns) // stride + 1
    right = (width + 2 * padding - columns) // stride + 1
    out = torch.empty(devices, batch, down, right, outputs, device=x.device, dtype=x.dtype)
    precision = _precision(x)
    tile, stages = (64, 2) if precision == "ieee" and x.dtype == torch.float32 else (128, 3)
    tile_out, tile_in = min(128, _power(outputs)), _inner_tile(x.dtype, inputs)
    grid = (triton.cdiv(batch * down * right, tile), devices, triton.cdiv(outputs, tile_out))
    with _place_of(x):
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
            pitch,
            outputs,
            columns,
            taps,
            tile,
            tile_out,
            tile_in,
            bias is not None,
            precision,
            num_warps=4,
            num_stages=stages,
        )
    return out


def weight_gradient(
    x: Tensor, gradient: Tensor, taps: int, columns: int, padding: int, stride: int
) -> Tensor:
    """Return the gradients of the weights of a stack, float32 [devices, outputs, taps, inputs]."""
    devices, batch, height, width, inputs = x.shape
    down, right, outputs = gradient.shape[2:]
    tile_out, tile_in, tile, warps = _weight_tiles(x.dtype, outputs, taps * inputs)
    total = batch * down * right
    blocks, wide = triton.cdiv(taps * inputs, tile_in), triton.cdiv(outputs, tile_out)
    # Enough programs for all multiprocessors, by a rule: a sum has the same order in every run.
    shares = max(1, min(8, 1024 // (blocks * wide * devices), total // 512))
    out = torch.empty(shares, devices, outputs, taps, inputs, device=x.device, dtype=torch.float32)
    with _place_of(x):
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
            tile_in,
            tile_out,
            tile,
            _precision(x),
            num_warps=warps,
            num_stages=3,
        )
    return out.sum(0) if shares > 1 else out[0]


def pool(x: Tensor, rows: int, columns: int, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Return the maxima of windows side by side, and at which place of its window each was.

    Samples are [..., height, width, channels]; what does not fill a window counts for nothing.
    """
    channels, down, right = x.shape[-1], height // rows, width // columns
    out = torch.empty(*x.shape[:-3], down, right, channels, device=x.device, dtype=x.dtype)
    places = torch.empty_like(out, dtype=torch.uint8)
    sizes = rows, columns, height, width, down, right, channels
    grid = (triton.cdiv(out.numel(), _SIDE),)
    with _place_of(x):
        _pool_kernel[grid](x, out, places, out.numel(), *sizes, _SIDE, _integer(x))
    return out, places


def spread(
    gradient: Tensor, places: Tensor, rows: int, columns: int, height: int, width: int
) -> Tensor:
    """Return the gradient of the samples that were pooled: that of each maximum, at its place."""
    down, right, channels = gradient.shape[-3:]
    shape = *gradient.shape[:-3], height, width, channels
    out = torch.empty(shape, device=gradient.device, dtype=gradient.dtype)
    sizes = rows, columns, height, width, down, right, channels
    grid = (triton.cdiv(out.numel(), _SIDE),)
    with _place_of(gradient):
        _spread_kernel[grid](gradient, places, out, out.numel(), *sizes, _SIDE, _integer(out))
    return out


def _integer(largest: Tensor) -> tl.dtype:
    """Return the type of integers that count so many numbers: short ones are divided faster."""
    return tl.int32 if largest.numel() < 2**31 - _SIDE else tl.int64


def kept(key: Tensor, count: int, least: int) -> Tensor:
    """Return which of `count` numbers of each key are at least `least`, bool [keys, count]."""
    out = torch.empty(len(key), count, device=key.device, dtype=torch.bool)
    with _place_of(key):
        _kept_kernel[(triton.cdiv(count, 1024), len(key))](key, out, count, least, 1024)
    return out


def row_lengths(rows: Tensor) -> Tensor:
    """Return the Euclidean length of every row of [rows, entries], in double precision."""
    count, entries = rows.shape
    parts = triton.cdiv(entries, _PART)
    squares = torch.empty(count, parts, device=rows.device, dtype=torch.float64)
    with _place_of(rows):
        _squares_kernel[(count, parts)](rows, squares, entries, rows.stride(0), parts, _PART, 1024)
    return squares.sum(1).sqrt()


def add_weighted(rows: Tensor, weights: Tensor, out: Tensor, *, further: bool) -> None:
    """Write the sum of rows times their weights to `out`, which has double precision.

    With `further` it is added to what is there, as if all rows had been summed in one call.
    """
    count, entries = rows.shape
    given = rows, weights, out, count, entries, rows.stride(0), further
    with _place_of(rows):
        _weighted_sum_kernel[(triton.cdiv(entries, 512),)](*given, 512, 8)


def _place_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Return a context that launches where a tensor lies: the current device may be another."""
    place: AbstractContextManager[object] = device_of(tensor)  # type: ignore[no-untyped-call]
    return place


def _precision(x: Tensor) -> str:
    """Return how float32 is multiplied: as torch's own products are at this time."""
    return "tf32" if x.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee"


def _inner_tile(dtype: torch.dtype, inputs: int) -> int:
    """Return how many terms of a sum a program takes at once: what was fastest on an H200."""
    sizes = (64, 32, 16) if dtype == torch.bfloat16 else (32, 16)
    return next((size for size in sizes if inputs % size == 0), 32)


def _weight_tiles(dtype: torch.dtype, outputs: int, terms: int) -> tuple[int, int, int, int]:
    """Return outputs, weights of each, places and warps of a program: the fastest on an H200.

    With 32-bit numbers larger tiles would be turned around on their way to the tensor cores.
    """
    if dtype == torch.bfloat16:
        tile_out = min(128, _power(outputs))
        return tile_out, min(32 if tile_out == 32 else 64, _power(terms)), 64, 4
    tile_out = min(64, _power(outputs))
    if terms <= _FEW:
        return tile_out, _FEW, 64 if tile_out > _ONE else 32, 4
    tile_in, warps = {16: (128, 4), 32: (32, 2), 64: (64, 2)}[tile_out]
    return tile_out, min(tile_in, _power(terms)), 32, warps


def _power(number: int) -> int:
    """Return the least power of two that a tile may have and that is not below a number."""
    return max(_ONE, 1 << (number - 1).bit_length())
