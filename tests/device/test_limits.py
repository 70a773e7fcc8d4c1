"""What a device lends: the limits hold in a process that has set them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from anyfleet.device.limits import Loan, private_bytes
from anyfleet.errors import Refusal

CHILD = """
import os, torch
from anyfleet.device.limits import Loan, apply
print(apply(Loan(threads=2, memory=300 << 20, niceness=5)))
print(torch.get_num_threads(), os.getpriority(os.PRIO_PROCESS, 0))
kept = torch.ones(100 << 20, dtype=torch.uint8)
try:
    torch.ones(400 << 20, dtype=torch.uint8)
    print("too much was given")
except RuntimeError:
    print("refused")
print(int(torch.ones(50 << 20, dtype=torch.uint8)[0]))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the system cannot enforce it")
def test_threads_niceness_and_memory_are_limited() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHILD], capture_output=True, text=True, check=False
    )
    nice = max(5, os.getpriority(os.PRIO_PROCESS, 0))
    assert done.stdout.split() == ["2", str(nice), "refused", "1"], done.stderr


def test_a_loan_that_makes_no_sense_is_refused_with_all_that_is_wrong() -> None:
    with pytest.raises(Refusal) as caught:
        Loan(threads=0, memory=0, niceness=20)
    assert len(caught.value.problems) == 3


def test_a_system_that_tells_nothing_is_no_error(tmp_path: Path) -> None:
    assert private_bytes(tmp_path / "none") is None
    (tmp_path / "status").write_text("VmPeak: 9 kB\nVmData:\t 12 kB\n")
    assert private_bytes(tmp_path / "status") == 12 << 10
