"""Stopping: Ctrl-C and SIGTERM end what is played, after its current round at the latest.

Python may lose an exception that a handler of signals raises, inside of the lookup of an attribute
for one. Whoever plays rounds therefore asks after each of them whether it was told to stop.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED, TERMINATED = 130, 143  # what shells report for Ctrl-C and for SIGTERM
STOPPING = (signal.SIGINT, signal.SIGTERM)


class Terminated(KeyboardInterrupt):
    """An interruption by SIGTERM, from a scheduler or from `kill`."""


def exit_code(stop: KeyboardInterrupt) -> int:
    """Return the exit code that a shell expects of a command that was stopped like this."""
    return TERMINATED if isinstance(stop, Terminated) else INTERRUPTED


class Stop:
    """A handler of signals that raises an exception, and remembers that it did.

    With `once` it raises only the first time: what closes a run is then not interrupted again.
    """

    def __init__(self, kind: type[KeyboardInterrupt], *, once: bool = False) -> None:
        self.kind = kind
        self.heard = False
        self._once = once

    def __call__(self, _number: int, _frame: FrameType | None) -> None:
        if self.heard and self._once:
            return
        self.heard = True
        raise self.kind


@contextmanager
def terminable() -> Iterator[None]:
    """Raise KeyboardInterrupt at Ctrl-C and Terminated at SIGTERM while the block runs.

    Only the main thread gets them. Ctrl-C stays as it is where somebody has changed what it does,
    and ignored in a process that a shell has put into the background.
    """
    if not _is_main_thread():
        yield
        return
    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, Stop(Terminated))}
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        before[signal.SIGINT] = signal.signal(signal.SIGINT, Stop(KeyboardInterrupt))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stop_if_told() -> None:
    """Raise what a `Stop` has raised before: whoever asks goes on, so that it was lost."""
    if not _is_main_thread():
        return
    for number in STOPPING:
        handler = signal.getsignal(number)
        if isinstance(handler, Stop) and handler.heard:
            raise handler.kind


@contextmanager
def undisturbed() -> Iterator[None]:
    """Hold back Ctrl-C and SIGTERM until the block ends; only the main thread gets them."""
    if not _is_main_thread():
        yield
        return
    caught: list[int] = []
    # One that is ignored stays so: held back, it would hide another that comes after it.
    numbers = [each for each in STOPPING if signal.getsignal(each) is not signal.SIG_IGN]
    before = {each: signal.signal(each, lambda *event: caught.append(event[0])) for each in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if caught:
        signal.raise_signal(caught[0])


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
