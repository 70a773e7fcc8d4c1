"""Real devices in threads of this process: their loop and the fleet's, with queues between them."""

import io
import itertools
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from anyfleet.device.bundle import Bundle, bundle_of
from anyfleet.device.conditions import GivenConditions, Reporter
from anyfleet.device.data import OwnData
from anyfleet.device.log import Log
from anyfleet.device.memory import Memory
from anyfleet.device.resident import Member, Resident
from anyfleet.device.sensors import Sensors
from anyfleet.runtime.flower.envelopes import Letter
from anyfleet.runtime.flower.hosting import Arrival, Node

NOTHING = Sensors(battery=None, temperature=None, power=None, slowest=None, fastest=None)


class Left(BaseException):
    """A device is switched off."""


@dataclass(frozen=True)
class Received:
    """A letter as a device gets it."""

    letter: Letter
    handle: bytes
    whole: bool = True
    seconds: float = 0.001


@dataclass(frozen=True)
class Row:
    """A row of the roster."""

    name: str
    node: int | None
    revoked: str = ""


@dataclass(eq=False)
class NearLink:
    """A device's end: letters come out of a queue."""

    node: int
    post: "NearPost"
    letters: "Queue[Received]" = field(default_factory=Queue)
    off: threading.Event = field(default_factory=threading.Event)

    def receive(self) -> Received | None:
        if self.off.is_set():
            raise Left
        try:
            return self.letters.get(timeout=0.002)
        except Empty:
            return None

    def reply(self, handle: bytes, letter: Letter) -> None:
        if self.off.is_set():
            raise Left
        self.post.deliver(handle.decode(), self.node, letter)


@dataclass(eq=False)
class NearPost:
    """The server's end (`runtime.flower.fleet.Post`): messages go to queues in this process."""

    run_id: int = 1
    links: dict[int, NearLink] = field(default_factory=dict)
    online: set[int] = field(default_factory=set)
    arrivals: dict[str, Arrival] = field(default_factory=dict)
    parts: dict[str, Arrival] = field(default_factory=dict)  # replies that come in only in part
    forgotten: list[str] = field(default_factory=list)
    sent: list[tuple[int, Letter]] = field(default_factory=list)
    breaks: int = 0
    starts: Counter[int] = field(default_factory=Counter)  # of the devices, by node
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def nodes(self) -> list[Node]:
        return [
            Node(node, f"device-{node}", node in self.online, self.starts[node])
            for node in self.links
        ]

    def send(self, letters: Sequence[tuple[int, Letter]], ttl: float | None = None) -> list[str]:
        ids = []
        for node, letter in letters:
            message = f"m{next(self._numbers)}"
            ids.append(message)
            self.sent.append((node, letter))
            if node in self.online:
                self.links[node].letters.put(Received(letter, message.encode()))
        return ids

    def deliver(self, message: str, node: int, letter: Letter) -> None:
        self.arrivals[message] = Arrival(message, node, letter, True, "")

    def receive(self, wanted: Collection[str]) -> list[Arrival]:
        return [self.arrivals.pop(each) for each in wanted if each in self.arrivals]

    def so_far(self, message: str) -> Arrival | None:
        return self.parts.get(message)

    def begun(self, messages: Collection[str]) -> set[str]:
        return set(messages) & (self.parts.keys() | self.arrivals.keys())

    def forget(self, message: str) -> None:
        self.forgotten.append(message)


@dataclass(eq=False)
class NearRoster:
    """A roster that a test can change."""

    rows: list[Row] = field(default_factory=list)

    def enrolled(self) -> Sequence[Row]:
        return tuple(self.rows)


@dataclass(eq=False)
class NearFleet:
    """Devices in threads, each with its folder; they can be switched off and on."""

    task: Any
    home: Path
    given: Mapping[int, Mapping[str, float]]
    levels: Sequence[int]
    column_widths: Sequence[float]
    post: NearPost = field(default_factory=NearPost)
    roster: NearRoster = field(default_factory=NearRoster)
    threads: dict[int, threading.Thread] = field(default_factory=dict)
    logs: dict[int, io.StringIO] = field(default_factory=dict)
    errors: list[BaseException] = field(default_factory=list)

    @property
    def bundle(self) -> Bundle:
        return bundle_of(self.task)

    def enrol(self, number: int) -> None:
        self.roster.rows.append(Row(f"device-{number}", number))

    def start(self, number: int) -> None:
        """Switch a device on, with what it has kept."""
        link = self.post.links[number] = NearLink(number, self.post)
        self.post.starts[number] += 1
        own = OwnData(self.task.data(number), self.task.own_test(number))
        member = Member(
            self.bundle, own, self.levels[number], self.column_widths[number], ("tests",)
        )
        memory = Memory(self.home / f"device-{number}", ("tests",))
        log = self.logs.setdefault(number, io.StringIO())
        given = GivenConditions(self.given[number])
        resident = Resident(
            member,
            memory,
            Reporter(given, None),
            Log(log),
            sensors=lambda: NOTHING,
            sleep=lambda _: None,
        )

        @contextmanager
        def connect() -> Iterator[NearLink]:
            yield link

        def stay() -> None:
            try:
                resident.stay(connect)
            except Left:
                pass
            except BaseException as error:  # noqa: BLE001 - the test shows it
                self.errors.append(error)

        self.threads[number] = threading.Thread(target=stay, daemon=True)
        self.post.online.add(number)
        self.threads[number].start()

    def stop(self, number: int) -> None:
        """Switch a device off."""
        self.post.online.discard(number)
        self.post.links[number].off.set()
        self.threads.pop(number).join(20)

    def close(self) -> None:
        for number in list(self.threads):
            self.stop(number)
