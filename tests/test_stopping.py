"""Stopping: Ctrl-C and SIGTERM, held back, remembered, and never lost."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from anyfleet.stopping import (
    INTERRUPTED,
    TERMINATED,
    Stop,
    Terminated,
    exit_code,
    stop_if_told,
    terminable,
    undisturbed,
)

BOTH = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """The handlers of the process that tests run in."""
    before = {each: signal.getsignal(each) for each in BOTH}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def raise_both() -> None:
    for number in BOTH:
        signal.raise_signal(number)


def in_thread(function: Callable[[], None]) -> None:
    """Call a function in a thread of its own, and raise what it raises."""
    raised: list[BaseException] = []

    def called() -> None:
        try:
            function()
        except (KeyboardInterrupt, AssertionError) as error:
            raised.append(error)

    thread = threading.Thread(target=called)
    thread.start()
    thread.join()
    for error in raised:
        raise error


@pytest.mark.parametrize(
    ("number", "kind", "code"),
    [(signal.SIGINT, KeyboardInterrupt, INTERRUPTED), (signal.SIGTERM, Terminated, TERMINATED)],
)
def test_each_signal_has_its_exception_and_its_exit_code(
    number: signal.Signals, kind: type[KeyboardInterrupt], code: int
) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt) as stopped, terminable():
        signal.raise_signal(number)
    assert type(stopped.value) is kind
    assert exit_code(stopped.value) == code
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("number", BOTH)
def test_what_was_lost_is_raised_again(number: signal.Signals) -> None:
    with terminable():
        stop_if_told()  # nobody has told it yet
        with suppress(KeyboardInterrupt):
            signal.raise_signal(number)
        in_thread(stop_if_told)  # whoever plays in another thread is not the one that was told
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                stop_if_told()
    stop_if_told()  # what the block was told is over with it


def test_another_thread_leaves_signals_alone() -> None:
    before = [signal.getsignal(each) for each in BOTH]

    def both_blocks() -> None:
        with terminable(), undisturbed():
            assert [signal.getsignal(each) for each in BOTH] == before

    in_thread(both_blocks)


@pytest.mark.parametrize("own", [signal.SIG_IGN, lambda *_: None], ids=["ignored", "own"])
def test_ctrl_c_that_somebody_has_changed_stays_so(own: Callable[..., None]) -> None:
    signal.signal(signal.SIGINT, own)
    with terminable():
        signal.raise_signal(signal.SIGINT)
        stop_if_told()


def test_what_is_told_once_closes_in_peace() -> None:
    signal.signal(signal.SIGTERM, Stop(Terminated, once=True))
    with pytest.raises(Terminated):
        signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(Terminated):  # but it stays told
        stop_if_told()


def test_a_signal_that_is_ignored_hides_no_other() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt), undisturbed():
        raise_both()
