"""How a command is stopped: SIGTERM ends it as Ctrl-C does, with everything kept."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

INTERRUPTED, TERMINATED = 130, 143  # what shells report for Ctrl-C and for SIGTERM


class Terminated(KeyboardInterrupt):
    """The process was asked to end (SIGTERM), by a scheduler or by `kill`."""


def exit_code(stop: KeyboardInterrupt) -> int:
    """Return what a shell expects of a command that was stopped like this."""
    return TERMINATED if isinstance(stop, Terminated) else INTERRUPTED


@contextmanager
def terminable() -> Iterator[None]:
    """Raise `Terminated` at SIGTERM while the block runs; only the main thread ever gets it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: _stop())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _stop() -> NoReturn:
    raise Terminated
