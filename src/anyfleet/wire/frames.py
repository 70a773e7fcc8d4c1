"""Pieces of a stream that say how long they are and whether they are whole.

    length, 4 bytes | checksum of length and body, 4 bytes | body

A stream that is cut or damaged anywhere still gives every piece before that place.
"""

import struct
import zlib
from collections.abc import Iterable
from typing import NamedTuple

from anyfleet.core.limits import FRAME_BYTES

_HEAD = struct.Struct("<II")
assert _HEAD.size == FRAME_BYTES


class Pieces(NamedTuple):
    """What came through whole, where that ends, and why there is no more of it."""

    bodies: tuple[bytes, ...]
    end: int  # in bytes of the stream
    stopped: str = ""  # "cut", "checksum", or nothing when all that were asked for are there


def framed(bodies: Iterable[bytes]) -> bytes:
    """All pieces, one after the other."""
    return b"".join(_HEAD.pack(len(body), _checksum(body)) + body for body in bodies)


def read(stream: bytes | memoryview, most: int, start: int = 0) -> Pieces:
    """The leading pieces that came through whole, at most so many of them.

    What a piece says of its length is believed only as far as there are bytes.
    """
    found: list[bytes] = []
    view, at = memoryview(stream), start
    while len(found) < most:
        if at + FRAME_BYTES > len(view):
            return Pieces(tuple(found), at, "cut")
        length, checksum = _HEAD.unpack_from(view, at)
        if length > len(view) - at - FRAME_BYTES:
            return Pieces(tuple(found), at, "cut")
        body = bytes(view[at + FRAME_BYTES : at + FRAME_BYTES + length])
        if _checksum(body) != checksum:
            return Pieces(tuple(found), at, "checksum")
        found.append(body)
        at += FRAME_BYTES + length
    return Pieces(tuple(found), at)


def _checksum(body: bytes) -> int:
    # With the length, and such that nothing has the checksum 0: zeros are no pieces.
    return zlib.crc32(body, len(body) ^ 0xFFFFFFFF)
