"""Pieces of a stream."""

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyfleet.core.limits import FRAME_BYTES
from anyfleet.wire.frames import framed, read

BODIES = (b"header", b"", b"first column", b"\x00" * 40)
STREAM = framed(BODIES)
ENDS = list(accumulate((FRAME_BYTES + len(body) for body in BODIES), initial=0))


def test_pieces_come_back_and_say_where_they_end() -> None:
    assert read(STREAM, 4) == (BODIES, len(STREAM), "")
    assert read(b"lead" + STREAM, 2, 4) == (BODIES[:2], 4 + ENDS[2], "")
    assert read(STREAM, 0) == ((), 0, "")


@pytest.mark.parametrize("place", range(len(STREAM)))
def test_a_stream_cut_anywhere_gives_every_piece_before(place: int) -> None:
    found = read(STREAM[:place], 4)
    whole = sum(end <= place for end in ENDS[1:])
    assert found == (BODIES[:whole], ENDS[whole], "cut")


@given(st.integers(0, len(STREAM) - 1), st.integers(1, 255))
def test_a_stream_damaged_anywhere_gives_every_piece_before(place: int, change: int) -> None:
    raw = bytearray(STREAM)
    raw[place] ^= change
    found = read(bytes(raw), 4)
    whole = sum(end <= place for end in ENDS[1:])
    assert found.bodies == BODIES[:whole]
    assert found.stopped in ("cut", "checksum")


@pytest.mark.parametrize("length", [0, 5, 7, 1 << 20, (1 << 32) - 1])
def test_a_length_that_is_a_lie_is_noticed(length: int) -> None:
    found = read(length.to_bytes(4, "little") + STREAM[4:], 4)
    assert found.bodies == ()


def test_zeros_are_no_pieces() -> None:
    """As in what a disk or a network leaves where nothing was written."""
    assert read(bytes(64), 4) == ((), 0, "checksum")
    assert read(STREAM + bytes(64), 5) == (BODIES, len(STREAM), "checksum")
