"""How a message lies in bytes: a lead, then frames that say how long and whether they are whole.

    "AF", type, version | frame: header | frame: column 0 | frame: column 1 | ...

    frame: length, 4 bytes | checksum of length and body, 4 bytes | body

A message that is cut or damaged anywhere still gives every frame before that place. Without its
header nothing can be made of it. Of its columns, the leading ones that came through whole count.
"""

import struct
import zlib
from collections.abc import Iterable
from typing import Literal, NamedTuple

from torch import Tensor

from anyfleet import rng
from anyfleet.core.limits import FRAME_BYTES, MessageLimits
from anyfleet.errors import BadMessage

VERSION = 2
MessageType = Literal["o", "r", "i", "c"]  # an order, a reply, a check-in or a choice

_MAGIC = b"AF"
_LEAD = len(_MAGIC) + 2
_HEAD = struct.Struct("<II")
assert _HEAD.size == FRAME_BYTES


class Frames(NamedTuple):
    """The frames that came through whole, where they end, and why there are no more of them."""

    bodies: tuple[bytes, ...]
    end: int  # in bytes of the stream
    stopped: str = ""  # "cut", "checksum", or "" when all that were asked for are there


def framed(bodies: Iterable[bytes]) -> bytes:
    """Return all bodies as frames, one after the other."""
    return b"".join(_HEAD.pack(len(body), _checksum(body)) + body for body in bodies)


def read(stream: bytes | memoryview, most: int, start: int = 0) -> Frames:
    """Return the leading frames that came through whole, at most so many of them.

    The length that a frame states is believed only as far as there are bytes.
    """
    found: list[bytes] = []
    view, at = memoryview(stream), start
    while len(found) < most:
        if at + FRAME_BYTES > len(view):
            return Frames(tuple(found), at, "cut")
        length, checksum = _HEAD.unpack_from(view, at)
        if length > len(view) - at - FRAME_BYTES:
            return Frames(tuple(found), at, "cut")
        body = bytes(view[at + FRAME_BYTES : at + FRAME_BYTES + length])
        if _checksum(body) != checksum:
            return Frames(tuple(found), at, "checksum")
        found.append(body)
        at += FRAME_BYTES + length
    return Frames(tuple(found), at)


def _checksum(body: bytes) -> int:
    # It covers the length, and nothing has the checksum 0: zeros are no frames.
    return zlib.crc32(body, len(body) ^ 0xFFFFFFFF)


class OpenMessage(NamedTuple):
    """A message whose header is whole: its bytes, and where the columns begin."""

    header: bytes
    data: bytes
    start: int


def join_message(kind: MessageType, header: bytes, columns: Iterable[bytes]) -> bytes:
    """Return a message as it is sent."""
    return _MAGIC + kind.encode() + bytes([VERSION]) + framed([header, *columns])


def open_message(data: bytes, kind: MessageType, most: MessageLimits) -> OpenMessage:
    """Return a message up to its header; raise BadMessage unless that is whole."""
    if len(data) > most.message:
        raise BadMessage(f"a message of {len(data)} bytes; at most {most.message}", "too large")
    if data[: len(_MAGIC)] != _MAGIC or data[len(_MAGIC) : _LEAD - 1] != kind.encode():
        raise BadMessage(f"a message that does not begin as one of type {kind!r}", "magic")
    version = data[_LEAD - 1 : _LEAD]
    if version != bytes([VERSION]):
        found = f"{version[0]}" if version else "unknown"
        raise BadMessage(f"message version {found}; this is version {VERSION}", "version")
    # Reading a frame copies it, so no more than a header may have is looked at.
    frames = read(memoryview(data)[: _LEAD + FRAME_BYTES + most.header], 1, _LEAD)
    if not frames.bodies:
        raise BadMessage("a message without a whole header", frames.stopped)
    return OpenMessage(frames.bodies[0], data, frames.end)


def read_columns(message: OpenMessage, count: int) -> tuple[bytes, ...]:
    """Return the leading columns that came through whole, of `count` that were sent."""
    frames = read(message.data, count, message.start)
    if len(frames.bodies) == count and frames.end != len(message.data):
        raise BadMessage(f"bytes after the last of {count} columns", "trailing")
    return frames.bodies


def cut_message(data: bytes, columns: int, key: Tensor) -> bytes:
    """Return what a link leaves of a message when it fails within the column after `columns`.

    The key draws the byte: one link fails between two columns, another within a number.
    """
    frames = read(data, 1 + columns, _LEAD)
    following = read(data, 1, frames.end)
    if frames.stopped or following.stopped:
        raise ValueError(f"a message without a column after {columns} cannot be cut there")
    length = following.end - frames.end
    place = int(rng.uniform(rng.fold(key, "cut"), 1) * length)
    return data[: frames.end + place]
