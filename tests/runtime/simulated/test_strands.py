"""Strands: turns, answers, errors in both directions, and their end."""

import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

import pytest

from anyfleet.runtime.simulated.strands import Closed, Strand

Hand = Callable[[int], int]


def doubled(log: list[str], hand: Hand) -> str:
    """Hand over 1, then twice what comes back, until that is 0."""
    value = 1
    try:
        while value:
            log.append(f"hands {value}")
            value = 2 * hand(value)
    finally:
        log.append("ends")
    return "done"


def refuse() -> int:
    raise LookupError("nothing for you")


def test_a_strand_and_its_owner_take_turns() -> None:
    log: list[str] = []
    strand: Strand[int, int, str] = Strand(partial(doubled, log))
    assert log == []
    for answer, expected in ((0, 1), (3, 6), (5, 10)):
        assert strand.resume(lambda answer=answer: answer) == expected  # type: ignore[misc]
        log.append("owner")
    assert strand.resume(lambda: 0) is None
    assert log == ["hands 1", "owner", "hands 6", "owner", "hands 10", "owner", "ends"]
    assert strand.ended
    assert strand.result == "done"


def test_an_answer_that_raises_raises_in_the_strand_and_then_here() -> None:
    log: list[str] = []
    strand: Strand[int, int, str] = Strand(partial(doubled, log))
    strand.resume(lambda: 0)
    with pytest.raises(LookupError, match="nothing for you"):
        strand.resume(refuse)
    assert log == ["hands 1", "ends"]
    assert strand.ended
    strand.close()


def test_closing_ends_a_strand_where_it_waits() -> None:
    log: list[str] = []
    strand: Strand[int, int, str] = Strand(partial(doubled, log))
    strand.resume(lambda: 0)
    strand.close()
    assert log == ["hands 1", "ends"]
    assert strand.ended
    assert strand.result is None
    strand.close()


def test_one_that_has_not_begun_never_does() -> None:
    log: list[str] = []
    strand: Strand[int, int, str] = Strand(partial(doubled, log))
    strand.close()
    assert strand.ended
    assert log == []


def test_closing_holds_against_a_function_that_goes_on() -> None:
    def stubborn(hand: Hand) -> None:
        for value in range(3):
            try:
                hand(value)
            except Closed:
                refused.append(value)

    refused: list[int] = []
    strand: Strand[int, int, None] = Strand(stubborn)
    strand.resume(lambda: 0)
    strand.close()
    assert refused == [0, 1, 2]


class Interrupting(SimpleQueue[Any]):
    """A queue whose reader is interrupted, before it has what comes or right after."""

    late = False

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if self.late:
            super().get(block, timeout)
        raise KeyboardInterrupt


@pytest.mark.parametrize("late", [False, True], ids=["while it waits", "when it has what came"])
def test_closing_waits_for_a_strand_whose_owner_was_interrupted(late: bool) -> None:
    go = threading.Event()

    def slow(hand: Hand) -> None:
        go.wait(0 if late else 10)
        hand(1)

    strand: Strand[int, int, None] = Strand(slow)
    news = Interrupting()
    news.late = late
    strand._news = news
    with pytest.raises(KeyboardInterrupt):
        strand.resume(lambda: 0)
    assert not strand.ended
    go.set()
    strand.close()
    assert strand.ended
    assert not strand._thread.is_alive()
