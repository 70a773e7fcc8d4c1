"""What a device lends to a fleet: threads, memory, and how far other programs come first."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from anyfleet.errors import refuse

GENTLEST = 19  # the highest niceness


@dataclass(frozen=True)
class Loan:
    """What a device lends: threads of torch, bytes of memory, and its niceness.

    `memory` are the bytes that orders may take beside the program and the data; None: what is free.
    """

    threads: int = 1
    memory: int | None = None
    niceness: int = 0

    def __post_init__(self) -> None:
        refuse(
            (
                f"--threads must be at least 1, got {self.threads}." * (self.threads < 1),
                f"--memory must be at least 1, got {self.memory}."
                * (self.memory is not None and self.memory < 1),
                f"--nice must be in 0 … {GENTLEST}, got {self.niceness}."
                * (not 0 <= self.niceness <= GENTLEST),
            )
        )


def apply(loan: Loan) -> str:
    """Set the limits of this process; return what cannot be enforced here, or "".

    To be called when the data are loaded: from then on, whatever would take more than
    `loan.memory` bytes raises an error instead of filling the machine.
    """
    torch.set_num_threads(loan.threads)
    if loan.niceness and sys.platform != "win32":
        os.setpriority(os.PRIO_PROCESS, 0, max(loan.niceness, os.getpriority(os.PRIO_PROCESS, 0)))
    if loan.memory is None:
        return ""
    private = private_bytes()
    if private is None:
        return "--memory is told to the server but cannot be enforced on this system"
    import resource

    # RLIMIT_AS would count libraries and addresses that are reserved and never used; this counts
    # private memory that can be written.
    most = resource.getrlimit(resource.RLIMIT_DATA)[1]
    wanted = private + loan.memory
    least = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
    resource.setrlimit(resource.RLIMIT_DATA, (least, most))
    return ""


def private_bytes(status: Path = Path("/proc/self/status")) -> int | None:
    """Return the bytes of this process's private memory; None where the system does not say."""
    try:
        lines = status.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = (line.split()[1] for line in lines if line.startswith("VmData:"))
    return next((int(kilobytes) << 10 for kilobytes in found), None)
