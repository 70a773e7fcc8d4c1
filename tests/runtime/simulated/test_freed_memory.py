"""Freed memory stays with the process: pages are asked for once, not in every local step."""

import os
import platform
import subprocess
import sys

import pytest

STEPS = """
import resource
import torch
from anyfleet.runtime.simulated.freed_memory import keep_freed_memory

keep_freed_memory()
keep_freed_memory()
torch.set_num_threads(1)
def step():
    held = [torch.ones(6_000_000) for _ in range(4)]
    return float(held[0][0])
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(**environment: str) -> int:
    """Return how many pages ten steps ask for that free what they make."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", STEPS],
        env=kept | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_pages_are_kept_unless_the_user_decides() -> None:
    ours, theirs = faults(), faults(MALLOC_TRIM_THRESHOLD_="131072")
    assert theirs > 100_000  # some 23,000 in every step
    assert ours < theirs / 10
