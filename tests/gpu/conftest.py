"""Checks that need a CUDA device: `make gpu` runs them, and all are skipped without one."""

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what lies in this folder, so that a new check cannot forget to say so."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.skip(reason="not run: no CUDA device"))
