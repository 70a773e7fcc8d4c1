"""Settings that every test shares."""

import gc
import os
import signal
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

# Whatever the settings of whoever runs the tests allow, nothing is allowed here.
os.environ["ANYFLEET_SETTINGS"] = ""
# A cache of their own, so that equal networks are traced once; the test processes share it.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _CACHE = tempfile.TemporaryDirectory(prefix="anyfleet-tests-")
    os.environ["ANYFLEET_CACHE"] = _CACHE.name
    # No folder can be here: what one test measured chooses no engine of another.
    Path(_CACHE.name, "engines").touch()
# Nor does the width of their terminal change the tables that tests read.
os.environ.pop("COLUMNS", None)

# A shell lets commands in the background ignore Ctrl-C, which tests send to those they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# One thread: sums keep their order, and the test processes do not fight for cores.
torch.set_num_threads(1)

# Derandomised, so that a red test stays red; no deadline, since machines differ.
settings.register_profile(
    "anyfleet", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("anyfleet")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Spare what is imported and collected the search for garbage: it stays to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
