"""Importing the work of a command: torch and what lies on it, about a million objects."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Import without looking for garbage meanwhile, which takes a sixth of the time.

    What was imported stays, so that later searches for garbage pass it over, too.
    """
    active = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if active:
            gc.enable()
