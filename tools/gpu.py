"""Run every check that needs a CUDA device, and say on which commit and machine.

    python -m tools.gpu [--vendor DIR ...] [arguments of pytest]

The checks are in tests/gpu: graph = eager, stacked = sequential, resuming. Without a CUDA device
nothing is run, which is said and is no failure. `--vendor` names folders of unpacked packages, for
machines that cannot install any. `make gpu > checks.txt` keeps what `benchmarks.page --checks`
puts on the page of performance.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from benchmarks.measuring import Options, commit, machine

ROOT = Path(__file__).resolve().parents[1]
NOT_RUN = "not run: no CUDA device"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print commit and machine, then run the checks; return pytest's exit code, or 0."""
    read = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    read.add_argument("--vendor", action="append", default=[], help="a folder of packages")
    given, rest = read.parse_known_args(arguments)
    sys.path += given.vendor  # at the end: what is installed comes first
    found = torch.cuda.is_available()
    where = machine(Options(device="cuda" if found else "cpu"))
    versions = f"torch {torch.__version__}, Python {sys.version.split()[0]}"
    sys.stdout.write(f"make gpu: commit {commit()}; {where}; {versions}\n")
    sys.stdout.flush()
    if not found:
        sys.stdout.write(f"{NOT_RUN}\n")
        return 0
    import pytest

    # Compiling in processes of its own, torch would keep those of pytest from ending.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    # What fails is told briefly; on a machine of few minutes all the others shall run too.
    return int(pytest.main([str(ROOT / "tests" / "gpu"), "-q", "-p", "no:cacheprovider", *rest]))


if __name__ == "__main__":
    sys.exit(main())
