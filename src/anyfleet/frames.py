"""Pieces of a stream that say how long they are and whether they are whole.

    length, 4 bytes | checksum of length and body, 4 bytes | body

A stream that is cut or damaged anywhere still gives every piece before that place.
"""

import struct
import zlib
from collections.abc import Iterable

_HEAD = struct.Struct("<II")
FRAME_BYTES = _HEAD.size


def framed(bodies: Iterable[bytes]) -> bytes:
    """All pieces, one after the other."""
    return b"".join(_HEAD.pack(len(body), _checksum(body)) + body for body in bodies)


def complete(stream: bytes, most: int) -> tuple[bytes, ...]:
    """The leading pieces that came through whole, at most so many of them."""
    found: list[bytes] = []
    view, at = memoryview(stream), 0
    while len(found) < most and at + _HEAD.size <= len(view):
        length, checksum = _HEAD.unpack_from(view, at)
        body = bytes(view[at + _HEAD.size : at + _HEAD.size + length])
        if len(body) < length or _checksum(body) != checksum:
            break
        found.append(body)
        at += _HEAD.size + length
    return tuple(found)


def _checksum(body: bytes) -> int:
    # With the length: a frame whose length was changed must not pass as another one.
    return zlib.crc32(body, len(body))
