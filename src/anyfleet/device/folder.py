"""The folder of a device: its copy of what the server hands out, and what it adds.

    ca.crt fleet.toml bundle/   from the server
    device.key device.pub       made here; only the public half leaves the device
    state/                      what the device keeps between orders (`memory`)
    link/                       what it keeps of its link
    profile.json                how fast this machine is, measured once

Whoever has `device.key` is the device: it stays in this folder, and nobody else may read it.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path

import anyfleet
from anyfleet.errors import ConfigError, Problem

_COPY = "Copy the folder device/ of the fleet from the server."


@dataclass(frozen=True)
class Membership:
    """What fleet.toml says: where the fleet's server is, and what its orders may name."""

    address: str
    version: str  # of the Anyfleet that wrote it
    allow: tuple[str, ...]  # packages whose parts orders of this fleet name


@dataclass(frozen=True)
class DeviceFolder:
    """The paths of a device's folder."""

    path: Path

    @property
    def key(self) -> Path:
        """The private key of the device."""
        return self.path / "device.key"

    @property
    def bundle(self) -> Path:
        """The model of the fleet."""
        return self.path / "bundle"

    @property
    def state(self) -> Path:
        """What the device keeps between orders."""
        return self.path / "state"

    @property
    def link(self) -> Path:
        """What the device keeps of its link."""
        return self.path / "link"

    @property
    def profile(self) -> Path:
        """How fast this machine is."""
        return self.path / "profile.json"

    def authority(self) -> bytes:
        """Return the certificate that the server's is checked with."""
        file = self.path / "ca.crt"
        try:
            return file.read_bytes()
        except OSError as error:
            raise _unreadable(file, str(error.strerror)) from error

    def membership(self) -> Membership:
        """Return what fleet.toml says; raise ConfigError if it cannot be read."""
        file = self.path / "fleet.toml"
        try:
            said = tomllib.loads(file.read_text(encoding="utf-8"))
            address, version, allow = said["address"], said["anyfleet"], said.get("allow", [])
        except OSError as error:
            raise _unreadable(file, str(error.strerror)) from error
        except KeyError as error:
            raise _unreadable(file, f"it has no {error}") from error
        except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise _unreadable(file, str(error)) from error
        if not isinstance(allow, list) or not all(isinstance(each, str) for each in allow):
            raise _unreadable(file, "allow is not a list of names")
        return Membership(str(address), str(version), tuple(allow))


def require_allowed(asked: tuple[str, ...], allow: tuple[str, ...]) -> None:
    """Raise ConfigError unless the owner allows all packages whose parts the fleet names."""
    problems = [
        Problem(
            "fleet.toml",
            f"orders of this fleet name parts of {name!r}, whose code would run with your rights: "
            f"if you trust it, use --allow {name}.",
        )
        for name in asked
        if name not in allow
    ]
    if problems:
        raise ConfigError(problems)


def other_version(membership: Membership) -> str:
    """Return what is wrong if the server has another version of Anyfleet, or ""."""
    if membership.version == anyfleet.__version__:
        return ""
    return (
        f"the folder was made by anyfleet {membership.version}, and this device has anyfleet "
        f"{anyfleet.__version__}: the server will refuse it unless both are the same."
    )


def _unreadable(file: Path, why: str) -> ConfigError:
    return ConfigError([Problem(str(file), f"cannot be read: {why}. {_COPY}")])
