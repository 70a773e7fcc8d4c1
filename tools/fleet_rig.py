"""A real fleet on loopback that can be tormented: a server and devices, each a process of its own.

Everything is started through the public commands, as `anyfleet fleet practise` does. What the
processes print is kept in `server.log` and `device-N.log`.
"""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil

from anyfleet.deployment.practice import Practice, command, compare, given_conditions, name_of
from anyfleet.deployment.roster import enrol, revoke
from anyfleet.deployment.status import Status, read_status
from anyfleet.experiment import Prepared, load, prepare
from anyfleet.runtime.flower.keys import device_key, public_text

HOST = "127.0.0.1"
LIMIT = 150.0  # seconds for anything: what takes longer hangs
LOOK = 0.1  # seconds between two looks
MANY = 1_000_000  # rounds of a run that is ended from outside

RUN = """\
rounds = {rounds}

[task]
use = "Embedded"
devices = {devices}
limit = {samples}
server = 100
model = {{ use = "perceptron", features = 784, hidden = [{hidden}] }}

[method]
use = "{method}"
count = {count}
lr = 0.05
batch_size = 32

[fleet]
use = "levels"
"""


class Trouble(Exception):
    """What must not happen: something hangs, a round is lost, or nobody says what happened."""


class LedgerRow(msgspec.Struct, frozen=True):
    """What is read of a row of the ledger."""

    order: int
    round_index: int
    device: int
    failure: str


class RoundRow(msgspec.Struct, frozen=True):
    """What is read of the record of a round: all but its time, which may be another."""

    round_index: int
    replies: int
    failures: int
    loss: float | str | None
    scores: dict[str, float | str | None]


