"""Stopping a command: SIGTERM ends it as Ctrl-C does, and everything so far is kept."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

INTERRUPTED, TERMINATED = 130, 143  # what shells report for Ctrl-C and for SIGTERM


class Terminated(KeyboardInterrupt):
    """An interruption by SIGTERM, from a scheduler or from `kill`."""


def exit_code(stop: KeyboardInterrupt) -> int:
    """Return the exit code that a shell expects of a command that was stopped like this."""
    return TERMINATED if isinstance(stop, Terminated) else INTERRUPTED


@contextmanager
def terminable() -> Iterator[None]:
    """Raise Terminated at SIGTERM while the block runs; only the main thread gets it."""
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
