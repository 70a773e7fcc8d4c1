"""Importing the work of a command: torch and what lies on it, about a million objects."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from anyfleet.errors import AnyfleetError

# What only real fleets need: the extra `fleet`, and what comes with it.
_OF_FLEETS = {
    "cryptography",
    "flwr",
    "httpx",
    "prometheus_client",
    "psutil",
    "starlette",
    "uvicorn",
}


@contextmanager
def importing() -> Iterator[None]:
    """Import without looking for garbage meanwhile, which takes a sixth of the time.

    What was imported stays, so that later searches for garbage pass it over, too. Raise
    AnyfleetError if what real fleets need is not installed.
    """
    active = gc.isenabled()
    gc.disable()
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _OF_FLEETS:
            raise
        told = f"Real fleets need the package {error.name}. Run: pip install 'anyfleet[fleet]'"
        raise AnyfleetError(told) from error
    finally:
        gc.freeze()
        if active:
            gc.enable()
