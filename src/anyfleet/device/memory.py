"""What a device keeps on disk: its states, its last order and its last answer.

    state/after-12.bin   the state after order 12, until the server says that it never goes back
    state/order.bin      the order that is under way: it is there until its answer is delivered
    state/answer.bin     the last answer, for a server that sends the same order again
    state/server.bin     which server the device heard last

Every file is written as a whole, forced to the disk, and begins with the SHA-256 of the rest. There
is no code in it. The folder belongs to its owner alone.
"""

import hashlib
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load

from anyfleet.core.device_state import DeviceState
from anyfleet.errors import StoreError
from anyfleet.store import disk, tensor_blocks
from anyfleet.store.serialisation import Document, decode, encode

MOST_STATES = 16  # that are kept for a server that never says what is settled
_MAGIC = b"AFD1"
_LEAD = len(_MAGIC) + 32
_AFTER = "after-"


class KeptOrder(msgspec.Struct, frozen=True):
    """An order as it came, and how often this device has begun it."""

    kind: str
    data: bytes
    about: dict[str, Any]  # as of a letter
    whole: bool
    handle: bytes
    attempts: int = 0
    seconds: float | None = None  # that it took to come

    @property
    def digest(self) -> bytes:
        """The SHA-256 of the order's bytes."""
        return hashlib.sha256(self.data).digest()


class KeptAnswer(msgspec.Struct, frozen=True):
    """An answer as it was sent, and the digest of the order that it answers."""

    order: bytes
    kind: str
    data: bytes
    about: dict[str, Any]  # as of a letter


class _Heard(msgspec.Struct, frozen=True):
    """The server that a device heard last, and the run that it serves."""

    run: str
    server: str


class _Moment(msgspec.Struct, frozen=True):
    """The state after an order, apart from its tensors."""

    run: str
    loss: float | None
    state: bytes
    tensors: bytes


@dataclass(frozen=True, eq=False)
class Past:
    """What a device has when an order comes: its state, and the loss of its last reply or None."""

    state: DeviceState = field(default_factory=DeviceState)
    loss: float | None = None


T = TypeVar("T", KeptOrder, KeptAnswer, _Heard, _Moment)


