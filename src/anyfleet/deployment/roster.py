"""The roster of a fleet: the devices that have been enrolled, in a file that only gains rows.

The row of a device is its number for ever: ledgers and checkpoints count devices by it. A revoked
device keeps its row. Its key is never enrolled again; its name is, with a new key, as a new row.

Whoever serves the fleet watches the file, and lets the SuperLink know of every change.
"""

import re
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from anyfleet.config import toml_value
from anyfleet.errors import ConfigError, Problem, StoreError
from anyfleet.runtime.flower.keys import fingerprint, load_public, public_pem, public_text
from anyfleet.store.disk import DiskError, Lock, write

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PATIENCE = 10.0  # seconds to wait for another command that changes the roster
_HEAD = (
    "# Enrolled devices. `anyfleet fleet add` and `remove` change this file; rows stay for ever."
)


@dataclass(frozen=True)
class Member:
    """A device that has been enrolled: one row of the roster."""

    number: int
    name: str
    key: str  # the public half, in OpenSSH form
    enrolled: str  # UTC, ISO 8601
    revoked: str = ""  # the same; "": it is enrolled
    node: int | None = None  # as the SuperLink knows it; None: it has not been told yet

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the key."""
        return fingerprint(load_public(self.key))

    @property
    def public_key(self) -> bytes:
        """The key as PEM, the form that the SuperLink wants."""
        return public_pem(load_public(self.key))

    @property
    def state(self) -> str:
        """The state in one word: enrolled or revoked."""
        return "revoked" if self.revoked else "enrolled"


@dataclass(frozen=True)
class Roster:
    """All devices that were ever enrolled, by number."""

    members: tuple[Member, ...] = ()

    def __post_init__(self) -> None:
        assert [each.number for each in self.members] == list(range(len(self.members)))

    @property
    def enrolled(self) -> tuple[Member, ...]:
        """The devices that have not been revoked."""
        return tuple(each for each in self.members if not each.revoked)

    def add(self, name: str, key: str) -> "Roster":
        """Return the roster with one more device; raise ConfigError if it cannot be enrolled."""
        public = public_text(load_public(key))
        if not _NAME.fullmatch(name):
            told = f"{name!r} must be 1 to 64 letters, digits, dots, dashes or underscores."
            raise _refused("name", told)
        for each in self.members:
            if each.key == public and each.revoked:
                told = f"was revoked with device {each.number} ({each.name}), which is for ever. "
                raise _refused("key", f"{told}Remove device.key there; a new one is made.")
            if each.key == public:
                raise _refused("key", f"is that of device {each.number} ({each.name}) already.")
            if each.name == name and not each.revoked:
                told = f"{name!r} is device {each.number} already. Choose another, or remove it."
                raise _refused("name", told)
        member = Member(len(self.members), name, public, _now())
        return Roster((*self.members, member))

    def remove(self, name: str) -> "Roster":
        """Return the roster with a device revoked; raise ConfigError if none has this name."""
        number = self.number_of(name)
        return self._with(replace(self.members[number], revoked=_now()))

    def with_node(self, number: int, node: int) -> "Roster":
        """Return the roster with the id by which the SuperLink knows a device."""
        return self._with(replace(self.members[number], node=node))

    def number_of(self, name: str) -> int:
        """Return the number of the enrolled device with this name."""
        for each in self.enrolled:
            if each.name == name:
                return each.number
        known = ", ".join(each.name for each in self.enrolled) or "none"
        raise _refused("name", f"{name!r} is not enrolled. Enrolled are: {known}.")

    def _with(self, member: Member) -> "Roster":
        before, after = self.members[: member.number], self.members[member.number + 1 :]
        return Roster((*before, member, *after))


def read_roster(file: Path) -> Roster:
    """Return the roster in a file; raise ConfigError with everything that is wrong with it."""
    try:
        rows = tomllib.loads(file.read_text(encoding="utf-8")).get("devices", [])
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError([Problem(str(file), f"cannot be read: {error}.")]) from error
    if not isinstance(rows, list):
        raise ConfigError([Problem(str(file), "devices must be tables, [[devices]].")])
    members, problems = [], []
    for number, row in enumerate(rows):
        try:
            members.append(_member(number, row))
        except (ConfigError, LookupError, TypeError, ValueError) as error:
            told = str(error) or type(error).__name__
            problems.append(Problem(f"{file}: devices[{number}]", told))
    if problems:
        raise ConfigError(problems)
    return Roster(tuple(members))


def _member(number: int, row: Any) -> Member:
    if row["number"] != number:
        raise ValueError(f"has the number {row['number']}; rows are neither moved nor removed.")
    texts = {name: row[name] for name in ("name", "key", "enrolled", "revoked", "node")}
    for name, value in texts.items():
        if not isinstance(value, str):
            raise TypeError(f"{name} must be a text.")
    load_public(row["key"])
    node = int(row["node"]) if row["node"] else None
    return Member(number, row["name"], row["key"], row["enrolled"], row["revoked"], node)


def _text(roster: Roster) -> str:
    """Return the text of the file. Ids of nodes are texts: they go beyond the numbers of TOML."""
    lines = [_HEAD]
    for each in roster.members:
        node = "" if each.node is None else str(each.node)
        row = {"number": each.number, "name": each.name, "fingerprint": each.fingerprint}
        row |= {"key": each.key, "enrolled": each.enrolled, "revoked": each.revoked, "node": node}
        lines += ["", "[[devices]]", *(f"{name} = {toml_value(row[name])}" for name in row)]
    return "\n".join(lines) + "\n"


# --- changes to the file --------------------------------------------------------------------------


def enrol(file: Path, name: str, key: str) -> Member:
    """Add a device to the roster in a file, and return its row."""
    with _held(file):
        roster = read_roster(file).add(name, key)
        write(file, _text(roster).encode("utf-8"), 0o600)
    return roster.members[-1]


def revoke(file: Path, name: str) -> Member:
    """Revoke the enrolled device with this name for ever, and return its row."""
    with _held(file):
        roster = read_roster(file)
        number = roster.number_of(name)
        roster = roster.remove(name)
        write(file, _text(roster).encode("utf-8"), 0o600)
    return roster.members[number]


def record_node(file: Path, number: int, node: int) -> Member:
    """Write down the id by which the SuperLink knows a device, and return its row."""
    with _held(file):
        roster = read_roster(file).with_node(number, node)
        write(file, _text(roster).encode("utf-8"), 0o600)
    return roster.members[number]


@contextmanager
def _held(file: Path) -> Iterator[None]:
    """Hold the roster, so that no other process changes it meanwhile."""
    lock = _lock(file, time.monotonic() + _PATIENCE)
    try:
        yield
    finally:
        lock.release()


def _lock(file: Path, until: float) -> Lock:
    while True:
        try:
            return Lock(file.parent, "roster.lock")
        except DiskError:
            raise
        except StoreError:
            if time.monotonic() > until:
                raise
        time.sleep(0.02)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _refused(where: str, what: str) -> ConfigError:
    return ConfigError([Problem(where, what)])
