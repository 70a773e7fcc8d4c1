"""Processes that are really killed, at random moments; `tools.kill` does it and compares."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(sys.platform == "win32", reason="forks")
def test_runs_that_were_killed_equal_those_that_were_not() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.kill", "12", "--seed", "3"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    told = done.stdout + done.stderr
    assert done.returncode == 0, told
    count = re.search(r"^(\d+) kills: every file has the same bytes", told, re.MULTILINE)
    assert count, told
    assert int(count[1]) >= 12
    rows = [re.split(r"  +", line.strip()) for line in done.stdout.splitlines()]
    table = {name: cells for name, *cells in rows}
    assert set(table["killed while"]) >= {"synchronous", "deadline", "asynchronous"}
    assert set(table["differs"]) == {"nothing"}
    assert all(int(cell) for cell in table["kills"])
    # File operations are counted, not timed: with this seed some of them fall there.
    assert any(int(cell) for cell in table["writing a checkpoint"])
