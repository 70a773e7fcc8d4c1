"""Letters as envelopes and pieces: what comes in is a prefix, and what is hostile is refused."""

import dataclasses
import json

import pytest

from anyfleet.errors import BadMessage
from anyfleet.runtime.flower import flower_api
from anyfleet.runtime.flower.envelopes import (
    JOINED_BYTES,
    PIECE_BYTES,
    SHORT_BYTES,
    Incoming,
    Letter,
    Packed,
    cut_pieces,
    in_order,
    pack,
)
from anyfleet.runtime.flower.flower_api import Heading, Missing, Opened
from anyfleet.wire import frames

HEADING = Heading(run=1, sender=1, receiver=2, replies_to="", written=2e9, kept=9.0, note="")
LONG = bytes(range(256)) * (10 * PIECE_BYTES // 1024)


def opened(packed: Packed, **changes: object) -> Opened:
    """A letter as the other side pulls it."""
    about = packed.sealed.message.metadata
    found = Opened(
        packed.sealed.id,
        HEADING._replace(note=about.group_id, replies_to=about.reply_to_message_id),
        "",
        frozenset(child.object_id for child in packed.sealed.tree.children),
    )
    return found._replace(**changes)  # type: ignore[arg-type]


def test_pieces_end_where_frames_end_and_none_is_too_large() -> None:
    columns = [b"a" * JOINED_BYTES, b"b" * (PIECE_BYTES + 5), b"c" * JOINED_BYTES, b"d", b"e"]
    pieces = list(cut_pieces(frames.join_message("r", b"header", columns)))
    starts = [frames.join_message("r", b"header", columns[:count]) for count in (0, 1, 2, 3, 5)]
    assert [b"".join(pieces[:count]) for count in (1, 2, 4, 5, 6)] == starts
    assert len(pieces) == 6  # header, a, b in two, c, d and e together
    assert max(map(len, pieces)) == PIECE_BYTES


@pytest.mark.parametrize("length", [0, 1, 100])
def test_bytes_that_only_look_like_a_wire_message_are_cut_somewhere(length: int) -> None:
    data = b"AFo\2" + b"\xff" * length
    assert b"".join(cut_pieces(data)) == data


@pytest.mark.parametrize("data", [b"", b"x" * SHORT_BYTES, b"x" * (SHORT_BYTES + 1), LONG])
def test_a_letter_comes_out_as_it_went_in(data: bytes) -> None:
    letter = Letter("order", data, {"text": "ü", "number": 3, "share": 0.1, "bytes": b"\0\xff"})
    packed = pack(letter, HEADING)
    store = dict(packed.objects)
    incoming = Incoming(opened(packed), 1 << 30)
    assert incoming.fetch(store.__getitem__) is None
    assert incoming.whole
    assert incoming.letter == letter
    assert (len(packed.objects) == 1) == (len(data) <= SHORT_BYTES)


def test_a_short_header_stands_on_the_envelope() -> None:
    data = frames.join_message("r", b"header", [b"x" * JOINED_BYTES, b"y" * JOINED_BYTES])
    packed = pack(Letter("reply", data), HEADING)
    assert Incoming(opened(packed), 1 << 30).letter.data == frames.join_message("r", b"header", [])
    assert len(packed.objects) == 3  # the envelope, x and y


def test_a_letter_in_part_is_a_prefix_and_goes_on_later() -> None:
    packed = pack(Letter("order", LONG), HEADING)
    store: dict[str, bytes] = dict(packed.objects[:3])  # the envelope and two pieces
    incoming = Incoming(opened(packed), 1 << 30)
    missing = Missing(gone=False)
    assert incoming.fetch(lambda name: store.get(name, missing)) == missing
    assert not incoming.whole
    assert incoming.letter.data == LONG[: 2 * PIECE_BYTES]
    store = dict(packed.objects[3:])
    assert incoming.fetch(store.__getitem__) is None
    assert incoming.letter.data == LONG


def test_what_many_devices_get_is_one_object_but_every_message_has_its_id() -> None:
    letter = Letter("order", LONG, {"device": 1})
    here = pack(letter, HEADING)
    there = pack(dataclasses.replace(letter, about={"device": 2}), HEADING._replace(receiver=3))
    again = pack(letter, HEADING)
    assert here.objects[1:] == there.objects[1:]
    assert len({here.sealed.id, there.sealed.id, again.sealed.id}) == 3
    sent = in_order([here, there])
    assert list(sent)[:2] == [here.sealed.id, there.sealed.id]
    assert len(sent) == len(here.objects) + 1


def test_the_same_reply_has_the_same_ids_and_shares_no_piece_with_another() -> None:
    letter = Letter("reply", LONG)
    first = pack(letter, HEADING._replace(replies_to="one"))
    assert first == pack(letter, HEADING._replace(replies_to="one"))
    other = pack(letter, HEADING._replace(replies_to="two"))
    assert not set(dict(first.objects)) & set(dict(other.objects))


@pytest.mark.parametrize(
    "note",
    [
        "",
        "[]",
        "{}",
        "[" * 100_000,
        json.dumps({"kind": "x", "about": {}, "pieces": [], "data": "text"}),
        json.dumps({"kind": "x", "about": {"a": None}, "pieces": [], "data": {"base64": ""}}),
        json.dumps({"kind": "x", "about": {}, "pieces": ["ab"], "data": {"base64": ""}}),
        json.dumps({"kind": "x", "about": {}, "pieces": [], "data": {"base64": "?"}}),
        '"' + "x" * (1 << 21) + '"',
    ],
)
def test_an_envelope_that_is_none_is_refused(note: str) -> None:
    message = opened(pack(Letter("reply"), HEADING), heading=HEADING._replace(note=note))
    with pytest.raises(BadMessage):
        Incoming(message, 1 << 30)


def piece(**changes: object) -> bytes:
    values = {"number": 0, "of": "", "bytes": b"x"} | changes
    return flower_api.make_object(values)[1]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "content",
    [b"", b"junk", piece(number=1), piece(of="another"), piece(bytes="text"), piece(bytes=LONG)],
)
def test_a_piece_that_is_none_is_refused(content: bytes) -> None:
    incoming = Incoming(opened(pack(Letter("reply", LONG[:PIECE_BYTES]), HEADING)), PIECE_BYTES)
    with pytest.raises(BadMessage):
        incoming.fetch(lambda name: content)
