"""A check of a fleet's server before it serves: files, certificates, ports, clock, disk, versions.

Each finding is one line: ok, a warning or a failure, and what to do about it.
"""

import ctypes
import errno
import shutil
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib import metadata
from typing import Literal

import anyfleet
from anyfleet.deployment.certificates import faults, read_certificate
from anyfleet.deployment.fleet_folder import Address, FleetFolder, open_fleet
from anyfleet.deployment.roster import read_roster
from anyfleet.errors import AnyfleetError

FLOWER = "1.41.0"  # the only version whose internals this release knows
_SOON = timedelta(days=30)
_RELEASED = 2025  # no clock that shows an earlier year is right
_UNSYNCHRONISED = 5  # what the system call adjtimex returns then
_WIRE_COPIES = 2  # of the model for each device in the database: an order and a reply
_OWN_COPIES = 4  # checkpoints, and the model itself

State = Literal["ok", "warning", "failed"]


@dataclass(frozen=True)
class Finding:
    """What was looked at, how it is, and what to do if it is not well."""

    subject: str
    state: State
    told: str


def inspect(folder: FleetFolder) -> list[Finding]:
    """Return what a check of the fleet's server finds; nothing is changed."""
    checks: dict[str, Callable[[FleetFolder], Iterator[Finding]]] = {
        "files": _files,
        "permissions": _permissions,
        "certificates": _certificates,
        "ports": _ports,
        "clock": lambda _: _clock(),
        "disk": _disk,
        "versions": _versions,
        "roster": _roster,
    }
    open_fleet(folder.path)
    found: list[Finding] = []
    for subject, check in checks.items():
        try:
            found += check(folder)
        except (AnyfleetError, OSError) as error:
            found.append(Finding(subject, "failed", str(error)))
    return found


def verdict(findings: list[Finding]) -> State:
    """Return the worst state among findings."""
    states = {each.state for each in findings}
    return "failed" if "failed" in states else "warning" if "warning" in states else "ok"


def _files(folder: FleetFolder) -> Iterator[Finding]:
    problems = [*folder.missing()]
    for each in problems:
        yield Finding("files", "failed", str(each))
    if not problems:
        yield Finding("files", "ok", "the folder is whole")
    copy = folder.device / "ca.crt"
    if copy.is_file() and copy.read_bytes() != folder.authority.read_bytes():
        told = f"{copy} differs from {folder.authority}: copy the latter over it."
        yield Finding("files", "failed", told)


def _permissions(folder: FleetFolder) -> Iterator[Finding]:
    problems = [*folder.exposed()]
    for each in problems:
        yield Finding("permissions", "failed", str(each))
    if not problems:
        yield Finding("permissions", "ok", "secrets are readable by their owner alone")


def _certificates(folder: FleetFolder) -> Iterator[Finding]:
    host, now = folder.device_file().address.host, datetime.now(UTC)
    found = list(faults(folder.authority.read_bytes(), folder.server(), host, now))
    again = f"Check the clock; then run: anyfleet fleet renew {folder.path}"
    for each in found:
        yield Finding("certificates", "failed", f"{each}. {again}")
    if found:
        return
    end = read_certificate(folder.certificate.read_bytes()).not_valid_after_utc
    told = f"server.crt is for {host} and valid until {end:%Y-%m-%d}"
    if end - now < _SOON:
        yield Finding("certificates", "warning", f"{told}: run anyfleet fleet renew {folder.path}")
    else:
        yield Finding("certificates", "ok", told)


# --- ports ----------------------------------------------------------------------------------------


def _ports(folder: FleetFolder) -> Iterator[Finding]:
    yield _public(folder, folder.device_file().address)
    try:
        with socket.create_server(("127.0.0.1", 0)):
            yield Finding("ports", "ok", "loopback has a port for the SuperLink")
    except OSError as error:
        told = f"127.0.0.1 cannot be used: {error.strerror}. Bring the loopback interface up."
        yield Finding("ports", "failed", told)


