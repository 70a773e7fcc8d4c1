"""How a message lies in bytes.

    "AF", "o" or "u", version | frame: header | frame: column 0 | frame: column 1 | ...

Without its header nothing can be made of a message. Of the columns, the leading ones that came
through whole are worth having.
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple

from torch import Tensor

from anyfleet import rng
from anyfleet.core.limits import FRAME_BYTES, MessageLimits
from anyfleet.errors import BadMessage
from anyfleet.wire.frames import framed, read

VERSION = 2
Sort = Literal["o", "u"]  # an order, or an update

_MAGIC = b"AF"
_LEAD = len(_MAGIC) + 2


class Opened(NamedTuple):
    """A message whose header is there: its bytes, and where the columns begin."""

    header: bytes
    data: bytes
    start: int


def sealed(sort: Sort, header: bytes, columns: Iterable[bytes]) -> bytes:
    """A message as it is sent."""
    return _MAGIC + sort.encode() + bytes([VERSION]) + framed([header, *columns])


def opened(data: bytes, sort: Sort, most: MessageLimits) -> Opened:
    """A message up to its header, if that is whole."""
    if len(data) > most.message:
        raise BadMessage(f"a message of {len(data)} bytes; at most {most.message}", "too large")
    if data[: len(_MAGIC)] != _MAGIC or data[len(_MAGIC) : _LEAD - 1] != sort.encode():
        raise BadMessage(f"a message that does not begin as one of sort {sort!r}", "magic")
    version = data[_LEAD - 1 : _LEAD]
    if version != bytes([VERSION]):
        told = f"{version[0]}" if version else "unknown"
        raise BadMessage(f"message version {told}; this is version {VERSION}", "version")
    # Copied when its checksum is asked for, and not more of it than a header may have.
    pieces = read(memoryview(data)[: _LEAD + FRAME_BYTES + most.header], 1, _LEAD)
    if not pieces.bodies:
        raise BadMessage("a message without a whole header", pieces.stopped)
    return Opened(pieces.bodies[0], data, pieces.end)


def columns_of(message: Opened, count: int) -> tuple[bytes, ...]:
    """The leading columns that came through, of so many that were sent."""
    pieces = read(message.data, count, message.start)
    if len(pieces.bodies) == count and pieces.end != len(message.data):
        raise BadMessage(f"bytes after the last of {count} columns", "trailing")
    return pieces.bodies


def shortened(data: bytes, columns: int, key: Tensor) -> bytes:
    """What a link leaves of a message when it fails within the column after so many.

    At which byte, the key draws: one link fails between two columns, another in mid-number.
    """
    pieces = read(data, 1 + columns, _LEAD)
    following = read(data, 1, pieces.end)
    if pieces.stopped or following.stopped:
        raise ValueError(f"a message without a column after {columns} cannot be cut there")
    length = following.end - pieces.end
    place = int(rng.uniform(rng.fold(key, "cut"), 1) * length)
    return data[: pieces.end + place]
