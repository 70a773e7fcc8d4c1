"""The folder of a fleet on its server: its files, how it is made, and whether it is whole.

    ca.crt ca.key            the fleet's authority: devices trust what it signs
    server.crt server.key    of the gate and of the SuperLink
    executor.secret          shows the SuperLink that the run is this server's
    roster.toml              the enrolled devices
    device/                  what every device gets: ca.crt, fleet.toml and bundle/
    link.db superlink.log superlink.pid   written while the fleet is served

Everything but `device/` is for the server alone: the folder has mode 0700, its secrets 0600.
"""

import ipaddress
import os
import re
import secrets
import stat
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import anyfleet
from anyfleet.config import to_toml
from anyfleet.deployment.certificates import SERVER_DAYS, Credentials, make_authority, make_server
from anyfleet.errors import ConfigError, Problem, StoreError
from anyfleet.store.disk import force_folder, told, write
from anyfleet.store.run_folder import claim

_PRIVATE = 0o600
_HOST = re.compile(
    r"(?=.{1,253}\Z)[a-z0-9_]([a-z0-9_-]*[a-z0-9])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9])?)*"
)
_INIT = "Make the fleet again with `anyfleet fleet init`, or restore the folder from a copy."


@dataclass(frozen=True)
class Address:
    """Where the devices reach the server: a name or an IP address, and a port."""

    host: str
    port: int

    @classmethod
    def read(cls, text: str) -> "Address":
        """Return the address in "HOST:PORT" or "[IPv6]:PORT"; raise ConfigError if it is none."""
        host, _, port = text.strip().rpartition(":")
        bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host.lower()
        if not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
            raise _unusable(text, "has no port from 1 to 65535 at its end")
        try:
            return cls(str(ipaddress.ip_address(bare)), int(port))
        except ValueError:
            if not _HOST.fullmatch(bare):
                raise _unusable(text, "has no name or IP address before the port") from None
        return cls(bare, int(port))

    @property
    def listens(self) -> str:
        """The address to listen on: loopback for a host on loopback, otherwise every interface."""
        try:
            given = ipaddress.ip_address(self.host)
        except ValueError:
            return "127.0.0.1" if self.host == "localhost" else "0.0.0.0"  # noqa: S104 - a server
        if given.is_loopback:
            return self.host
        return "0.0.0.0" if given.version == 4 else "::"  # noqa: S104

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _unusable(text: str, what: str) -> ConfigError:
    told = f"{text!r} {what}. Give HOST:PORT, such as fleet.example.org:9443."
    return ConfigError([Problem("address", told)])


@dataclass(frozen=True)
class DeviceFile:
    """The file `fleet.toml` that every device gets."""

    address: Address
    version: str  # of the Anyfleet that made it
    allow: tuple[str, ...] = ()  # packages whose parts orders may name

    def to_toml(self) -> str:
        """Return the text of the file."""
        table = {"address": str(self.address), "anyfleet": self.version, "allow": list(self.allow)}
        return f"# A fleet of Anyfleet, as its devices see it.\n{to_toml(table)}"