def _public(folder: FleetFolder, address: Address) -> Finding:
    where = f"port {address.port} of {address.listens}"
    family = socket.AF_INET6 if ":" in address.listens else socket.AF_INET
    try:
        with socket.create_server((address.listens, address.port), family=family):
            return Finding("ports", "ok", f"{where} is free for devices")
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            if _is_served(folder, address):
                return Finding("ports", "ok", f"{where} is in use by this fleet's own server")
            advice = "another program uses it. End that one, or make the fleet anew"
        elif error.errno == errno.EACCES:
            advice = "it needs the rights of root. Make the fleet anew with a port above 1023"
        else:
            advice = f"{error.strerror}. Make the fleet anew with another --address"
        return Finding("ports", "failed", f"{where} cannot be used: {advice}.")


def _is_served(folder: FleetFolder, address: Address) -> bool:
    """Return whether the gate of this very fleet answers at the public port."""
    ours = ssl.PEM_cert_to_DER_cert(folder.certificate.read_text(encoding="ascii"))
    local = "::1" if ":" in address.listens else "127.0.0.1"
    context = ssl.create_default_context(cafile=str(folder.authority))
    with (
        suppress(OSError, ValueError),
        socket.create_connection((local, address.port), timeout=3.0) as plain,
        context.wrap_socket(plain, server_hostname=address.host) as link,
    ):
        return link.getpeercert(binary_form=True) == ours
    return False


# --- this machine ---------------------------------------------------------------------------------


def _clock() -> Iterator[Finding]:
    """Yield how the clock is. Certificates, and what devices sign, are judged by it."""
    mend = "Set it, for example with systemd-timesyncd or chrony."
    year = datetime.now(UTC).year
    if year < _RELEASED:
        yield Finding("clock", "failed", f"it shows the year {year}. {mend}")
        return
    before, wall = time.monotonic(), time.time()
    time.sleep(0.05)
    drift = abs((time.time() - wall) - (time.monotonic() - before))
    if drift > 1.0:
        yield Finding("clock", "failed", f"it was set by {drift:.0f} s during the check. {mend}")
    elif _is_synchronised() is False:
        told = "nothing keeps it right. Devices sign by it and may have another time, but "
        yield Finding("clock", "warning", f"{told}certificates are judged by both clocks. {mend}")
    else:
        yield Finding("clock", "ok", f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC")


def _is_synchronised() -> bool | None:
    """Return whether the system says that something keeps its clock right; None: it does not."""
    if sys.platform != "linux":
        return None
    try:
        return bool(ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512)) != _UNSYNCHRONISED)
    except (AttributeError, OSError):
        return None


def _disk(folder: FleetFolder) -> Iterator[Finding]:
    model = sum(each.stat().st_size for each in folder.bundle.rglob("*") if each.is_file())
    devices = max(1, len(read_roster(folder.roster).enrolled))
    needed = model * (_WIRE_COPIES * devices + _OWN_COPIES)
    free = shutil.disk_usage(folder.path).free
    told = f"{_megabytes(free)} free; a round of {devices} devices may take {_megabytes(needed)}"
    if free < needed:
        yield Finding("disk", "failed", f"{told}. Make room, or move the folder.")
    elif free < 2 * needed:
        yield Finding("disk", "warning", f"{told}, and a run writes more. Make room.")
    else:
        yield Finding("disk", "ok", told)


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"


def _versions(folder: FleetFolder) -> Iterator[Finding]:
    try:
        flower = metadata.version("flwr")
    except metadata.PackageNotFoundError:
        flower = "none"
    if flower != FLOWER:
        told = f"Flower {FLOWER} is due, found {flower}. Run: pip install 'anyfleet[fleet]'"
        yield Finding("versions", "failed", told)
    made = folder.device_file().version
    if made != anyfleet.__version__:
        told = f"{folder.device} was made by anyfleet {made}, this is {anyfleet.__version__}: "
        mend = f"install {made}, or run anyfleet fleet bundle {folder.path} RUN.toml"
        yield Finding("versions", "failed", f"{told}{mend} and copy device/ to the devices.")
    python = ".".join(map(str, sys.version_info[:3]))
    if flower == FLOWER and made == anyfleet.__version__:
        yield Finding("versions", "ok", f"anyfleet {made}, Flower {flower}, Python {python}")


def _roster(folder: FleetFolder) -> Iterator[Finding]:
    roster = read_roster(folder.roster)
    revoked = len(roster.members) - len(roster.enrolled)
    yield Finding("roster", "ok", f"{len(roster.enrolled)} enrolled, {revoked} revoked")
