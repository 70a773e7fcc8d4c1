"""Everything Anyfleet raises on purpose.

AnyfleetError
├── BadMessage          bytes from a device or a server that cannot be read
├── BadName             a `use` that is malformed, not allowed, or not there (also a ValueError)
├── CompositionError    parts that do not fit together (also a ValueError)
├── ConfigError         a run file or an override is wrong; holds all problems at once
├── MissingData         a data set is not on this machine; says where to get it
└── TraceError          a model that cannot be traced (in `anyfleet.elastic`)

A part refuses an impossible value with a plain `ValueError`; read from a run file it becomes one
`Problem` of a `ConfigError`, with its path.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = [
    "AnyfleetError",
    "BadMessage",
    "BadName",
    "CompositionError",
    "ConfigError",
    "MissingData",
    "Problem",
]


class AnyfleetError(Exception):
    """Base of all errors that Anyfleet raises on purpose."""


class BadMessage(AnyfleetError, ValueError):
    """Bytes from a device or a server that cannot be read; the message says which and why."""


class BadName(AnyfleetError, ValueError):
    """A `use` that is malformed, outside the allowed packages, or not there."""


class CompositionError(AnyfleetError, ValueError):
    """Parts that do not fit together; each argument is one complaint."""

    @property
    def problems(self) -> tuple[str, ...]:
        """The complaints, one text each."""
        return tuple(str(problem) for problem in self.args)

    def __str__(self) -> str:
        return "\n".join(self.problems)


class MissingData(AnyfleetError):
    """A data set is not on this machine; the message says where to get it."""


@dataclass(frozen=True, order=True)
class Problem:
    """One thing that is wrong in a run file: where (`method.select.count`) and what."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class ConfigError(AnyfleetError):
    """A run file or an override is wrong; `problems` holds everything that was found."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))
