"""Parts to plain data: what differs from the defaults, or all of it, and `use` everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from anyfleet.config.forms import ABSENT, form_of
from anyfleet.errors import BadName, ConfigError, Problem
from anyfleet.names import Factory, name_of

__all__ = ["dump"]


@dataclass(frozen=True)
class _Pass:
    """What a walk through a value carries along."""

    complete: bool
    problems: list[Problem] = field(default_factory=list)


def dump(value: Any, *, complete: bool = False) -> Any:
    """Plain data (tables, lists, texts, numbers, None) from which `load` makes an equal value.

    A part becomes a table of its `use` and of the fields that differ from their defaults; of all
    fields when `complete`, so that it means the same when a default changes one day. A class that
    is no part but looks like one says so in `unwritable`, a sentence for the user.
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
    """What has a name: a part, a factory, a class or a function."""
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
        Problem(path, f"a {type(value).__name__} cannot be written as plain data.")
    )
    return None


def _each(items: Any, path: str, walk: _Pass) -> dict[Any, Any]:
    return {key: _plain(item, f"{path}.{key}" if path else str(key), walk) for key, item in items}


def _written(value: Any, walk: _Pass) -> list[tuple[str, Any]]:
    """All fields, or those that were given, as far as one can see: that differ from the default."""
    entries = form_of(type(value)).entries
    pairs = [(each.name, getattr(value, each.name)) for each in fields(value) if each.init]
    defaults = {name: entry.default for name, entry in entries.items()}
    return [
        (name, item)
        for name, item in pairs
        if walk.complete or not _same(item, defaults.get(name, ABSENT))
    ]


def _same(left: Any, right: Any) -> bool:
    """Equal and of one type: True is not 1, and the file shall keep that."""
    return type(left) is type(right) and bool(left == right)
