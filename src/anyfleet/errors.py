"""All errors that Anyfleet raises on purpose.

AnyfleetError
├── BadMessage          bytes from a device or a server that cannot be read
├── BadName             a `use` that is malformed, not allowed, or not there (also a ValueError)
├── BadReturn           a part returned what its slot does not allow (also a ValueError)
├── ConfigError         a run file or an override is wrong; holds all problems at once
├── LinkError           the link between a server and its devices does not work as it should
│   ├── LinkDown            the other side cannot be reached; try again later
│   │   └── LinkBusy           it answers, but cannot do what it is asked for now
│   ├── NotEnrolled         the server does not know this device's key, or has revoked it
│   └── RunGone             the run that a message belongs to has ended
├── MissingData         a data set is not on this machine; says where to get it
├── Refusal             values that a part cannot take, all at once (also a ValueError)
│   ├── BadCall             a call with unknown names or unfit values (also a TypeError)
│   └── CompositionError    parts that do not fit together
├── StoreError          a run folder that cannot be written, read or resumed
├── TraceError          a network that cannot be traced; says what, where and what to do
├── SliceError          a slice that does not fit its blueprint
├── ProgramError        a program that asks for what it may not have
└── VerifyError         a traced network that does not compute what its module does

AnyfleetWarning         what can be run but is hardly meant; the command line prints it as a note
└── ExcessWarning           a selection asks for more devices than the fleet of a run file has

A part refuses an impossible value with a plain `ValueError`, several with a `Refusal`; read from a
run file each complaint becomes a `Problem` of a `ConfigError`, with its path.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = [
    "AnyfleetError",
    "AnyfleetWarning",
    "BadCall",
    "BadMessage",
    "BadName",
    "BadReturn",
    "CompositionError",
    "ConfigError",
    "ExcessWarning",
    "LinkBusy",
    "LinkDown",
    "LinkError",
    "MissingData",
    "NotEnrolled",
    "Problem",
    "ProgramError",
    "Refusal",
    "RunGone",
    "SliceError",
    "StoreError",
    "TraceError",
    "VerifyError",
    "refuse",
]


class AnyfleetError(Exception):
    """Base of all errors that Anyfleet raises on purpose."""


class AnyfleetWarning(UserWarning):
    """Something that can be run but is hardly meant; says what happens and how to ask for more."""


class ExcessWarning(AnyfleetWarning):
    """A selection asks for more devices than the fleet of the run file has."""


class BadMessage(AnyfleetError, ValueError):
    """Something from a device or a server that cannot be used; the text says what and why.

    `reason` is one of a few words, the same for all of a kind (docs/wire.md lists them).
    """

    def __init__(self, message: str, reason: str = "content") -> None:
        super().__init__(message)
        self.reason = reason


class BadName(AnyfleetError, ValueError):
    """A `use` that is malformed, outside the allowed packages, or not there."""


class BadReturn(AnyfleetError, ValueError):
    """A part returned what its slot does not allow; says which part, the round, and what is due."""


class Refusal(AnyfleetError, ValueError):
    """Values that cannot be used; each argument is one complaint, and names `Part.field`."""

    @property
    def problems(self) -> tuple[str, ...]:
        """The complaints, one text each."""
        return tuple(str(problem) for problem in self.args)

    def __str__(self) -> str:
        return "\n".join(self.problems)


class BadCall(Refusal, TypeError):
    """A call from Python with names or values that do not fit; each argument is one complaint."""


class CompositionError(Refusal):
    """Parts that do not fit together; each argument is one complaint."""


def refuse(complaints: Iterable[str]) -> None:
    """Raise Refusal with all complaints, unless there are none; empty texts do not count."""
    found = [complaint for complaint in complaints if complaint]
    if found:
        raise Refusal(*found)


class StoreError(AnyfleetError):
    """A run folder that cannot be written, read or resumed; says what, where and what to do."""


class LinkError(AnyfleetError):
    """The link between a server and its devices does not work as it should."""


class LinkDown(LinkError):
    """The other side of the link cannot be reached; the same call may work later."""


class LinkBusy(LinkDown):
    """The other side of the link answers, but cannot do what it is asked for now."""


class NotEnrolled(LinkError):
    """The server does not know this device's key, or has revoked it."""


class RunGone(LinkError):
    """The run that a message belongs to has ended; nobody waits for it any longer."""


class MissingData(AnyfleetError):
    """A data set is not on this machine; the message says where to get it."""


@dataclass(frozen=True, order=True)
class Problem:
    """One thing that is wrong in a run file: where (`method.select.count`) and what."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message

    def within(self, where: object) -> Problem:
        """Return the problem as one of a file or an experiment, which is named first."""
        return Problem(f"{where}: {self.path}" if self.path else f"{where}", self.message)


class ConfigError(AnyfleetError):
    """A run file or an override is wrong; `problems` holds everything that was found."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class TraceError(AnyfleetError, ValueError):
    """The module cannot be traced."""


class SliceError(AnyfleetError, ValueError):
    """A slice does not fit its blueprint."""


class ProgramError(AnyfleetError, ValueError):
    """A program asks for an operator or a value that it may not have."""


class VerifyError(AnyfleetError, ValueError):
    """The numeric self-check of a blueprint failed."""
