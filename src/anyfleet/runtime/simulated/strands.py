"""Strands: functions in threads of their own that take turns, one at a time.

A strand runs while its owner waits for it, and waits while its owner runs. So nothing happens at
the same time, and what happens when depends on nothing but the code. Threads serve for this alone:
a strand can stop in the middle of calls that know nothing of it.
"""

from collections.abc import Callable
from contextvars import copy_context
from queue import SimpleQueue
from threading import Thread
from typing import Generic, NamedTuple, NoReturn, TypeVar

import torch

Out = TypeVar("Out")  # what a strand hands to its owner
Back = TypeVar("Back")  # what it gets for that
Result = TypeVar("Result")
_LOOK = 0.02  # seconds between two looks whether a strand that shall end has ended


class Closed(BaseException):
    """The end of a strand whose owner does not want the rest."""


class _Handed(NamedTuple, Generic[Out]):
    """What a strand handed to its owner before it stopped to wait."""

    value: Out


class Strand(Generic[Out, Back, Result]):
    """A function that runs until it hands something to its owner, and waits for an answer.

    The function is called with `hand`, which hands over a value and returns the answer. Settings of
    torch that a thread does not inherit are those of the thread that made the strand: the number of
    threads, and the stream of an accelerator.
    """

    def __init__(self, function: Callable[[Callable[[Out], Back]], Result]) -> None:
        self._function = function
        self._answers: SimpleQueue[Callable[[], Back]] = SimpleQueue()
        self._news: SimpleQueue[_Handed[Out] | BaseException | None] = SimpleQueue()
        self._threads = torch.get_num_threads()
        accelerated = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._stream = torch.cuda.current_stream() if accelerated else None
        self._thread = Thread(target=copy_context().run, args=(self._run,), daemon=True)
        self.ended = False  # the function returned or raised, or was closed
        self.result: Result | None = None  # what it returned

    def resume(self, answer: Callable[[], Back]) -> Out | None:
        """Return what the function hands over next; None if it has ended.

        `answer` is called in the strand: what it returns is the answer to what was handed over
        before, and what it raises is raised there. What the function raises is raised here.
        """
        assert not self.ended
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._answers.put(answer)
        news = self._news.get()
        if not isinstance(news, _Handed):
            self.ended = True
            self._thread.join()
        if isinstance(news, BaseException):
            raise news
        return None if news is None else news.value

    def close(self) -> None:
        """Let the function end where it waits; if it runs, when it next hands something over.

        Whoever waited for it may have been interrupted anywhere: what it had handed over then does
        not matter.
        """
        while self._thread.ident is not None and self._thread.is_alive():
            if self._answers.empty():
                self._answers.put(_close)
            self._thread.join(_LOOK)
        self.ended = True

    def _hand(self, value: Out) -> Back:
        self._news.put(_Handed(value))
        return self._answers.get()()

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        try:
            if self._stream is None:
                self.result = self._function(self._hand)
            else:
                with torch.cuda.stream(self._stream):
                    self.result = self._function(self._hand)
        except BaseException as error:  # noqa: BLE001 - it is the owner's
            self._news.put(error)
        else:
            self._news.put(None)


def _close() -> NoReturn:
    raise Closed
