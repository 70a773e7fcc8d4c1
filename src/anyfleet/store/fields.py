"""Whether the fields of a value are of the types that its class declares."""

import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import lru_cache
from typing import Any

import numpy as np
from torch import Tensor

from anyfleet.arrays import Arrays
from anyfleet.config.signatures import hints_of

# Numbers of numpy stand for plain ones, and whole ones for others.
_WIDER: Mapping[type, Any] = {
    bool: bool | np.bool_,
    int: int | np.integer,
    float: int | float | np.number,
}


def misfit(kind: type, held: Mapping[str, Any]) -> str:
    """Return which field has a value of another type than declared; empty if none has."""
    hints = _hints(kind)
    for name, value in held.items():
        if not _fits(value, hints.get(name, Any)):
            return f"{kind.__name__}.{name} holds a {type(value).__name__}"
    return ""


def uneven(batch: Arrays) -> str:
    """Return which column of a batch has not one entry per row; empty if all have."""
    held = {each.name: getattr(batch, each.name) for each in fields(batch)}
    columns = {
        name: value
        for name, value in held.items()
        if isinstance(value, np.ndarray | Tensor | tuple | Arrays)
    }
    counts = {name: _entries(value) for name, value in columns.items()}
    rows = next(iter(counts.values()), 0)
    wrong = [name for name, count in counts.items() if count != rows or count < 0]
    return f"{type(batch).__name__}.{wrong[0]} has not one entry per row" if wrong else ""


def _entries(column: Any) -> int:
    """How many entries a column has; -1 if it is a single number."""
    single = isinstance(column, np.ndarray | Tensor) and column.ndim == 0
    return -1 if single else len(column)


@lru_cache(maxsize=1024)
def _hints(kind: type) -> dict[str, Any]:
    return hints_of(kind)


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value may be of that type; what a type does not say is not asked."""
    origin = typing.get_origin(hint)
    # An alias by `type` (Python 3.12, so numpy's NDArray there) stands for what it is made of.
    aliased = getattr(origin or hint, "__value__", None)
    if aliased is not None:
        return _fits(value, aliased)
    if origin is typing.Annotated:
        return _fits(value, typing.get_args(hint)[0])
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, inner) for inner in typing.get_args(hint))
    if origin is typing.Literal:
        return value in typing.get_args(hint)
    if origin is tuple:
        return isinstance(value, tuple) and _fit_each(value, typing.get_args(hint))
    if origin is list:
        return isinstance(value, list) and _fit_each(tuple(value), (*typing.get_args(hint), ...))
    if origin is Callable:
        return callable(value)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return isinstance(value, Mapping) and _fit_items(value, typing.get_args(hint))
    if hint is None or hint is types.NoneType:
        return value is None
    plain = origin or hint
    if plain is Any or not isinstance(plain, type) or getattr(plain, "_is_protocol", False):
        return True
    return isinstance(value, _WIDER.get(plain, plain))


def _fit_each(value: tuple[Any, ...], inner: tuple[Any, ...]) -> bool:
    if len(inner) == 2 and inner[1] is ...:
        return all(_fits(each, inner[0]) for each in value)
    return len(value) == len(inner) and all(map(_fits, value, inner))


def _fit_items(value: Mapping[Any, Any], inner: tuple[Any, ...]) -> bool:
    return not inner or all(
        _fits(key, inner[0]) and _fits(item, inner[1]) for key, item in value.items()
    )
