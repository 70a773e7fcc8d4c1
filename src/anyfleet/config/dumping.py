"""Parts to plain data: only what differs from the defaults, and `use` everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from anyfleet.config.forms import ABSENT, form_of
from anyfleet.errors import BadName, ConfigError, Problem
from anyfleet.naming import Factory, name_of

__all__ = ["dump"]


def dump(value: Any) -> Any:
    """Plain data (tables, lists, texts, numbers, None) from which `load` makes an equal value.

    A part becomes a table of its `use` and of the fields that differ from their defaults.
    """
    problems: list[Problem] = []
    data = _plain(value, "", problems)
    if problems:
        raise ConfigError(problems)
    return data


def _plain(value: Any, path: str, problems: list[Problem]) -> Any:
    if isinstance(value, Enum):
        return _plain(value.value, path, problems)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, AbstractSet):
        return sorted(_each(enumerate(value), path, problems).values())
    if isinstance(value, tuple | list):
        return list(_each(enumerate(value), path, problems).values())
    if isinstance(value, Mapping):
        return {str(key): item for key, item in _each(value.items(), path, problems).items()}
    try:
        return _code(value, path, problems)
    except BadName as error:
        problems.append(Problem(path, str(error)))
        return None


def _code(value: Any, path: str, problems: list[Problem]) -> Any:
    """What has a name: a part, a factory, a class or a function."""
    if isinstance(value, Factory):
        return {"use": value.use} | _each(value.options.items(), path, problems)
    if is_dataclass(value) and not isinstance(value, type):
        return {"use": name_of(type(value))} | _each(_changed(value), path, problems)
    if callable(value) and isinstance(getattr(value, "__qualname__", None), str):
        return name_of(value)
    problems.append(Problem(path, f"a {type(value).__name__} cannot be written as plain data."))
    return None


def _each(items: Any, path: str, problems: list[Problem]) -> dict[Any, Any]:
    return {
        key: _plain(item, f"{path}.{key}" if path else str(key), problems) for key, item in items
    }


def _changed(value: Any) -> list[tuple[str, Any]]:
    """The fields that were given, as far as one can see: those that differ from the default."""
    entries = form_of(type(value)).entries
    pairs = [(field.name, getattr(value, field.name)) for field in fields(value) if field.init]
    return [
        (name, item)
        for name, item in pairs
        if entries[name].default is ABSENT or not _same(item, entries[name].default)
    ]


def _same(left: Any, right: Any) -> bool:
    """Equal and of one type: True is not 1, and the file shall keep that."""
    return type(left) is type(right) and bool(left == right)
