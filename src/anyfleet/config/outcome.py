"""Where a check stands in the data, and what it found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from anyfleet.errors import Problem

__all__ = ["FAILED", "Outcome", "Scope"]

FAILED: Any = object()


@dataclass(frozen=True)
class Outcome:
    """A checked value, or FAILED, with all problems found below.

    A value may come with problems (a key nobody knows): good enough to go on checking with.
    `guess` is what a call gave without its wrong arguments: fields are checked against it.
    """

    value: Any = FAILED
    problems: tuple[Problem, ...] = ()
    guess: Any = FAILED


@dataclass(frozen=True)
class Scope:
    """A place in the data: its path, and where names may be looked up."""

    allow: tuple[str, ...]
    homes: Mapping[str, str]  # field -> the package in which its short names live
    path: str = ""
    home: str = ""
    settled: bool = False  # whether the home is that of this very field, not the one around it
    folder: Path | None = None  # in which relative paths lie; None: the working directory

    def field(self, key: str) -> Scope:
        """Below a field; a field without a home of its own keeps the one around it."""
        path = f"{self.path}.{key}" if self.path else key
        home = self.homes.get(key, self.home)
        return replace(self, path=path, home=home, settled=key in self.homes)

    @property
    def packages(self) -> tuple[str, ...]:
        """Whose exports may be named here: of its home or, where nothing says what, of any."""
        return (self.home,) if self.home else tuple(dict.fromkeys(self.homes.values()))

    def item(self, key: str | int) -> Scope:
        """Below an item of a list or mapping."""
        return replace(self, path=f"{self.path}.{key}" if self.path else str(key))

    def refuse(self, *messages: str) -> Outcome:
        """The outcome of a value that cannot be used."""
        return Outcome(problems=tuple(Problem(self.path, message) for message in messages))
