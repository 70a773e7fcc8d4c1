"""Parts to plain data, and plain data to TOML."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from anyfleet.config.signatures import ABSENT, form_of
from anyfleet.errors import BadName, ConfigError, Problem
from anyfleet.names import Factory, name_of

__all__ = ["dump", "to_toml", "toml_value"]


@dataclass(frozen=True)
class _Pass:
    """The setting of a walk through a value, and the problems found on the way."""

    complete: bool
    problems: list[Problem] = field(default_factory=list)


def dump(value: Any, *, complete: bool = False) -> Any:
    """Return plain data (tables, lists, texts, numbers, None) that `load` makes an equal value of.

    A part becomes a table: its `use` and the fields that differ from their defaults. With
    `complete` it has all fields, so that it means the same when a default changes one day. A class
    that cannot be written says why in `unwritable`, a sentence for the user.
    """
    walk = _Pass(complete)
    data = _plain(value, "", walk)
    if walk.problems:
        raise ConfigError(walk.problems)
    return data


def _plain(value: Any, path: str, walk: _Pass) -> Any:
    if isinstance(value, Enum):
        return _plain(value.value, path, walk)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, AbstractSet):
        return sorted(_each(enumerate(value), path, walk).values())
    if isinstance(value, tuple | list):
        return list(_each(enumerate(value), path, walk).values())
    if isinstance(value, Mapping):
        return {str(key): item for key, item in _each(value.items(), path, walk).items()}
    try:
        return _code(value, path, walk)
    except BadName as error:
        walk.problems.append(Problem(path, str(error)))
        return None


def _code(value: Any, path: str, walk: _Pass) -> Any:
    """Return a value that has a name as plain data: a part, a factory, a class or a function."""
    if isinstance(value, Factory):
        return {"use": value.use} | _each(value.options.items(), path, walk)
    if is_dataclass(value) and not isinstance(value, type):
        reason = getattr(type(value), "unwritable", "")
        if reason:
            walk.problems.append(Problem(path, reason))
            return None
        return {"use": name_of(type(value))} | _each(_written(value, walk), path, walk)
    if callable(value) and isinstance(getattr(value, "__qualname__", None), str):
        return name_of(value)
    walk.problems.append(
        Problem(path, f"a {type(value).__name__} cannot be written into a run file.")
    )
    return None


def _each(items: Any, path: str, walk: _Pass) -> dict[Any, Any]:
    return {key: _plain(item, f"{path}.{key}" if path else str(key), walk) for key, item in items}


def _written(value: Any, walk: _Pass) -> list[tuple[str, Any]]:
    """Return the fields to write: all of them, or those that differ from their defaults."""
    made_by: Callable[..., Any] = type(value)
    entries = form_of(made_by).entries
    pairs = [(each.name, getattr(value, each.name)) for each in fields(value) if each.init]
    defaults = {name: entry.default for name, entry in entries.items()}
    return [
        (name, item)
        for name, item in pairs
        if walk.complete or not _same(item, defaults.get(name, ABSENT))
    ]


def _same(left: Any, right: Any) -> bool:
    """Return whether two values are equal and of one type: True is not 1."""
    return type(left) is type(right) and bool(left == right)


# --- TOML: the standard library reads it, but does not write it ---------------------------------
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def to_toml(data: Mapping[str, Any]) -> str:
    """Return a TOML document that reads as `data`; None becomes the table `{ use = "none" }`."""
    return "\n".join(_toml_lines(data, ())).lstrip("\n") + "\n"


def _toml_lines(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    plain = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
    if path and (plain or not table):
        yield f"\n[{'.'.join(map(_toml_key, path))}]"
    for key, value in plain.items():
        yield f"{_toml_key(key)} = {toml_value(value)}"
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _toml_lines(value, (*path, key))


def _toml_key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _toml_text(key)


def toml_value(value: Any) -> str:
    """Return plain data as it stands behind `key = ` in TOML; None becomes `{ use = "none" }`."""
    if value is None:
        return '{ use = "none" }'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _toml_text(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return _toml_float(value)
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{_toml_key(key)} = {toml_value(item)}" for key, item in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    raise TypeError(f"TOML has no {type(value).__name__}: call `dump` first.")


def _toml_float(value: float) -> str:
    if math.isfinite(value):
        text = repr(float(value))
        return text if any(mark in text for mark in ".e") else f"{text}.0"
    return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")


def _toml_text(text: str) -> str:
    return '"' + "".join(_ESCAPES.get(letter) or _toml_letter(letter) for letter in text) + '"'


def _toml_letter(letter: str) -> str:
    printable = ord(letter) >= 0x20 and ord(letter) != 0x7F
    return letter if printable else f"\\u{ord(letter):04x}"
