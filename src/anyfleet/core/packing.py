"""What travels: slices as bytes, sub-models as dense tensors, and how many bits that makes."""

import math
import struct
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from anyfleet.core.messages import Params
from anyfleet.core.slots import Measure, Norm
from anyfleet.elastic import WHOLE, Blueprint, Slice, cut
from anyfleet.errors import BadMessage

FLOAT_BITS = 32

_RUN, _BITMAP, _LIST = 0, 1, 2
_HEAD, _AXIS, _PAIR = struct.Struct("<HH"), struct.Struct("<HB"), struct.Struct("<II")


def dense(tree: Params, slice_: Slice, blueprint: Blueprint) -> dict[str, Tensor]:
    """`cut`, laid out as the receiver of a message has it.

    A view into a large tensor holds the same numbers in other strides, and a sum over them may then
    round otherwise: a simulated device would differ from a real one.
    """
    return {name: part.contiguous() for name, part in cut(tree, slice_, blueprint).items()}


def own_names(slice_: Slice, norm: Norm, blueprint: Blueprint) -> dict[str, str]:
    """Tensors of which a width has its own, and how they are called outside its sub-model."""
    variant = norm.variant(blueprint, slice_)
    if not variant:
        return {}
    names = (n for s in blueprint.norms for n in (s.weight, s.bias, s.mean, s.variance))
    return {name: f"{name}@{variant}" for name in names if name is not None}


@lru_cache(maxsize=4096)
def traffic(
    slice_: Slice,
    norm: Norm,
    blueprint: Blueprint,
    report: tuple[str, ...] = (),
    measures: tuple[Measure, ...] = (),
) -> tuple[float, float]:
    """Bits down and bits up of an order with this slice, uncompressed, with what is reported."""
    home = norm.stays(blueprint) | set(blueprint.frozen)
    local, statistics = blueprint.local(slice_), norm.travels(blueprint)
    sent = set(slice_.sent(blueprint)) - home
    layers = (layer for layer in blueprint.layers if sent & set(layer.params))
    measured = {n for layer in layers for n in layer.buffers} & statistics
    down = local.numel([*(n for n in local.params if n not in home), *statistics])
    up = local.numel([*sent, *measured])
    trained = slice_.sent(blueprint)
    lengths = {n: each.length(n, local, trained) for each in measures for n in each.vectors}
    up += sum(lengths.get(name, 1) for name in report)
    return float(FLOAT_BITS * down + index_bits(slice_, blueprint)), float(FLOAT_BITS * up)


@lru_cache(maxsize=4096)
def model_bits(slice_: Slice, norm: Norm, blueprint: Blueprint) -> float:
    """Bits of an uncompressed model alone, as it comes down."""
    home = norm.stays(blueprint) | set(blueprint.frozen)
    local = blueprint.local(slice_)
    return float(FLOAT_BITS * local.numel([name for name in local.params if name not in home]))


@lru_cache(maxsize=4096)
def update_bits(slice_: Slice, norm: Norm, blueprint: Blueprint) -> float:
    """Bits of an uncompressed update alone, without statistics and reports."""
    sent = sent_names(slice_, norm, blueprint)
    return float(FLOAT_BITS * blueprint.local(slice_).numel(sent))


@lru_cache(maxsize=4096)
def sent_names(slice_: Slice, norm: Norm, blueprint: Blueprint) -> tuple[str, ...]:
    """The parameters that a device with this slice sends."""
    home = norm.stays(blueprint) | set(blueprint.frozen)
    return tuple(name for name in slice_.sent(blueprint) if name not in home)


def index_bits(slice_: Slice, blueprint: Blueprint) -> int:
    """What it costs to say which slice."""
    return 8 * len(pack_slice(slice_, blueprint))


@lru_cache(maxsize=4096)
def pack_slice(slice_: Slice, blueprint: Blueprint) -> bytes:
    """Per cut axis a run, a bitmap or a list of indices, whichever says it; nothing for all."""
    if slice_ == WHOLE:
        return b""
    position = {name: i for i, name in enumerate(blueprint.axes)}
    parts = [_HEAD.pack(slice_.first_trained_layer, len(slice_.keep))]
    for axis, kept in slice_.keep:
        form, body = _pack_indices(kept, blueprint.axes[axis].size)
        parts += [_AXIS.pack(position[axis], form), body]
    return b"".join(parts)


