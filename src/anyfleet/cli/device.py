"""`anyfleet device`: join a fleet with this machine, or print the systemd unit that does."""

import math
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from anyfleet.cli.importing import importing
from anyfleet.errors import AnyfleetError, ConfigError, Problem

_UNIT = """\
[Unit]
Description=Anyfleet device in {folder}
Wants=network-online.target
After=network-online.target

[Service]
Type=exec
WorkingDirectory={here}
ExecStart={command}
Restart=always
RestartSec=5
TimeoutStopSec=30
NoNewPrivileges=true

[Install]
WantedBy=multi-user.target
"""


@dataclass(frozen=True)
class Joining:
    """How a device joins: the options of `anyfleet device join`."""

    folder: Path
    data: str
    allow: tuple[str, ...] = ()
    threads: int = 1
    memory: int | None = None
    niceness: int = 0
    given: Path | None = None  # file with conditions
    level: int = 0
    column_width: float = 1.0
    bit_rate: float | None = None  # most bits per second of the link; None: all it has
    once: bool = False
    json: bool = False

    def words(self) -> list[str]:
        """Return the words of the command that joins like this, from any working directory."""
        data = str(Path(self.data).resolve()) if self.data.endswith(".npz") else self.data
        words = ["device", "join", str(self.folder.resolve()), "--data", data]
        for package in self.allow:
            words += ["--allow", package]
        given = None if self.given is None else str(self.given.resolve())
        options = {
            "--threads": (self.threads, 1),
            "--memory": (self.memory, None),
            "--nice": (self.niceness, 0),
            "--given-conditions": (given, None),
            "--level": (self.level, 0),
            "--column-width": (self.column_width, 1.0),
            "--bit-rate": (self.bit_rate, None),
        }
        for name, (value, usual) in options.items():
            if value != usual:
                words += [name, str(value)]
        flags = {"--once": self.once, "--json": self.json}
        return words + [name for name, wanted in flags.items() if wanted]


def join_fleet(joining: Joining) -> None:
    """Take part in a fleet, and stay; return when a run has ended, with --once."""
    with importing():
        try:
            from anyfleet.runtime.flower.connection import Connection
            from anyfleet.runtime.flower.keys import device_key, fingerprint
        except ModuleNotFoundError as error:
            raise AnyfleetError(f"{error.name} is missing: install anyfleet[fleet].") from error
        from anyfleet.device.bundle import read_bundle
        from anyfleet.device.conditions import BitRates, Meter, Reporter, read_given, speed_profile
        from anyfleet.device.data import own_data
        from anyfleet.device.device_task import DeviceTask
        from anyfleet.device.folder import DeviceFolder, other_version, require_allowed
        from anyfleet.device.limits import Loan, apply
        from anyfleet.device.log import Log
        from anyfleet.device.memory import Memory
        from anyfleet.device.resident import Link, Member, Resident
        from anyfleet.store.disk import Lock

    folder, log = DeviceFolder(joining.folder), Log(sys.stderr, joining.json)
    loan = Loan(joining.threads, joining.memory, joining.niceness)
    member_of, authority = folder.membership(), folder.authority()
    require_allowed(member_of.allow, joining.allow)
    given = None if joining.given is None else read_given(joining.given)
    key = device_key(folder.key)
    bundle = read_bundle(folder.bundle, joining.allow)
    data = own_data(joining.data, bundle)
    if warning := other_version(member_of):
        log.note(warning)
    if warning := apply(loan):
        log.note(warning)
    memory = Memory(folder.state, joining.allow)
    lock = Lock(folder.state)  # two processes with one key would take each other's orders
    log.note(f"key {fingerprint(key.public_key())}; {len(data.train)} samples of its own")
    rates, meter = BitRates(), None
    if given is None or given.measured:
        log.say("wait", "while this machine is measured")
        task = DeviceTask(bundle, 0, data.train, data.test)
        meter = Meter(speed_profile(task, loan.threads, folder.profile), loan, rates)
    member = Member(bundle, data, joining.level, joining.column_width, joining.allow)
    resident = Resident(member, memory, Reporter(given, meter), log, rates=rates)

    def connect() -> AbstractContextManager[Link]:
        most = math.inf if joining.bit_rate is None else joining.bit_rate
        return Connection(
            member_of.address,
            ca=authority,
            key=key,
            home=folder.link,
            bit_rate=most,
            note=log.note,
        )

    try:
        resident.stay(connect, once=joining.once)
    finally:
        lock.release()


def unit_text(joining: Joining, program: Sequence[str], here: Path) -> str:
    """Return a systemd unit that runs this very command, always."""
    if not joining.folder.is_dir():
        raise ConfigError([Problem(str(joining.folder), "there is no such folder.")])
    command = " ".join(map(_quoted, [*program, *joining.words()]))
    folder, directory = (str(each).replace("%", "%%") for each in (joining.folder.resolve(), here))
    return _UNIT.format(folder=folder, here=directory, command=command)


def _quoted(word: str) -> str:
    """Return a word as a unit writes it, where %, $ and backslashes have meanings of their own."""
    plain = word.replace("%", "%%").replace("$", "$$").replace("\\", "\\\\")
    if all(letter.isalnum() or letter in "%$+,-./:=@_" for letter in plain):
        return plain
    return '"' + plain.replace('"', '\\"') + '"'
