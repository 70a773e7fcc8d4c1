"""A device's end of the link: it receives letters and replies to them.

What a device must know to go on after it was killed lies in its folder: the id of its node, and
the envelope of the letter it received last. A letter is given again to a new process until the
old one has shown, with a reply or by receiving the next, that it has taken it.
"""

import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self, TypeVar

from cryptography.hazmat.primitives.asymmetric import ec

from anyfleet.errors import BadMessage, LinkDown, LinkError, NotEnrolled, RunGone
from anyfleet.runtime.flower import flower_api
from anyfleet.runtime.flower.envelopes import Incoming, Letter, Packed, pack
from anyfleet.runtime.flower.flower_api import FleetApi, Heading, Missing

T = TypeVar("T")

_BEAT_SECONDS = flower_api.HEARTBEAT_SECONDS / 2
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 1.0  # seconds between two tries
_READ_SECONDS = 3.0  # so long a device that leaves lets the server read its last reply
_MOST_BYTES = 1 << 32  # of one letter: the server's letters are trusted, but not without end


@dataclass(frozen=True)
class Received:
    """A letter from the server; its data is a prefix if the link failed in the middle."""

    letter: Letter
    whole: bool
    handle: bytes  # all that `reply` needs, also in another process; opaque
    seconds: float = field(default=0.0, compare=False)  # that its pieces took to come


class _Order(NamedTuple):
    """What a reply must know of the message it replies to: the inside of a handle."""

    run: int
    node: int
    message: str
    written: float
    kept: float