@dataclass(eq=False)
class Device:
    """A device: its folder, how it is started, and its process."""

    number: int
    home: Path
    words: tuple[str, ...]
    module: tuple[str, ...] = ("-m", "anyfleet.cli")
    environment: Mapping[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    since: int = 0  # bytes of its log before this process

    @property
    def up(self) -> bool:
        """Whether its process has reached the server."""
        alive = self.process is not None and self.process.poll() is None
        return alive and (
            self.said(self.since, " wait ", "order") or self.said(self.since, " work ")
        )

    @property
    def log(self) -> Path:
        """What it has printed."""
        return self.home / "log.txt"

    def start(self) -> None:
        """Start the process; its log goes on."""
        self.since = self.told()
        words = [sys.executable, *self.module, "device", "join", str(self.home), *self.words]
        self.process = started(words, self.log, self.environment)

    def kill(self) -> None:
        """Kill the process as a power cut would."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def said(self, since: int, *words: str) -> bool:
        """Return whether a line after so many bytes of its log has all these words."""
        with self.log.open("rb") as file:
            file.seek(since)
            lines = file.read().decode(errors="replace").splitlines()
        return any(all(word in line for word in words) for line in lines)

    def told(self) -> int:
        """Return how many bytes its log has."""
        return self.log.stat().st_size


@dataclass(frozen=True)
class Setting:
    """What a fleet is and does."""

    devices: int = 4
    method: str = "stc"
    samples: int = 400
    hidden: int = 16
    absence: float = 3.0  # seconds: `fleet serve --absence`
    patience: float = 40.0  # `fleet serve --patience`
    count: int | None = None  # devices in a round; None: all


@dataclass(eq=False)
class Rig:
    """The fleet, from `rigged` on."""

    folder: Path
    setting: Setting
    prepared: Prepared
    environment: Mapping[str, str]  # of the server
    port: int = 0
    devices: list[Device] = field(default_factory=list)
    server: subprocess.Popen[bytes] | None = None
    guests: list[Device] = field(default_factory=list)  # that have joined
    lost: int = 0
    lies: list[str] = field(default_factory=list)  # that come next
    again: int = 0  # rounds whose record was written twice, with the same results
    _rounds: list[tuple[bytes, RoundRow]] = field(default_factory=list)
    _rows: list[LedgerRow] = field(default_factory=list)
    _size: int = -1

    @property
    def fleet(self) -> Path:
        """The folder of the fleet."""
        return self.folder / "fleet"

    @property
    def run(self) -> Path:
        """The folder of the run."""
        return self.folder / "run"

    @property
    def file(self) -> Path:
        """The run file."""
        return self.folder / "run.toml"

    @property
    def server_log(self) -> Path:
        """What the server has printed."""
        return self.folder / "server.log"

    # -- devices

    def new_device(self, **changes: Any) -> Device:
        """Return a device that is not started: a copy of the folder for devices, and data."""
        number = len(self.devices)
        home, task = self.folder / name_of(number), self.prepared.task
        shutil.copytree(self.fleet / "device", home)
        data, test = task.data(number % task.devices), task.own_test(number % task.devices)
        arrays = {"x": data.x, "y": data.y, "test_x": test.x, "test_y": test.y}
        plain: dict[str, Any] = {name: each.cpu().numpy() for name, each in arrays.items()}
        np.savez(home / "data.npz", **plain)
        known = given_conditions(self.prepared, number % task.devices)
        (home / "conditions.json").write_text(json.dumps(known))
        level = self.prepared.world.declared.level[number % task.devices]
        words = ("--data", str(home / "data.npz"), "--level", str(level))
        given = ("--given-conditions", str(home / "conditions.json"))
        device = Device(number, home, (*words, *given, "--threads", "1"), **changes)
        device.log.touch()
        self.devices.append(device)
        return device

    def enrol(self, device: Device) -> None:
        """Enrol a device that is started, as soon as it has made its key."""
        key = device.home / "device.pub"

        def made() -> bool:
            if device.process is None or device.process.poll() is not None:
                raise Trouble(f"a device ended:\n{tail(device.log)}")
            return key.is_file()

        wait(made, f"{name_of(device.number)} made no key")
        enrol(self.fleet / "roster.toml", name_of(device.number), key.read_text())

    def revoke(self, device: Device) -> None:
        """Revoke a device."""
        revoke(self.fleet / "roster.toml", name_of(device.number))

    # -- the server

    def serve(self) -> None:
        """Start the server."""
        words = ["fleet", "serve", str(self.fleet), str(self.file), "--out", str(self.run)]
        words += ["--wait-for", str(self.setting.devices), "--metrics", "-1"]
        words += ["--absence", str(self.setting.absence), "--patience", str(self.setting.patience)]
        self.server = started(command(*words), self.server_log, self.environment)

    def resume(self, rounds: int | None = None) -> None:
        """Start a server that takes the run over."""
        words = [] if rounds is None else ["--rounds", str(rounds)]
        resumed = command("resume", str(self.run), *words)
        self.server = started(resumed, self.server_log, self.environment)

    def kill_server(self) -> None:
        """Kill the server as a power cut would."""
        assert self.server is not None
        self.server.kill()
        self.server.wait()

    def superlink(self) -> int:
        """Return the process of the SuperLink, once there is one; 0 without one."""
        files = list(self.fleet.glob("*.pid"))
        with suppress(OSError, msgspec.MsgspecError):
            for file in files:
                return int(msgspec.json.decode(file.read_bytes(), type=dict[str, float])["pid"])
        return 0

    def status(self) -> Status:
        """Return what the server says of the fleet."""
        return read_status(self.fleet)

    # -- what has happened

    def look(self) -> int:
        """Read the records; return how many rounds are completed. Count those that are lost."""
        if self.server is not None and self.server.poll() not in (None, 0, -signal.SIGKILL):
            raise Trouble(f"the server ended:\n{tail(self.server_log)}")
        found = [(line, msgspec.json.decode(line, type=RoundRow)) for line in self._lines("rounds")]
        if [row.round_index for _, row in found] != list(range(len(found))):
            raise Trouble("rounds.jsonl has a round twice, or not at all")
        for (old, before), (new, after) in zip(self._rounds, found, strict=False):
            if before != after:
                self.lost += 1
            elif old != new:
                self.again += 1
        # A server that was killed between a round's record and its checkpoint plays it again:
        # it must come out the same. It is not lost while that is under way.
        self._rounds[: len(found)] = found
        return len(found)

    def ledger(self) -> list[LedgerRow]:
        """Return the rows of the ledger."""
        lines = self._lines("ledger")
        return [msgspec.json.decode(line, type=LedgerRow) for line in lines]

    def _lines(self, name: str) -> list[bytes]:
        """Return the whole lines of a record."""
        with suppress(FileNotFoundError):
            text = (self.run / f"{name}.jsonl").read_bytes()
            return text[: text.rfind(b"\n") + 1].splitlines()
        return []

    def replied(self, number: int, since: int) -> bool:
        """Return whether a device has replied in a completed round from this one on."""
        rows = [each for each in self.ledger() if each.device == number]
        done = self.look()
        return any(since <= each.round_index < done and not each.failure for each in rows)

    def failures(self, number: int, since: int) -> list[str]:
        """Return why orders of a device failed in rounds from this one on."""
        rows = [each for each in self.ledger() if each.device == number]
        return [each.failure for each in rows if each.round_index >= since and each.failure]

    def missing(self) -> int:
        """Return how many rounds that were seen are not there (any more)."""
        return max(0, len(self._rounds) - self.look())

    # -- the end

    def end(self) -> None:
        """Stop the server, resume the run for two more rounds, and let it end by itself."""
        assert self.server is not None
        self.server.send_signal(signal.SIGINT)
        self.server.wait(LIMIT)
        rounds = len(self._lines("rounds")) + 2
        self.resume(rounds)
        server = self.server
        wait(lambda: server.poll() is not None, "the end hangs")
        if self.look() != rounds or server.returncode:
            raise Trouble(f"the run did not end well:\n{tail(self.server_log)}")
        self.lost += self.missing()

    def identical(self) -> bool:
        """Return whether the model is that of the simulator, which nothing disturbed."""
        changes = (f"rounds={self.look()}",)
        practice = Practice(self.file, changes, (), self.folder, identical=True)
        undisturbed = _prepared(self.file, changes)
        return not compare(practice, undisturbed).differing

    def close(self) -> None:
        """End every process."""
        for process in [*(each.process for each in self.devices), self.server]:
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()


@contextmanager
def rigged(
    folder: Path,
    setting: Setting,
    *,
    environment: Mapping[str, str] | None = None,
    adapt: Callable[[Device], None] = lambda device: None,
) -> Iterator[Rig]:
    """Make a fleet that plays a run without end; `adapt` changes devices before they start."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "run.toml"
    text = RUN.format(
        rounds=MANY,
        devices=setting.devices,
        samples=setting.samples,
        hidden=setting.hidden,
        method=setting.method,
        count=setting.count or setting.devices,
    )
    file.write_text(text)
    rig = Rig(folder, setting, _prepared(file), environment or {}, free_port())
    try:
        words = ("fleet", "init", str(rig.fleet), str(file), "--address", f"{HOST}:{rig.port}")
        finished(words, folder / "commands.log")
        for _ in range(setting.devices):
            device = rig.new_device()
            adapt(device)
            key = device_key(device.home / "device.key")  # as the device itself would
            enrol(rig.fleet / "roster.toml", name_of(device.number), public_text(key.public_key()))
        rig.serve()
        wait((rig.fleet / "status.json").is_file, "the server does not begin")
        for device in rig.devices:
            device.start()
        wait(lambda: rig.look() >= 2, "the run does not begin")
        yield rig
    finally:
        rig.close()


_PREPARING = threading.Lock()


def _prepared(file: Path, changes: Sequence[str] = ()) -> Prepared:
    """Return the experiment of a run file; one thread at a time may trace a model."""
    with _PREPARING:
        return prepare(load(file, changes))


def wait(until: Callable[[], bool], otherwise: str, limit: float = LIMIT) -> None:
    """Wait until something is so; raise Trouble if it takes too long."""
    end = time.monotonic() + limit
    while not until():
        if time.monotonic() > end:
            raise Trouble(f"{otherwise} (within {limit:.0f} s)")
        time.sleep(LOOK)


def started(words: Sequence[str], log: Path, changes: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a process whose output is added to a log."""
    with log.open("ab") as out:
        return subprocess.Popen(  # noqa: S603 - our own command
            words,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **changes},
        )


def finished(words: Sequence[str], log: Path) -> None:
    """Run a command to its end; raise Trouble if it fails."""
    process = started(command(*words), log, {})
    if process.wait(LIMIT):
        raise Trouble(f"`anyfleet {' '.join(words)}` failed:\n{tail(log)}")


def tail(log: Path) -> str:
    """Return the end of a log."""
    return log.read_text(errors="replace")[-3000:]


def memory(process: int) -> float:
    """Return the resident memory of a process in MB; 0 if it is gone."""
    with suppress(psutil.Error):
        return float(psutil.Process(process).memory_info().rss) / 1e6
    return 0.0


def free_port() -> int:
    """Return a port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def pause(luck: random.Random, most: float) -> None:
    """Wait for a random time."""
    time.sleep(luck.uniform(0.0, most))
