"""The line under an error of a run: what raised it, in which round, and how to go on.

An error in a user's part, data set, loss or metric keeps its type and its traceback. On its way out
every layer adds what it knows to one note (PEP 678): the call site which part it was, the loop the
round, and whoever keeps the run how to go on with it.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType

from anyfleet.errors import BadReturn

__all__ = [
    "BUILDING",
    "during",
    "in_known_code",
    "note",
    "ordinal",
    "quoted",
    "raised_inside",
    "remedied",
]

BUILDING = "while the task was built"  # a time before the first round

_KNOWN = ("anyfleet", "numpy", "torch", "safetensors", "constriction")

_MOST = 120  # characters of a part that a note or an error quotes


@dataclass(frozen=True)
class _Known:
    """What is known of an error so far."""

    what: str = ""
    when: str = ""
    remedy: str = ""

    def line(self, error: BaseException) -> str:
        """Return the note; what the error says itself is not said again."""
        what = "" if isinstance(error, BadReturn) else self.what
        when = "" if isinstance(error, BadReturn) and f" {self.when}" in str(error) else self.when
        raised = " ".join(filter(None, (what, when)))
        return " ".join(filter(None, (f"Raised {raised}." if raised else "", self.remedy)))


class _Note(str):
    """A note that layers further out can complete."""

    known: _Known


class during:  # noqa: N801 - reads as a word: with during("select", part): ...
    """A block whose errors say what raised them; only what no block further in has said counts.

    `slot` and `part` name a part of a method or of a task, `what` anything else. `round_index`
    counts from 0 as everywhere in the code, and notes count from 1 as progress does; `when` is a
    time outside of all rounds. There is no frame of this in a traceback.
    """

    def __init__(
        self,
        slot: str = "",
        part: object = None,
        *,
        what: str = "",
        when: str = "",
        round_index: int | None = None,
    ) -> None:
        self._slot, self._part, self._what = slot, part, what
        self._when, self._round = when, round_index

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is None or not isinstance(error, Exception):
            return  # Ctrl-C and the end of a generator are nobody's fault
        what = self._what or (f"{self._slot}={quoted(self._part)}" if self._slot else "")
        when = self._when if self._round is None else f"in round {ordinal(self._round)}"
        known = _known(error)
        what = known.what or (f"by {what}" if what else "")
        _tell(error, replace(known, what=what, when=known.when or when))


def remedied(error: BaseException, remedy: str) -> None:
    """Write how to go on under an error of a run; the outermost caller has the last word."""
    if any(isinstance(each, _Note) for each in _notes(error)):
        _tell(error, replace(_known(error), remedy=remedy))


def note(error: BaseException) -> str:
    """Return the line that an error of a run has under it, or "" if it is none of a run."""
    return next((each for each in _notes(error) if isinstance(each, _Note)), "")


def raised_inside(error: BaseException) -> bool:
    """Return whether an error came out of a part, a data set, a loss or a metric."""
    return bool(_known(error).what)


def in_known_code(error: BaseException) -> bool:
    """Return whether only Anyfleet and the libraries it is built on were at work when it rose."""
    frame = error.__traceback__
    while frame is not None:
        root = str(frame.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
        # What torch generates has no name.
        if root and root not in _KNOWN and root not in sys.stdlib_module_names:
            return False
        frame = frame.tb_next
    return True


def ordinal(round_index: int) -> int:
    """Return the number of a round as people count: the first is 1."""
    return round_index + 1


def quoted(thing: object) -> str:
    """Return the text of a part, cut to a readable length; a function is its name."""
    name = getattr(thing, "__name__", None)
    if isinstance(name, str):
        return name
    try:
        text = repr(thing)
    except Exception:  # noqa: BLE001 - a user's class may fail in any way, and this is an error path
        text = f"<{type(thing).__name__}>"
    return text if len(text) <= _MOST else f"{text[: _MOST - 1]}…"


def _notes(error: BaseException) -> Sequence[str]:
    found = getattr(error, "__notes__", ())
    return found if isinstance(found, list) else ()


def _known(error: BaseException) -> _Known:
    return next((each.known for each in _notes(error) if isinstance(each, _Note)), _Known())


def _tell(error: BaseException, known: _Known) -> None:
    told = _Note(known.line(error))
    told.known = known
    others = [each for each in _notes(error) if not isinstance(each, _Note)]
    error.__notes__ = [*others, told]
