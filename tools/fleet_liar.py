"""A device that lies: `python -m tools.fleet_liar device join DIR ...`, with a valid key.

It does its work as every device does. While the file DIR/lie names a lie, its next reply to an
order is that lie; the file is then renamed to DIR/lied. DIR/victim is the folder of another device,
whose order it replies to.
"""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from anyfleet.cli.app import app
from anyfleet.core.limits import FRAME_BYTES
from anyfleet.errors import LinkError
from anyfleet.runtime.flower import connection, flower_api
from anyfleet.runtime.flower.envelopes import Letter
from anyfleet.wire.frames import framed, read

LEAD = 4  # bytes before the first frame
BLOAT = 64 << 20  # bytes of a reply that is too large
HOME = Path(sys.argv[3] if len(sys.argv) > 3 else ".")


def numbers(data: bytes, value: float) -> bytes:
    """Return a reply whose last column begins with other numbers; its checksums are right."""
    frames = list(read(data, 1 << 20, LEAD).bodies)
    body = bytearray(frames[-1])
    body[:40] = np.full(10, value, dtype="<f4").tobytes()
    return data[:LEAD] + framed([*frames[:-1], bytes(body)])


def shape(data: bytes) -> bytes:
    """Return a reply whose last column has four numbers too many; its checksums are right."""
    frames = list(read(data, 1 << 20, LEAD).bodies)
    return data[:LEAD] + framed([*frames[:-1], frames[-1] + bytes(16)])


class LyingConnection(connection.Connection):
    """A link that tells the lie that a file names."""

    last = b""  # what was sent to the order before

    def reply(self, handle: bytes, letter: Letter) -> None:
        """Send a reply, or a lie."""
        lie, data = HOME / "lie", letter.data
        word = lie.read_text() if lie.is_file() and letter.kind == "reply" else ""
        told, done = letter, True
        if word == "shape":
            told = replace(letter, data=shape(data))
        elif word == "NaN":
            told = replace(letter, data=numbers(data, float("nan")))
        elif word == "1e30":
            told = replace(letter, data=numbers(data, 1e30))
        elif word == "replay" and self.last:
            told = replace(letter, data=self.last)
        elif word == "oversized":
            told = replace(letter, data=data + bytes(BLOAT))
        elif word in ("another's order", "another's name"):
            limit = time.monotonic() + 2.0
            while not (done := self._steal(word, letter)) and time.monotonic() < limit:
                time.sleep(0.02)
        if letter.kind == "reply":
            self.last = data
        if word == "replay" and told is letter:
            done = False
        if word and done:
            lie.replace(HOME / "lied")
        super().reply(handle, told)

    def _steal(self, word: str, letter: Letter) -> bool:
        """Reply to the order that another device has now; return False if it has none."""
        victim = Path((HOME / "victim").read_text())
        try:
            pulled = (victim / "link" / "incoming").read_bytes()
        except OSError:
            return False
        about = flower_api.open_pulled(pulled)
        sender = self.node_id if word == "another's order" else about.heading.receiver
        heading = about.heading
        order = (heading.run, sender, about.id, heading.written, heading.kept)
        own, self.node_id = self.node_id, sender
        try:
            super().reply(json.dumps(order).encode(), letter)
        except LinkError as error:
            sys.stderr.write(f"a lie was refused: {error}\n")
        finally:
            self.node_id = own
        return True


if __name__ == "__main__":
    assert FRAME_BYTES == 8
    connection.Connection = LyingConnection  # type: ignore[misc]
    app()
