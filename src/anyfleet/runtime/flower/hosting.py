"""The server's end of the link: a run on the SuperLink that this process serves."""

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import NamedTuple, Self, TypeVar

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_public_key, load_ssh_public_key

from anyfleet.errors import BadMessage, LinkBusy, LinkDown, LinkError
from anyfleet.runtime.flower import flower_api
from anyfleet.runtime.flower.envelopes import Incoming, Letter, in_order, pack, printable
from anyfleet.runtime.flower.flower_api import ControlApi, Heading, Opened, RuntimeApi

T = TypeVar("T")

_PATIENCE = 60.0  # seconds: a SuperLink that was killed may be started again
_BEAT_SECONDS = 10.0  # without one for a minute, the SuperLink ends the run
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0  # seconds between two tries
_MOST_BYTES = 1 << 30  # of one reply
_TRIES = 5


class Node(NamedTuple):
    """A device that is enrolled at the SuperLink."""

    id: int
    name: str
    online: bool
    session: float = 0.0  # another one after every start of the device


@dataclass(frozen=True)
class Arrival:
    """A reply as it has come in so far."""

    message: str  # id of the message that it replies to
    node: int  # who sent it, as its key says and not as the reply says
    letter: Letter  # `data` is the prefix of pieces that is there
    whole: bool
    error: str  # why there is no reply, or no more of it; "". Up to the colon it is one of a few


@dataclass
class _Reply:
    """A reply that comes in, with its own id, or the reason why nothing more will come."""

    node: int
    id: str
    incoming: Incoming | None = None
    error: str = ""

    def arrival(self, message: str) -> Arrival:
        """Return what has come in so far."""
        letter = self.incoming.letter if self.incoming else Letter("")
        whole = self.incoming is not None and self.incoming.whole and not self.error
        return Arrival(message, self.node, letter, whole, self.error)


