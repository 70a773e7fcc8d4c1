"""Limits of plain data: which numbers it may hold, and how deeply its tables may be nested.

Whole numbers have 64 bits. Other numbers are finite; a field takes infinity, "no limit", only if
its default is infinite or its type is `Unbounded`. NaN is never taken.
"""

from __future__ import annotations

import math
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from anyfleet.errors import Problem

__all__ = ["DEEPEST", "Unbounded", "no_number", "refuse_long_keys", "too_deep"]

DEEPEST = 32  # tables and lists inside one another
_LARGEST = 1 << 63
_PARTS = 100  # most parts of a dotted key; nobody means a longer one
# Quoted parts up to some length only, so that the search itself takes no time.
_PART = r"""(?:[\w-]++|"(?:[^"\\\n]|\\.){0,99}+"|'[^'\n]{0,99}+')"""
_LONG_KEY = re.compile(rf"(?<![\w-])(?:{_PART}[ \t]*+\.[ \t]*+){{{_PARTS}}}")


@dataclass(frozen=True)
class _MayBeInfinite:
    """The mark on the type of a field that takes infinity."""


Unbounded = Annotated[float, _MayBeInfinite()]


def no_number(value: Any, kind: Any, base: Any) -> str:
    """Return why a number cannot stand in a field of this type and default, or ""."""
    if isinstance(value, bool):
        return ""
    if isinstance(value, int) and not -_LARGEST <= value < _LARGEST:
        return f"a whole number must fit into 64 bits, got one of {value.bit_length()} bits."
    if not isinstance(value, float) or math.isfinite(value):
        return ""
    if not math.isnan(value) and (_marked(kind) or _infinite(base)):
        return ""
    return f"expected a finite number, got {value}."


def too_deep(data: Any) -> Problem | None:
    """Return the first place at which tables or lists are nested too deeply, or None."""
    level: list[tuple[str, Any]] = [("", data)]
    for _ in range(DEEPEST + 1):
        level = [(_joined(path, key), item) for path, of in level for key, item in _inside(of)]
    if not level:
        return None
    (path, _) = level[0]
    return Problem(path, f"is nested more than {DEEPEST} tables or lists deep: use fewer levels.")


def refuse_long_keys(text: str) -> None:
    """Raise ValueError if a dotted key has far too many parts.

    To read such a key takes time that grows with the square of its parts.
    """
    found = _LONG_KEY.search(text)
    if found is not None:
        line = text.count("\n", 0, found.start()) + 1
        raise ValueError(f"line {line} has a key of more than {_PARTS} parts: use fewer levels")


def _inside(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, list | tuple) else []


def _joined(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _marked(kind: Any) -> bool:
    if typing.get_origin(kind) is Annotated:
        return any(isinstance(mark, _MayBeInfinite) for mark in kind.__metadata__)
    return any(_marked(inner) for inner in typing.get_args(kind))


def _infinite(base: Any) -> bool:
    return isinstance(base, float) and math.isinf(base)
