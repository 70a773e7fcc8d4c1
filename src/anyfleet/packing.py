"""Slices as bytes: index sets travel with every order, and count."""

import struct
from functools import lru_cache
from itertools import pairwise

import numpy as np

from anyfleet.elastic import Blueprint, Slice
from anyfleet.errors import BadMessage

_RUN, _BITMAP, _LIST = 0, 1, 2
_HEAD, _AXIS, _PAIR = struct.Struct("<HH"), struct.Struct("<HB"), struct.Struct("<II")


@lru_cache(maxsize=4096)
def pack_slice(slice_: Slice, blueprint: Blueprint) -> bytes:
    """Per cut axis a run, a bitmap or a list of indices, whichever says it."""
    position = {name: i for i, name in enumerate(blueprint.axes)}
    parts = [_HEAD.pack(slice_.first, len(slice_.keep))]
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
    names = list(blueprint.axes)
    try:
        first, count = _HEAD.unpack_from(data)
        at, keep = _HEAD.size, {}
        for _ in range(count):
            position, form = _AXIS.unpack_from(data, at)
            name = names[position]
            size = blueprint.axes[name].size
            keep[name], at = _unpack_indices(data, at + _AXIS.size, form, size)
        return Slice.of(keep, blueprint, first)
    except (struct.error, IndexError, ValueError) as error:
        raise BadMessage(f"a slice that cannot be read: {error}") from error


def _unpack_indices(data: bytes, at: int, form: int, size: int) -> tuple[tuple[int, ...], int]:
    if form == _RUN:
        start, count = _PAIR.unpack_from(data, at)
        _within(start + count, size)
        return tuple(range(start, start + count)), at + _PAIR.size
    if form == _BITMAP:
        width = -(-size // 8)
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
