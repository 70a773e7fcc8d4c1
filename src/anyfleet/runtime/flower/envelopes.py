"""Letters as messages of Flower: what stands on the envelope, and the pieces that follow it.

The envelope is the outside of a Flower message. It says what kind of letter it is, what is told
beside it, and which pieces it has. Short data stands on it too, so that a short letter has none.
Longer data is cut into pieces where frames of a wire message end, each an object of Flower; a
short first one, such as the header of a wire message, stands on the envelope as well.
Its id is a hash of its content, so a piece that many devices get reaches the SuperLink once. The
envelope is sent first and the pieces in order: what has come in is always a prefix.

The pieces of a reply name the order they reply to. So no piece can be there already because
somebody else sent the same bytes, and a sender that comes back can ask what is missing.
"""

import base64
import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from anyfleet.core.limits import FRAME_BYTES
from anyfleet.errors import BadMessage
from anyfleet.runtime.flower import flower_api
from anyfleet.runtime.flower.flower_api import Heading, Missing, Opened, Sealed

Value = str | int | float | bytes

PIECE_BYTES = 1 << 20  # one request each; a slow link must carry one within minutes
JOINED_BYTES = 1 << 14  # frames that are no longer together share a piece: requests cost time
SHORT_BYTES = 1 << 11  # data, or its first piece, that stands on the envelope
NOTE_BYTES = 1 << 20  # an envelope that says more is refused
LONGEST = 500  # letters of a text that a node chose, where people read it
_LEAD_BYTES = 4  # of a wire message; `anyfleet.wire.frames`


@dataclass(frozen=True)
class Letter:
    """What one side sends to the other."""

    kind: str  # down: check-in, offer, order, done; up: check-in, choice, reply, refused
    data: bytes = b""  # a wire message, or any short bytes
    about: Mapping[str, Value] = field(default_factory=dict)  # small values beside it


def printable(told: str) -> str:
    """Return a text that a node chose, as far as it can be printed, and not too long."""
    return "".join(each if each.isprintable() else " " for each in told[:LONGEST])


class Packed(NamedTuple):
    """A letter that is ready to send: its envelope, and the objects in the order to send them."""

    sealed: Sealed
    objects: tuple[tuple[str, bytes], ...]  # by id; the first is the envelope's own


def cut_pieces(data: bytes) -> Iterator[bytes]:
    """Yield data in pieces, cut where frames of a wire message end, and none too large."""
    begin = end = 0
    for following in _frame_ends(data):
        if following - begin > JOINED_BYTES:
            yield from _at_most(data[begin:end])
            begin = end
        end = following
    yield from _at_most(data[begin:end])


def _at_most(data: bytes) -> Iterator[bytes]:
    return (data[at : at + PIECE_BYTES] for at in range(0, len(data), PIECE_BYTES))


def _frame_ends(data: bytes) -> Iterator[int]:
    """Yield where frames end, as far as these bytes have any, and at last where the data ends."""
    at = _LEAD_BYTES
    while data[:2] == b"AF" and at + FRAME_BYTES <= len(data):
        at += FRAME_BYTES + int.from_bytes(data[at : at + 4], "little")
        if at >= len(data):
            break
        yield at
    yield len(data)


def pack(letter: Letter, heading: Heading) -> Packed:
    """Return a letter under this heading, whose note is replaced."""
    of, cut = heading.replies_to, list(cut_pieces(letter.data))
    lead = cut.pop(0) if cut and len(cut[0]) <= SHORT_BYTES else b""
    pieces = [
        flower_api.make_object({"number": number, "of": of, "bytes": piece})
        for number, piece in enumerate(cut)
    ]
    names = [name for name, _ in pieces]
    note = {
        "kind": letter.kind,
        "about": {name: _to_json(value) for name, value in letter.about.items()},
        "pieces": names,
        "data": _to_json(lead),
        # Whoever knows a message's id may reply to it: no device can guess the id of another's.
        "key": "" if of else secrets.token_hex(16),
    }
    sealed = flower_api.seal(heading._replace(note=json.dumps(note)), names)
    return Packed(sealed, ((sealed.id, sealed.root), *pieces))


def _to_json(value: Value) -> str | int | float | dict[str, str]:
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode("ascii")}
    return value


def _from_json(value: object) -> Value:
    if isinstance(value, dict):
        return base64.b64decode(value["base64"], validate=True)
    if isinstance(value, str | int | float):
        return value
    raise BadMessage(f"an envelope with a value of type {type(value).__name__}", "envelope")


class OpenEnvelope(NamedTuple):
    """What an envelope says."""

    kind: str
    about: Mapping[str, Value]
    pieces: tuple[str, ...]
    data: bytes


def read_envelope(message: Opened) -> OpenEnvelope:
    """Return what an envelope says; raise BadMessage for one that cannot be read."""
    note = message.heading.note
    if len(note) > NOTE_BYTES:
        raise BadMessage(f"an envelope of {len(note)} bytes; at most {NOTE_BYTES}", "too large")
    try:
        said: dict[str, Any] = json.loads(note)
        about = {str(name): _from_json(value) for name, value in said["about"].items()}
        pieces, data = tuple(map(str, said["pieces"])), _from_json(said["data"])
        kind = str(said["kind"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadMessage("an envelope that cannot be read", "envelope") from error
    if not isinstance(data, bytes) or not message.objects.issuperset(pieces):
        raise BadMessage("an envelope that does not fit its pieces", "envelope")
    return OpenEnvelope(kind, about, pieces, data)


class Incoming:
    """A letter as it comes in, piece by piece."""

    def __init__(self, message: Opened, most: int) -> None:
        self.message = message
        self._envelope = read_envelope(message)
        self._found = [self._envelope.data]
        self._room = most - len(self._envelope.data)
        self._pieces = 0

    @property
    def whole(self) -> bool:
        """Whether all pieces are there."""
        return self._pieces == len(self._envelope.pieces)

    @property
    def pieces(self) -> int:
        """How many pieces are there."""
        return self._pieces

    @property
    def letter(self) -> Letter:
        """The letter, with the data that is there."""
        return Letter(self._envelope.kind, b"".join(self._found), self._envelope.about)

    def fetch(self, pull: Callable[[str], bytes | Missing]) -> Missing | None:
        """Take pieces until one is missing, and return why; None: all are there.

        Raises BadMessage for a piece that is none of this letter, or for too many bytes.
        """
        while not self.whole:
            content = pull(self._envelope.pieces[self._pieces])
            if isinstance(content, Missing):
                return content
            self._add(content)
        return None

    def _add(self, content: bytes) -> None:
        try:
            values = flower_api.read_object(content)
        except ValueError as error:
            raise BadMessage("a piece that cannot be read", "piece") from error
        data = values.get("bytes")
        mine = (values.get("number"), values.get("of"))
        if not isinstance(data, bytes) or mine != (self._pieces, self.message.heading.replies_to):
            raise BadMessage("a piece of another message", "piece")
        self._room -= len(data)
        if self._room < 0:
            raise BadMessage("a letter with more bytes than allowed", "too large")
        self._found.append(data)
        self._pieces += 1


def in_order(packed: Sequence[Packed]) -> dict[str, bytes]:
    """Return the objects of letters in the order to send them: envelopes, then first pieces."""
    longest = max((len(each.objects) for each in packed), default=0)
    return {
        name: content
        for place in range(longest)
        for each in packed
        for name, content in each.objects[place : place + 1]
    }