class HostedRun:
    """A run of which this process is the server; one thread may use it.

    `sent` is called whenever messages have been sent: whoever holds devices back lets them ask.
    All calls wait up to a minute for a SuperLink that is away, then raise LinkDown. They raise
    RunGone once the SuperLink has ended the run, as it does with one whose server is away for a
    minute.
    """

    run_id: int

    def __init__(
        self,
        address: str,
        *,
        ca: bytes,
        secret: bytes,
        replaces: int | None = None,
        most: int = _MOST_BYTES,
        sent: Callable[[], None] = lambda: None,
    ) -> None:
        self._most, self._sent = most, sent
        self.breaks = 0  # calls in vain after which messages or replies may be lost
        self._stop = threading.Event()
        self._open: dict[str, int] = {}  # messages without a reply yet: to which node
        self._unwanted: dict[str, int] = {}  # the same, but nobody waits for the reply
        self._coming: dict[str, _Reply] = {}  # by the message they reply to
        self._read: list[str] = []  # replies that were returned, and are still to be removed
        self._control = ControlApi(address, ca=ca)
        if replaces is not None:  # first, for devices may wait for what its server sent in part
            self.stop_run(replaces)
        self.run_id = self._patiently(self._control.start_run)
        self._api = self._claim(address, ca, secret)
        self._heart = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._heart.start()

    def _patiently(self, call: Callable[[], T], *, takes: bool = False) -> T:
        """Return what a call returns, tried again for a minute; count the tries in vain.

        A SuperLink that is only busy has lost nothing, unless the call `takes` what can be taken
        once.
        """

        def counted() -> T:
            try:
                return call()
            except LinkDown as error:
                self.breaks += takes or not isinstance(error, LinkBusy)
                raise

        return _patiently(counted)

    def _claim(self, address: str, ca: bytes, secret: bytes) -> RuntimeApi:
        """Take this run, and close older ones that wait for servers which are gone."""
        while True:
            api = self._patiently(lambda: flower_api.claim_run(address, ca=ca, secret=secret))
            if api is None:
                raise LinkError(
                    f"the SuperLink at {address} gave this run to another process; "
                    "start it with --isolation process, and one server at a time"
                )
            if self._patiently(api.begin) == self.run_id:
                return api
            with contextlib.suppress(LinkError):
                api.finish(flower_api.STOPPED)
            api.close()

    def _beat(self) -> None:
        pause = 0.0
        while not self._stop.wait(pause):
            pause = _BEAT_SECONDS
            try:
                self._api.beat()
            except LinkDown:
                pause = 1.0
            except LinkError:  # the run has ended: every other call says so
                return

    def nodes(self) -> list[Node]:
        """Return all enrolled nodes."""
        found = self._patiently(self._control.nodes)
        return [Node(each.id, each.name, each.online, each.session) for each in found]

    def send(self, letters: Sequence[tuple[int, Letter]], ttl: float | None = None) -> list[str]:
        """Send letters to nodes and return the ids of the messages, in the same order.

        A message that the SuperLink does not accept gets its error as its reply. Messages and
        their replies are given up `ttl` seconds from now (default: 12 hours).
        """
        now = time.time()
        packed = [
            pack(
                letter,
                Heading(
                    run=self.run_id,
                    sender=flower_api.SERVER_NODE,
                    receiver=node,
                    replies_to="",
                    written=now,
                    kept=flower_api.KEPT_SECONDS if ttl is None else ttl,
                    note="",
                ),
            )
            for node, letter in letters
        ]
        if not packed:
            return []
        objects, envelopes = in_order(packed), [each.sealed for each in packed]
        accepted = self._patiently(lambda: self._upload(envelopes, objects))
        for sealed, (node, _), taken in zip(envelopes, letters, accepted, strict=True):
            if taken:
                self._open[sealed.id] = node
            else:
                self._coming[sealed.id] = _Reply(node, "", error="the node is not enrolled")
        self._sent()
        return [sealed.id for sealed in envelopes]

    def _upload(
        self, envelopes: Sequence[flower_api.Sealed], objects: dict[str, bytes]
    ) -> list[bool]:
        for _ in range(_TRIES):
            accepted, unsent = self._api.push_messages(envelopes)
            if all(
                self._api.push_object(
                    self.run_id, session=unsent.session, name=name, content=content
                )
                for name, content in objects.items()
                if name in unsent.objects
            ):
                return accepted
        raise LinkError("the SuperLink refuses the pieces of a message; see its log")

    def receive(self, wanted: Collection[str]) -> list[Arrival]:
        """Return the replies to these messages that are whole or have failed, each once."""
        self._pull(set(wanted))
        done = []
        for message in wanted:
            reply = self._coming.get(message)
            if reply is not None and self._fetch(reply):
                done.append(reply.arrival(message))
                self._read.append(self._coming.pop(message).id)
        if not done:  # there is time
            self._remove_read()
        return done

    def _remove_read(self) -> None:
        """Remove replies that were returned from the SuperLink."""
        while self._read:
            if reply := self._read.pop():
                self._confirm(reply)

    def so_far(self, message: str) -> Arrival | None:
        """Return the part of a reply that has come in; None: nothing has, or all was returned."""
        self._pull({message})
        reply = self._coming.get(message)
        if reply is None:
            return None
        self._fetch(reply)
        return reply.arrival(message)

    def begun(self, messages: Collection[str]) -> set[str]:
        """Return to which of these messages a reply has begun to come in."""
        self._pull(set(messages))
        return {message for message in messages if message in self._coming}

    def forget(self, message: str) -> None:
        """Remove a message and its reply: no more of it is wanted."""
        if message in self._coming:
            self._finish(message)
        elif message in self._open:
            self._unwanted[message] = self._open.pop(message)
            self._confirm(message)  # a device that has not received it never will

    def _pull(self, wanted: set[str]) -> None:
        """Take the envelopes of replies; each can be taken once."""
        fresh = (wanted & self._open.keys()) | self._unwanted.keys()
        if not fresh:
            return
        for found in self._patiently(lambda: self._api.pull_messages(fresh), takes=True):
            message = found.heading.replies_to
            if message in self._unwanted:
                del self._unwanted[message]
                self._confirm(found.id)
            elif message in self._open:
                self._coming[message] = self._begin(found, self._open.pop(message))

    def _begin(self, found: Opened, node: int) -> _Reply:
        reply = _Reply(node, found.id)
        if found.error:  # Flower wrote it, or the node did
            reply.error = f"an error in place of a reply: {printable(found.error)}"
        elif found.heading.sender != node:
            reply.error = "a reply of another node"
        if not reply.error:
            try:
                reply.incoming = Incoming(found, self._most)
            except BadMessage as error:
                reply.error = _refused(error)
        return reply

    def _fetch(self, reply: _Reply) -> bool:
        """Take the pieces that are there; return whether nothing more will come."""
        incoming = reply.incoming
        if reply.error or incoming is None:
            return True
        try:
            missing = self._patiently(
                lambda: incoming.fetch(lambda name: self._api.pull_object(self.run_id, name))
            )
        except BadMessage as error:
            reply.error = _refused(error)
            return True
        if missing is not None and missing.gone:
            reply.error = "the upload of the reply has expired"
        return missing is None or missing.gone

    def _finish(self, message: str) -> None:
        reply = self._coming.pop(message)
        if reply.id:
            self._confirm(reply.id)

    def _confirm(self, message: str) -> None:
        self._patiently(lambda: self._api.confirm(self.run_id, message))

    def stop_run(self, run_id: int) -> None:
        """Cancel a run, usually one of a server that is gone, and remove its messages."""
        self._patiently(lambda: self._control.stop_run(run_id))

    def close(self, failed: bool = False) -> None:
        """Close the run; its messages are removed, and replies to them are refused."""
        if self._stop.is_set():
            return
        self._stop.set()
        with contextlib.suppress(LinkError):
            self._api.finish(flower_api.FAILED if failed else flower_api.COMPLETED)
        self._heart.join()
        self._api.close()
        self._control.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(failed=error is not None)


