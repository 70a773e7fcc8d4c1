"""The status of a fleet that is served: a file that is written every second, and read by people."""

import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from anyfleet.errors import StoreError
from anyfleet.runtime.flower.fleet import FleetStatus
from anyfleet.store.disk import write

STATUS = "status.json"
STALE = 10.0  # seconds after which a status that is not written any more is an old one


class DeviceRow(msgspec.Struct, frozen=True):
    """One device of a status."""

    number: int
    name: str
    state: str
    since: float
    samples: int
    why: str = ""


class Status(msgspec.Struct, frozen=True):
    """What a server tells of its fleet and its run."""

    written: float  # seconds since 1970
    process: int
    run: str  # its folder
    doing: str  # in a few words
    rounds: int  # of the run
    now: float  # seconds since the start of the run
    round_index: int
    under_way: int
    replies: int
    failures: dict[str, int]
    sent_again: dict[str, int]
    bytes_down: float
    bytes_up: float
    seconds: dict[str, float]
    devices: tuple[DeviceRow, ...]
    gate: dict[str, int] = {}
    restarts: int = 0  # of the SuperLink

    @property
    def age(self) -> float:
        """The seconds since it was written."""
        return time.time() - self.written

    def counted(self) -> dict[str, int]:
        """Return how many devices are in each state."""
        states = [each.state for each in self.devices]
        return {state: states.count(state) for state in dict.fromkeys(states)}


def status_of(
    fleet: FleetStatus,
    *,
    run: Path,
    doing: str,
    rounds: int,
    gate: dict[str, int],
    restarts: int,
) -> Status:
    """Return the status of a fleet and of its run."""
    told: dict[str, Any] = asdict(fleet)
    rows = tuple(DeviceRow(**each) for each in told.pop("devices"))
    return Status(
        written=time.time(),
        process=os.getpid(),
        run=str(run),
        doing=doing,
        rounds=rounds,
        devices=rows,
        gate=gate,
        restarts=restarts,
        **told,
    )


def write_status(folder: Path, status: Status) -> None:
    """Write a status into the folder of its fleet, as a whole."""
    write(folder / STATUS, msgspec.json.encode(status))


def read_status(folder: Path) -> Status:
    """Return the last status of a fleet; raise StoreError if there is none."""
    file = folder / STATUS
    try:
        return msgspec.json.decode(file.read_bytes(), type=Status)
    except FileNotFoundError as error:
        raise StoreError(
            f"{file} does not exist: the fleet was never served. Serve it: anyfleet fleet serve "
            f"{folder} RUN.toml"
        ) from error
    except (OSError, msgspec.MsgspecError) as error:
        raise StoreError(f"{file} cannot be read: {error}.") from error
