"""Ways to spoil a message. After most of them checksums are right again, to reach deeper layers."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from anyfleet.core.limits import FRAME_BYTES
from anyfleet.wire.frames import framed, read

LEAD = 4  # bytes before the first frame
_MANY = 1 << 20

# Numbers and texts that nobody sends, in places where something else is expected.
_EVIL: tuple[Any, ...] = (
    *(0, -1, 1, 255, 2**31, -(2**31), 2**32 - 1, 2**53, 2**63 - 1, -(2**63), 2**64 - 1),
    *(0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e308, -1e308, 5e-324, 1e-9, 0.999),
    *(
        "",
        "a:b",
        "os:system",
        "anyfleet.cli:app",
        "anyfleet.experiment:load",
        "\x00",
        "é" * 40,
        "x" * 999,
    ),
    *(b"", b"\x00", b"\xff" * 64, None, True, [], [[]], {}, {"use": "none"}, {"": []}),
    *(
        {"use": "anyfleet.experiment:load", "path": "x"},
        {"use": "anyfleet.parts.train:Sgd"},
        [1] * 999,
    ),
)
# Claims of msgpack that more follows than there is.
_CLAIMS = tuple(
    bytes([mark]) + size
    for mark, width in zip(
        (0xC4, 0xC5, 0xC6, 0xC7, 0xC9, 0xD9, 0xDA, 0xDB, 0xDC, 0xDD, 0xDE, 0xDF),
        (1, 2, 4, 1, 4, 1, 2, 4, 2, 4, 2, 4),
        strict=True,
    )
    for size in (b"\xff" * width, b"\x7f" + b"\xff" * (width - 1))
)
_WINDOWS = (
    *(np.array([n], dtype="<u4").tobytes() for n in (0, 1, 255, 2**16, 2**31, 2**32 - 1)),
    *(np.array([n], dtype="<f4").tobytes() for n in (np.nan, np.inf, -np.inf, 3e38, 1e-45, -1.0)),
    *(np.array([n], dtype=">f8").tobytes() for n in (np.nan, np.inf, 1e308, -1.0, 1e-300)),
)

Draw = np.random.Generator
Mangler = Callable[[bytes, Draw], bytes]


def mangled(data: bytes, others: Sequence[bytes], draw: Draw) -> bytes:
    """Return a message spoilt in one to three ways; `others` are messages to splice it with."""
    for _ in range(int(draw.choice([1, 1, 1, 2, 3]))):
        if draw.random() < _SPLICED:
            data = _splice(data, others[int(draw.integers(len(others)))], draw)
        else:
            data = _MANGLERS[int(draw.choice(len(_MANGLERS), p=_WEIGHTS))](data, draw)
    return data


def _damage(data: bytes, draw: Draw) -> bytes:
    """Return a message damaged anywhere: its checksums are wrong."""
    return _spoilt(data, draw)


def _truncate(data: bytes, draw: Draw) -> bytes:
    return data[: int(draw.integers(len(data) + 1))]


def _splice(data: bytes, other: bytes, draw: Draw) -> bytes:
    """Return the beginning of one message and the end of another, cut at a byte or at a frame."""
    if draw.random() < 0.3:
        return data[: int(draw.integers(len(data) + 1))] + other[int(draw.integers(len(other))) :]
    mine, theirs = _pieces(data), _pieces(other)
    if not mine or not theirs:
        return data + other
    cut = int(draw.integers(len(mine) + 1))
    return data[:LEAD] + framed([*mine[:cut], *theirs[int(draw.integers(len(theirs) + 1)) :]])


def _lie_about_a_frame(data: bytes, draw: Draw) -> bytes:
    """Return a message with a frame that claims another length; its checksum is wrong."""
    pieces = _pieces(data)
    ends = np.cumsum([LEAD, *(FRAME_BYTES + len(piece) for piece in pieces)])
    at = int(draw.choice(ends[:-1])) if pieces else 0
    return data[:at] + _WINDOWS[int(draw.integers(6))] + data[at + 4 :]


def _piece(data: bytes, draw: Draw) -> bytes:
    """Return a message with one frame spoilt, its checksum right again."""
    pieces = _pieces(data)
    if not pieces:
        return data
    # Rather a column than the header, where little is left to be spoilt.
    at = int(draw.integers(len(pieces))) if draw.random() < 0.3 else len(pieces) - 1
    spoil = _spoilt if draw.random() < 0.5 else _claiming
    return _with(data, pieces, at, spoil(pieces[at], draw))


def _shuffle(data: bytes, draw: Draw) -> bytes:
    """Return a message with columns left out, doubled or in another order."""
    pieces = _pieces(data)
    if len(pieces) < 2:
        return data
    places = draw.integers(1, len(pieces), size=int(draw.integers(len(pieces) + 2)))
    return data[:LEAD] + framed([pieces[0], *(pieces[int(place)] for place in places)])


def _entry(data: bytes, draw: Draw) -> bytes:
    """Return a message with one value changed, in the header or in a record of a column."""
    pieces = _pieces(data)
    if not pieces:
        return data
    at = 0 if draw.random() < 0.4 else int(draw.integers(len(pieces)))
    try:
        plain = msgspec.msgpack.decode(pieces[at])
        changed = msgspec.msgpack.encode(_changed(plain, draw))
    except (msgspec.MsgspecError, OverflowError, RecursionError, TypeError, ValueError):
        return _piece(data, draw)
    return _with(data, pieces, at, changed)


def _job(data: bytes, draw: Draw) -> bytes:
    """Return an order with one value of its job changed."""
    pieces = _pieces(data)
    try:
        header = msgspec.msgpack.decode(pieces[0])
        job = _changed(msgspec.msgpack.decode(header["job"]), draw)
        header["job"] = msgspec.msgpack.encode(job)
    except (LookupError, msgspec.MsgspecError, OverflowError, TypeError, ValueError):
        return _piece(data, draw)
    return _with(data, pieces, 0, msgspec.msgpack.encode(header))


_MANGLERS: tuple[Mangler, ...] = (
    *(_damage, _truncate, _lie_about_a_frame),
    *(_piece, _shuffle, _entry, _job),
)
_WEIGHTS, _SPLICED = (0.1, 0.08, 0.05, 0.38, 0.05, 0.28, 0.06), 0.1


def _pieces(data: bytes) -> tuple[bytes, ...]:
    return read(data, _MANY, LEAD).bodies


def _with(data: bytes, pieces: Sequence[bytes], at: int, body: bytes) -> bytes:
    return data[:LEAD] + framed([*pieces[:at], body, *pieces[at + 1 :]])


def _spoilt(body: bytes, draw: Draw) -> bytes:
    """Return bytes with bits turned, bytes set, added or left out, or numbers written over."""
    raw = bytearray(body)
    for _ in range(int(draw.choice([1, 1, 2, 5]))):
        at = int(draw.integers(len(raw) + 1))
        way = int(draw.integers(6))
        if way == 0 and at < len(raw):
            raw[at] ^= 1 << int(draw.integers(8))
        elif way == 1 and at < len(raw):
            raw[at] = int(draw.integers(256))
        elif way == 2:
            raw[at:at] = draw.bytes(int(draw.integers(1, 9)))
        elif way == 3:
            del raw[at : at + int(draw.integers(1, 9))]
        elif way == 4:
            window = _WINDOWS[int(draw.integers(len(_WINDOWS)))]
            raw[at : at + len(window)] = window
        else:
            raw = raw[:at] if draw.random() < 0.5 else raw + raw[at : at + 64]
    return bytes(raw)


def _claiming(body: bytes, draw: Draw) -> bytes:
    """Return bytes in which some place claims a length that is not there."""
    claim = _CLAIMS[int(draw.integers(len(_CLAIMS)))]
    at = int(draw.integers(len(body) + 1))
    return body[:at] + claim + body[at + int(draw.integers(len(claim) + 1)) :]


def _changed(value: Any, draw: Draw) -> Any:
    """Return the same with one value changed, somewhere inside."""
    if isinstance(value, dict) and value and draw.random() < 0.85:
        key = list(value)[int(draw.integers(len(value)))]
        if draw.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        if draw.random() < 0.1:
            return {**value, "extra": value[key]}
        return {**value, key: _changed(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.85:
        at = int(draw.integers(len(value)))
        if draw.random() < 0.2:
            return [*value[:at], *value[at + 1 :]]
        return [*value[:at], _changed(value[at], draw), *value[at + 1 :]]
    if isinstance(value, bytes) and draw.random() < 0.7:
        return _spoilt(value, draw)
    if isinstance(value, int | float) and draw.random() < 0.4:
        return value + (1 if draw.random() < 0.5 else -1)
    return _EVIL[int(draw.integers(len(_EVIL)))]
