"""Messages as bytes: taken apart, and put together again with right checksums."""

from typing import Any

import msgspec

from anyfleet.wire.frames import framed, read

LEAD = 4  # bytes before the first frame


def taken_apart(data: bytes) -> tuple[dict[str, Any], tuple[bytes, ...]]:
    """Return the header as plain data, and the complete columns."""
    pieces = read(data, 1 << 20, LEAD).bodies
    return msgspec.msgpack.decode(pieces[0]), pieces[1:]


def put_together(data: bytes, header: Any, columns: tuple[bytes, ...]) -> bytes:
    """Return a message that begins as `data` does, with another header and other columns."""
    return data[:LEAD] + framed([msgspec.msgpack.encode(header), *columns])


def with_header(data: bytes, **changes: Any) -> bytes:
    """Return the message with some entries of its header changed."""
    header, columns = taken_apart(data)
    return put_together(data, {**header, **changes}, columns)


def charged(data: bytes) -> int:
    """Return the bytes that are charged: complete columns, index sets and masks."""
    header, columns = taken_apart(data)
    size = sum(map(len, columns))
    if "masks" not in header:
        return size + len(header["slice"]) + sum(map(len, header["menu"]))
    if header["trees"] and not columns:
        return 0  # without a model, its masks are not sent
    return size + sum(len(packed) for _, packed in header["masks"].values())