class Memory:
    """The folder with what a device keeps.

    `allow` are the packages besides Anyfleet whose classes a state may hold.
    """

    def __init__(self, folder: Path, allow: Collection[str] = ()) -> None:
        self.folder, self._allow = folder, tuple(allow)
        self._latest: tuple[int, str, float | None] = (-1, "", None)  # order, run, and its loss
        self._heard: _Heard | None = None  # as far as it has been read
        with disk.told(folder):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            folder.chmod(0o700)
        disk.refuse_links(folder, [each.name for each in folder.iterdir()])

    # -- states

    def before(self, order: int, run: str = "") -> Past:
        """Return what the device had before an order of a run, which may be one of the past.

        Orders of other runs do not count: nothing that a device learned in one leaks into another.
        """
        earlier = [number for number in self.orders() if number < order]
        if not earlier:
            return Past()
        file = self._after(earlier[-1])
        moment = self._read(file, _Moment)
        if moment is None or moment.run != run:
            return Past()
        try:
            root = msgspec.json.decode(moment.state)
            blocks = {n: each.reshape(-1).clone() for n, each in load(moment.tensors).items()}
            state = decode(Document(root, blocks), {}, allow=self._allow)
        except (msgspec.MsgspecError, SafetensorError, StoreError, ValueError) as error:
            raise _damaged(file) from error
        if not isinstance(state, DeviceState):
            raise _damaged(file)
        return Past(state, moment.loss)

    def last_loss(self, run: str = "") -> float | None:
        """Return the loss of the last reply in a run; None before the first."""
        known = self.orders()
        if not known:
            return None
        if self._latest[0] != known[-1]:
            moment = self._read(self._after(known[-1]), _Moment)
            self._latest = (
                (-1, "", None) if moment is None else (known[-1], moment.run, moment.loss)
            )
        return self._latest[2] if self._latest[1] == run else None

    def keep(self, order: int, past: Past, run: str = "") -> None:
        """Write what the device has after an order; what it had after later ones is forgotten."""
        document, tensors = encode(past.state, {}), BytesIO()
        tensor_blocks.write(tensors, document.blocks)
        root = msgspec.json.encode(document.root)
        moment = _Moment(run=run, loss=past.loss, state=root, tensors=tensors.getvalue())
        self._write(self._after(order), moment)
        self._latest = order, run, past.loss
        known = self.orders()
        later = [number for number in known if number > order]
        for number in (*later, *known[: max(0, len(known) - len(later) - MOST_STATES)]):
            self._after(number).unlink(missing_ok=True)

    def settle(self, order: int) -> None:
        """Forget what no server needs any more: orders below this number never come again."""
        earlier = [number for number in self.orders() if number < order]
        for number in earlier[:-1]:
            self._after(number).unlink(missing_ok=True)

    def hear(self, run: str, server: str, void: int) -> None:
        """Note which server is heard: one that took a run over issues orders from `void` on anew.

        What the device did of these for the server before it is forgotten, with the last answer,
        which may be of one of them: it is computed again if it is asked for again.
        """
        heard, file = _Heard(run, server), self.folder / "server.bin"
        if self._heard is None:
            self._heard = self._read(file, _Heard)
        if self._heard == heard:
            return
        dropped = [number for number in self.orders() if number >= void]
        if self._heard is not None and self._heard.run == run and dropped:
            (self.folder / "answer.bin").unlink(missing_ok=True)
            for number in dropped:
                self._after(number).unlink(missing_ok=True)
            self._latest = (-1, "", None)
        self._write(file, heard)
        self._heard = heard

    def orders(self) -> list[int]:
        """Return the numbers of the orders after which the state is kept, ascending."""
        names = (each.stem.removeprefix(_AFTER) for each in self.folder.glob(f"{_AFTER}*.bin"))
        return sorted(int(name) for name in names if name.isdecimal())

    # -- the last order and the last answer

    def begin(self, order: KeptOrder) -> None:
        """Write an order before it is worked on."""
        self._write(self.folder / "order.bin", order)

    def under_way(self) -> KeptOrder | None:
        """Return the order whose answer has not been delivered; None without one."""
        return self._read(self.folder / "order.bin", KeptOrder)

    def answer(self, answer: KeptAnswer) -> None:
        """Write an answer before it is sent."""
        self._write(self.folder / "answer.bin", answer)

    def answer_to(self, order: KeptOrder) -> KeptAnswer | None:
        """Return the answer to an order with these very bytes; None if it was not the last."""
        found = self._read(self.folder / "answer.bin", KeptAnswer)
        return found if found is not None and found.order == order.digest else None

    def delivered(self) -> None:
        """Note that the answer to the last order has been delivered, or is not wanted."""
        (self.folder / "order.bin").unlink(missing_ok=True)

    def forget(self) -> None:
        """Forget everything."""
        for file in self.folder.glob("*.bin"):
            file.unlink(missing_ok=True)

    def set_damaged_aside(self) -> list[Path]:
        """Give files that are not as they were written another name, and return the new names."""
        found = [each for each in sorted(self.folder.glob("*.bin")) if _content(each) is None]
        return [each.replace(each.with_suffix(".damaged")) for each in found]

    # -- files

    def _after(self, order: int) -> Path:
        return self.folder / f"{_AFTER}{order}.bin"

    def _write(self, file: Path, value: Any) -> None:
        content = msgspec.msgpack.encode(value)
        disk.write(file, _MAGIC + hashlib.sha256(content).digest() + content)

    def _read(self, file: Path, kind: type[T]) -> T | None:
        """Return what a file holds, or None without one; raise StoreError if it is damaged."""
        if not file.exists():
            return None
        content = _content(file)
        with suppress(msgspec.MsgspecError, UnicodeDecodeError):
            if content is not None:
                return msgspec.msgpack.decode(content, type=kind)
        raise _damaged(file)


def _content(file: Path) -> bytes | None:
    """Return what stands behind the checksum of a file; None if that is not right."""
    try:
        raw = file.read_bytes()
    except OSError:
        return None
    content = raw[_LEAD:]
    right = raw[:_LEAD] == _MAGIC + hashlib.sha256(content).digest()
    return content if right else None


def _damaged(file: Path) -> StoreError:
    return StoreError(
        f"{file} is damaged. Delete it: the device then goes on as one that has forgotten it."
    )
