"""Index sets and masks as bytes: which channels make up a slice, and which entries count."""

import math
import struct
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from anyfleet.elastic import WHOLE, Blueprint, Slice
from anyfleet.errors import BadMessage

_RUN, _BITMAP, _LIST = 0, 1, 2
_HEAD, _AXIS, _PAIR = struct.Struct("<HH"), struct.Struct("<HB"), struct.Struct("<II")


@lru_cache(maxsize=4096)
def pack_slice(slice_: Slice, blueprint: Blueprint) -> bytes:
    """Return a slice as bytes: per cut axis a run, a bitmap or a list; b"" for the whole model."""
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
    # The indices do not ascend, as in a window that wraps around: only a list keeps their order.
    return _LIST, struct.pack(f"<I{len(kept)}I", len(kept), *kept)


def unpack_slice(data: bytes, blueprint: Blueprint) -> Slice:
    """Return the slice that `pack_slice` packed; raise BadMessage for bytes it cannot have made."""
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
    """Return the indices of one axis that begin at byte `at`, and the byte after them."""
    if form == _RUN:
        start, count = _PAIR.unpack_from(data, at)
        _check_count(start + count, size)
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
    _check_count(count, size)
    indices = struct.unpack_from(f"<{count}I", data, at + 4)
    return indices, at + 4 + 4 * count


def _check_count(count: int, size: int) -> None:
    # The count comes from outside, so it is checked before anything is allocated for it.
    if count > size:
        raise ValueError(f"{count} indices on an axis of {size}")


def pack_mask(mask: Tensor) -> tuple[list[int], bytes]:
    """Return the shape of a mask and one bit an entry; a constant dimension is packed once."""
    for dim in range(mask.dim()):
        lead = mask.narrow(dim, 0, 1)
        if bool((mask == lead).all()):
            mask = lead
    return list(mask.shape), np.packbits(mask.cpu().numpy() != 0).tobytes()


def unpack_mask(name: str, packed: tuple[list[int], bytes], local: Blueprint) -> Tensor:
    """Return the mask that `pack_mask` packed, in the shape of the tensor `name`.

    Raise BadMessage when the shape does not fit the tensor or the bytes do not fit the shape.
    """
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
