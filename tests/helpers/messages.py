"""Messages taken apart, and put together again with checksums that are right."""

from typing import Any

import msgspec

from anyfleet.wire.frames import framed, read

LEAD = 4  # bytes before the first frame


def taken_apart(data: bytes) -> tuple[dict[str, Any], tuple[bytes, ...]]:
    """The header as plain data, and the columns that are whole."""
    pieces = read(data, 1 << 20, LEAD).bodies
    return msgspec.msgpack.decode(pieces[0]), pieces[1:]


def put_together(data: bytes, header: Any, columns: tuple[bytes, ...]) -> bytes:
    """A message that begins as `data` does, with another header and other columns."""
    return data[:LEAD] + framed([msgspec.msgpack.encode(header), *columns])


def with_header(data: bytes, **changes: Any) -> bytes:
    """The same message with other entries of its header."""
    header, columns = taken_apart(data)
    return put_together(data, {**header, **changes}, columns)


def charged(data: bytes) -> int:
    """Bytes that count: of complete columns, index sets and masks."""
    header, columns = taken_apart(data)
    size = sum(map(len, columns))
    if "masks" not in header:
        return size + len(header["slice"]) + sum(map(len, header["menu"]))
    if header["trees"] and not columns:
        return 0  # of a model that did not come nobody is told the masks
    return size + sum(len(packed) for _, packed in header["masks"].values())