@dataclass(frozen=True)
class FleetFolder:
    """The paths of a fleet's folder."""

    path: Path

    @property
    def authority(self) -> Path:
        """The certificate of the fleet's authority."""
        return self.path / "ca.crt"

    @property
    def authority_key(self) -> Path:
        """The private key of the authority."""
        return self.path / "ca.key"

    @property
    def certificate(self) -> Path:
        """The certificate of the server."""
        return self.path / "server.crt"

    @property
    def key(self) -> Path:
        """The private key of the server."""
        return self.path / "server.key"

    @property
    def secret(self) -> Path:
        """The secret by which the SuperLink knows this server's run."""
        return self.path / "executor.secret"

    @property
    def roster(self) -> Path:
        """The table of enrolled devices."""
        return self.path / "roster.toml"

    @property
    def database(self) -> Path:
        """The SQLite database of the SuperLink."""
        return self.path / "link.db"

    @property
    def log(self) -> Path:
        """What the SuperLink prints."""
        return self.path / "superlink.log"

    @property
    def pid(self) -> Path:
        """The process of the SuperLink."""
        return self.path / "superlink.pid"

    @property
    def device(self) -> Path:
        """The folder of which every device gets a copy."""
        return self.path / "device"

    @property
    def bundle(self) -> Path:
        """The model as devices get it."""
        return self.device / "bundle"

    def server(self) -> Credentials:
        """Return the server's certificate and key."""
        return Credentials(self.certificate.read_bytes(), self.key.read_bytes())

    def device_file(self) -> DeviceFile:
        """Return what `device/fleet.toml` says; raise ConfigError if it cannot be read."""
        file = self.device / "fleet.toml"
        try:
            data = tomllib.loads(file.read_text(encoding="utf-8"))
            allow = tuple(map(str, data.get("allow", ())))
            return DeviceFile(Address.read(str(data["address"])), str(data["anyfleet"]), allow)
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, KeyError) as error:
            raise ConfigError([Problem(str(file), f"cannot be read: {error}. {_INIT}")]) from error

    def missing(self) -> Iterator[Problem]:
        """Yield a problem for each file that does not exist, or is not a plain file."""
        needed = (self.authority, self.certificate, self.key, self.secret, self.roster)
        for file in (*needed, self.device / "ca.crt", self.device / "fleet.toml"):
            if not file.is_file() or file.is_symlink():
                yield Problem(str(file), f"is missing, or is not a plain file. {_INIT}")
        if not self.bundle.is_dir():
            yield Problem(str(self.bundle), f"is missing. {_INIT}")

    def exposed(self) -> Iterator[Problem]:
        """Yield a problem for each secret that others on this machine could read or replace."""
        if os.name != "posix":
            return
        private = (self.authority_key, self.key, self.secret, self.database, self.log)
        for path, command in ((self.path, "700"), *((each, "600") for each in private)):
            if path.exists() and (mode := stat.S_IMODE(path.stat().st_mode)) & 0o077:
                told = f"others on this machine can use it (mode {mode:o}). "
                yield Problem(str(path), f"{told}Run: chmod {command} {path}")
        owner = os.getuid()
        if self.path.exists() and self.path.stat().st_uid not in (owner, 0):
            yield Problem(str(self.path), "belongs to somebody else. Make it your own with chown.")

    def check(self) -> None:
        """Raise ConfigError with all problems unless the folder is whole and private."""
        open_fleet(self.path)
        problems = [*self.missing(), *self.exposed()]
        if problems:
            raise ConfigError(problems)


def open_fleet(path: Path) -> FleetFolder:
    """Return the folder of a fleet; raise StoreError if there is none."""
    folder = FleetFolder(path)
    if not folder.roster.is_file():
        why = "does not exist" if not path.exists() else "is not the folder of a fleet"
        raise StoreError(f"{path} {why}. Make one with `anyfleet fleet init`.")
    return folder


def make_fleet(
    path: Path, address: Address, *, days: int = SERVER_DAYS, allow: Sequence[str] = ()
) -> FleetFolder:
    """Make the folder of a fleet, all but the bundle of its model; the folder must be new or empty.

    The bundle is written into `device/bundle` by whoever has the task.
    """
    authority = make_authority()
    server = make_server(authority, (address.host,), days=days)
    folder = FleetFolder(claim(path))
    with told(path):
        path.chmod(0o700)
        folder.device.mkdir()
    write(folder.authority, authority.certificate)
    write(folder.authority_key, authority.key, _PRIVATE)
    _write_server(folder, server)
    write(folder.secret, secrets.token_hex(32).encode("ascii"), _PRIVATE)
    write(folder.device / "ca.crt", authority.certificate)
    write_device_file(folder, address, allow)
    write(folder.roster, b"", _PRIVATE)  # the last: without it, it is no fleet
    with told(path):
        force_folder(path)
    return folder


def write_device_file(folder: FleetFolder, address: Address, allow: Sequence[str]) -> None:
    """Write the file `fleet.toml` of devices, as one that this version of Anyfleet has made."""
    text = DeviceFile(address, anyfleet.__version__, tuple(allow)).to_toml()
    write(folder.device / "fleet.toml", text.encode("utf-8"))


def renew_certificate(folder: FleetFolder, *, days: int = SERVER_DAYS) -> None:
    """Replace the server's certificate and key; devices go on, as the authority stays the same."""
    authority = Credentials(folder.authority.read_bytes(), folder.authority_key.read_bytes())
    host = folder.device_file().address.host
    _write_server(folder, make_server(authority, (host,), days=days))


def _write_server(folder: FleetFolder, server: Credentials) -> None:
    write(folder.key, server.key, _PRIVATE)
    write(folder.certificate, server.certificate)