def _refused(error: BadMessage) -> str:
    return f"{error.reason}: {printable(str(error))}"


def _patiently(call: Callable[[], T]) -> T:
    """Return what a call returns; while the SuperLink is away, try again for a minute."""
    limit, pause = time.monotonic() + _PATIENCE, _FIRST_PAUSE
    while True:
        try:
            return call()
        except LinkDown:
            if time.monotonic() > limit:
                raise
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def register_node(address: str, *, ca: bytes, public_key: bytes, name: str) -> int:
    """Return the id of the node with this public key (PEM or OpenSSH), enrolled if it was not."""
    load = load_pem_public_key if public_key.startswith(b"-----") else load_ssh_public_key
    key = load(public_key)
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ValueError("the public key of a device must be one of an elliptic curve (P-384)")
    pem = flower_api.public_bytes(key)
    control = ControlApi(address, ca=ca)
    try:
        for node in _patiently(control.nodes):
            if node.key == pem:
                return node.id
        return _patiently(lambda: control.register(pem, name))
    finally:
        control.close()


def stop_open_runs(address: str, *, ca: bytes) -> None:
    """End all runs: those of servers that are gone, where no other server can be there."""
    control = ControlApi(address, ca=ca)
    try:
        for run in _patiently(control.open_runs):
            _patiently(partial(control.stop_run, run))
    finally:
        control.close()


def node_ids(address: str, *, ca: bytes) -> frozenset[int]:
    """Return the ids of all nodes that are enrolled."""
    control = ControlApi(address, ca=ca)
    try:
        return frozenset(node.id for node in _patiently(control.nodes))
    finally:
        control.close()


def unregister_node(address: str, *, ca: bytes, node: int) -> None:
    """Refuse a node's key from now on, for good: it cannot be enrolled again."""
    control = ControlApi(address, ca=ca)
    try:
        _patiently(lambda: control.unregister(node))
    finally:
        control.close()