class Connection:
    """A device's link to the server; leaving the context tells the server that the device left."""

    node_id: int

    def __init__(
        self,
        address: str,
        *,
        ca: bytes,
        key: ec.EllipticCurvePrivateKey,
        home: Path,
        patience: float = 30.0,
        note: Callable[[str], None] = lambda text: None,
        bit_rate: float = math.inf,
    ) -> None:
        self._bit_rate = bit_rate
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._node_file, self._incoming_file = home / "node", home / "incoming"
        self._patience, self._note = patience, note
        self._api = FleetApi(address, ca=ca, key=key)
        self._stop = threading.Event()
        try:
            self.node_id = self._enter()
        except BaseException:
            self._api.close()
            raise
        with contextlib.suppress(OSError):  # a full disk: only a restart would take longer
            _write(self._node_file, str(self.node_id).encode())
        self._waiting = self._left_over()  # the envelope of a letter that is not settled yet
        self._given = False  # whether `receive` has returned that letter
        self._last_reply: tuple[int, str] | None = None  # run and id of the message
        self._heart = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._heart.start()

    def _enter(self) -> int:
        """Return the node's id, which is online from now on.

        A node that was killed a moment ago counts as online and may not be activated. A heartbeat
        with the remembered id brings it back, and unlike deactivating it first it leaves no moment
        in which the server finds the node offline and gives its orders up.
        """
        with contextlib.suppress(OSError, ValueError, NotEnrolled):
            node = int(self._node_file.read_text())
            if self._api.beat(node):
                return node
        return self._api.activate()

    def _left_over(self) -> bytes:
        """Return the envelope that an earlier process received and did not finish, or b""."""
        with contextlib.suppress(OSError, ValueError):
            pulled = self._incoming_file.read_bytes()
            if flower_api.open_pulled(pulled).heading.receiver == self.node_id:
                return pulled
        return b""

    def _beat(self) -> None:
        pause = _BEAT_SECONDS
        while not self._stop.wait(pause):
            try:
                self._api.beat(self.node_id)
                pause = _BEAT_SECONDS
            except LinkError:  # whoever receives or replies meets it too, and says so
                pause = 1.0

    def receive(self) -> Received | None:
        """Return the next letter, or None: one poll. Raises LinkDown and NotEnrolled.

        A letter of which a part has come in is returned as that prefix once nothing more has come
        for `patience` seconds.
        """
        self._settle()
        if not self._waiting:
            self._waiting = self._api.pull_message(self.node_id)
            if not self._waiting:
                return None
            with contextlib.suppress(OSError):  # a full disk: an order is refused, and says so
                _write(self._incoming_file, self._waiting)
        try:
            return self._download()
        except (BadMessage, RunGone):  # nobody waits for a reply to it
            self._drop()
            return None

    def _download(self) -> Received | None:
        message = flower_api.open_pulled(self._waiting)
        incoming, run = Incoming(message, _MOST_BYTES), message.heading.run
        began = time.monotonic()
        limit, had, pause = time.monotonic() + self._patience, 0, _FIRST_PAUSE
        down: LinkDown | None = None
        while True:
            try:
                missing = incoming.fetch(lambda name: self._pull(run, name))
                down = None
            except LinkDown as error:
                if down is None:
                    self._note(f"the link broke while a letter came: {error}")
                missing, down = Missing(gone=False), error
            if missing is None:
                break
            if missing.gone:
                self._drop()
                return None
            if incoming.pieces > had:
                limit, had, pause = time.monotonic() + self._patience, incoming.pieces, _FIRST_PAUSE
            if time.monotonic() > limit:
                if incoming.pieces:
                    break
                if down:
                    raise down
                return None
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        heading = message.heading
        order = _Order(run, self.node_id, message.id, heading.written, heading.kept)
        self._given = True
        took = time.monotonic() - began
        return Received(incoming.letter, incoming.whole, json.dumps(order).encode(), took)

    def reply(self, handle: bytes, letter: Letter) -> None:
        """Send the reply to a letter; called again with the same values it sends what is missing.

        Returns when all is sent, or when the server wants no more of it. Raises LinkDown after
        `patience` seconds without the server, NotEnrolled, and RunGone.
        """
        order = _Order(*json.loads(handle))
        if order.node != self.node_id:
            raise RunGone(
                "this order came to another node: the device has been enrolled anew since"
            )
        heading = Heading(
            run=order.run,
            sender=order.node,
            receiver=flower_api.SERVER_NODE,
            replies_to=order.message,
            # The times of the order, so that the reply has the same id whenever it is written.
            written=order.written,
            kept=order.kept,
            note="",
        )
        packed = pack(letter, heading)
        self._patiently(lambda: self._upload(order, packed))
        self._last_reply = (order.run, packed.sealed.id)
        if self._waiting and flower_api.open_pulled(self._waiting).id == order.message:
            self._given = True  # maybe to an earlier process
            self._settle()

    def _upload(self, order: _Order, packed: Packed) -> None:
        for _ in range(3):
            wanted, session = self._api.push_message(order.node, packed.sealed)
            if not wanted:
                wanted, session = self._missing(order, packed), ""
            if all(
                self._push(order, session, name, content)
                for name, content in packed.objects
                if name in wanted
            ):
                return
            # One was refused: it came before in a request without response, or the session of
            # the upload has expired. What is wanted now says which.

    def _pull(self, run: int, name: str) -> bytes | Missing:
        """Pull a piece, no faster than the link may be used."""
        began = time.monotonic()
        found = self._api.pull_object(self.node_id, run, name)
        if not isinstance(found, Missing):
            self._slow_down(len(found), began)
        return found

    def _push(self, order: _Order, session: str, name: str, content: bytes) -> bool:
        """Push a piece, no faster than the link may be used; return whether it was taken."""
        began = time.monotonic()
        taken = self._api.push_object(
            order.node, order.run, session=session, name=name, content=content
        )
        self._slow_down(len(content), began)
        return taken

    def _slow_down(self, count: int, began: float) -> None:
        """Wait until so many bytes may have crossed the link since then."""
        time.sleep(max(0.0, began + 8 * count / self._bit_rate - time.monotonic()))

    def _missing(self, order: _Order, packed: Packed) -> frozenset[str]:
        """Return the objects that the server waits for although it has taken the envelope.

        From the last one back: only the one that is there costs its bytes.
        """
        wanted: set[str] = set()
        for name, _ in reversed(packed.objects):
            found = self._api.pull_object(order.node, order.run, name)
            if not isinstance(found, Missing):
                break
            if found.gone:  # the server has all it wants
                return frozenset()
            wanted.add(name)
        return frozenset(wanted)

    def _patiently(self, work: Callable[[], T]) -> T:
        limit, pause = time.monotonic() + self._patience, _FIRST_PAUSE
        while True:
            try:
                return work()
            except LinkDown as error:
                if pause == _FIRST_PAUSE:
                    self._note(f"the link broke while a reply was sent: {error}")
                if time.monotonic() > limit:
                    raise
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _settle(self) -> None:
        """Release the letter that was given last: its receiver has it."""
        if self._given:
            message = flower_api.open_pulled(self._waiting)
            with contextlib.suppress(RunGone):
                self._api.confirm(self.node_id, message.heading.run, message.id)
            self._drop()

    def _drop(self) -> None:
        self._waiting, self._given = b"", False
        self._incoming_file.unlink(missing_ok=True)

    def close(self) -> None:
        """Say that the device leaves: its orders that have no reply are given up."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._heart.join()  # a heartbeat after the leave would undo it
        with contextlib.suppress(LinkError):
            self._wait_until_read()
            self._api.deactivate(self.node_id)
        self._api.close()

    def _wait_until_read(self) -> None:
        """Wait a moment for the server to read the last reply: a node's leaving would undo it."""
        limit = time.monotonic() + _READ_SECONDS
        while self._last_reply and time.monotonic() < limit:
            found = self._api.pull_object(self.node_id, *self._last_reply)
            if isinstance(found, Missing):
                return
            time.sleep(0.1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _write(file: Path, data: bytes) -> None:
    """Replace a file that only its owner may read, so that a crash leaves the old or the new."""
    draft = file.with_name(file.name + ".new")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    draft.replace(file)