def _pack_indices(kept: tuple[int, ...], size: int) -> tuple[int, bytes]:
    if kept == tuple(range(kept[0], kept[0] + len(kept))):
        return _RUN, _PAIR.pack(kept[0], len(kept))
    if all(a < b for a, b in pairwise(kept)):
        flags = np.zeros(size, dtype=np.uint8)
        flags[list(kept)] = 1
        return _BITMAP, np.packbits(flags).tobytes()
    # An order of its own, as of a window that wraps around.
    return _LIST, struct.pack(f"<I{len(kept)}I", len(kept), *kept)


def unpack_slice(data: bytes, blueprint: Blueprint) -> Slice:
    """The inverse of `pack_slice`."""
    if not data:
        return WHOLE
    names = list(blueprint.axes)
    try:
        first, count = _HEAD.unpack_from(data)
        at, keep = _HEAD.size, {}
        for _ in range(count):
            position, form = _AXIS.unpack_from(data, at)
            name = names[position]
            size = blueprint.axes[name].size
            keep[name], at = _unpack_indices(data, at + _AXIS.size, form, size)
        if at != len(data) or len(keep) != count:
            raise ValueError("bytes that belong to no axis, or an axis that comes twice")
        return Slice.of(keep, blueprint, first)
    except (struct.error, IndexError, ValueError) as error:
        raise BadMessage(f"a slice that cannot be read: {error}", "slice") from error


def _unpack_indices(data: bytes, at: int, form: int, size: int) -> tuple[tuple[int, ...], int]:
    if form == _RUN:
        start, count = _PAIR.unpack_from(data, at)
        _within(start + count, size)
        return tuple(range(start, start + count)), at + _PAIR.size
    if form == _BITMAP:
        width = -(-size // 8)
        if len(data) < at + width:
            raise ValueError(f"{len(data) - at} bytes for {size} flags")
        flags = np.unpackbits(np.frombuffer(data[at : at + width], dtype=np.uint8))
        return tuple(np.flatnonzero(flags[:size]).tolist()), at + width
    if form != _LIST:
        raise ValueError(f"unknown form {form} of an index set")
    (count,) = struct.unpack_from("<I", data, at)
    _within(count, size)
    indices = struct.unpack_from(f"<{count}I", data, at + 4)
    return indices, at + 4 + 4 * count


def _within(count: int, size: int) -> None:
    # Before anything is allocated: the number comes from outside.
    if count > size:
        raise ValueError(f"{count} indices on an axis of {size}")


def pack_mask(mask: Tensor) -> tuple[list[int], bytes]:
    """One bit an entry, once for all along dimensions where the mask does not change."""
    for dim in range(mask.dim()):
        lead = mask.narrow(dim, 0, 1)
        if bool((mask == lead).all()):
            mask = lead
    return list(mask.shape), np.packbits(mask.cpu().numpy() != 0).tobytes()


def mask_bits(masks: Params) -> float:
    """What it costs to say which entries count."""
    return float(sum(8 * len(pack_mask(mask)[1]) for mask in masks.values()))


def unpack_mask(name: str, packed: tuple[list[int], bytes], local: Blueprint) -> Tensor:
    """The inverse of `pack_mask`, in the shape of the tensor it masks."""
    shape, data = packed
    if name not in local.params:
        raise BadMessage(f"a mask for {name}, which this model does not have", "mask")
    whole = local.shape(name)
    if len(shape) != len(whole) or any(a not in (1, b) for a, b in zip(shape, whole, strict=True)):
        raise BadMessage(f"a mask of shape {shape} for {name}, which has {list(whole)}", "mask")
    if len(data) != -(-math.prod(shape) // 8):
        raise BadMessage(f"a mask of {len(data)} bytes for {name}", "mask")
    flags = np.unpackbits(np.frombuffer(data, dtype=np.uint8), count=math.prod(shape))
    return torch.from_numpy(flags.reshape(shape).astype(np.float32)).expand(whole)
