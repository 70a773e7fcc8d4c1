"""Plain data to parts: every value is checked against its type, every problem is kept."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, overload

from pydantic import PydanticSchemaGenerationError, TypeAdapter, ValidationError

from anyfleet.config.forms import ABSENT
from anyfleet.config.number_values import no_number, too_deep
from anyfleet.config.outcome import FAILED, Outcome, Scope
from anyfleet.config.part_values import code, factory, part
from anyfleet.errors import ConfigError
from anyfleet.names import HOMES, Factory, FrozenMapping

__all__ = ["load"]

T = TypeVar("T")

_NONE = {"use": "none"}  # None in TOML
_LISTS = (tuple, list, Sequence, frozenset, set, AbstractSet)
_TABLES = (Mapping, dict)


@overload
def load(
    data: Any,
    kind: type[T],
    *,
    allow: Collection[str] = ...,
    homes: Mapping[str, str] = ...,
    folder: Path | None = ...,
) -> T: ...
@overload
def load(
    data: Any,
    kind: None = None,
    *,
    allow: Collection[str] = ...,
    homes: Mapping[str, str] = ...,
    folder: Path | None = ...,
) -> Any: ...
def load(
    data: Any,
    kind: Any = None,
    *,
    allow: Collection[str] = (),
    homes: Mapping[str, str] = HOMES,
    folder: Path | None = None,
) -> Any:
    """Return the value that `data` describes, or raise a ConfigError with every problem in it.

    `allow` names packages besides `anyfleet` whose code may be used. `homes` tells for a field
    ("select") which package ("anyfleet.parts.select") exports what may stand there. A relative path
    lies in `folder`, or else in the working directory.
    """
    if deep := too_deep(data):
        raise ConfigError([deep])
    scope = Scope(tuple(allow), homes, folder=folder)
    outcome = _check(data, Any if kind is None else kind, scope)
    if outcome.value is FAILED or outcome.problems:
        raise ConfigError(outcome.problems)
    return outcome.value


def _check(value: Any, kind: Any, scope: Scope, base: Any = ABSENT) -> Outcome:
    """`value` as a `kind`; `base` is what stands there if a table names no `use`."""
    if wrong := no_number(value, kind, base):
        return scope.refuse(wrong)
    origin = typing.get_origin(kind) or kind
    if origin is typing.Annotated and not _is_scalar(kind):
        return _check(value, typing.get_args(kind)[0], scope, base)
    if origin in (typing.Union, types.UnionType):
        return _union(value, typing.get_args(kind), scope, base)
    if origin in (Any, object):
        return _anything(value, scope, base)
    if origin in _LISTS:
        return _list(value, kind, scope)
    if origin in _TABLES:
        return _table(value, kind, scope)
    if origin is Factory:
        return factory(value, scope, base, _check)
    if origin in (Callable, type):
        return code(value, kind, scope)
    if _is_scalar(kind):
        return _scalar(value, kind, scope)
    return part(value, origin, scope, base, _check)


def _is_scalar(kind: Any) -> bool:
    if isinstance(kind, type) and (is_dataclass(kind) or typing.Protocol in kind.__bases__):
        return False
    return _adapter(kind) is not None


@cache
def _adapter(kind: Any) -> TypeAdapter[Any] | None:
    try:
        return TypeAdapter(kind)
    except PydanticSchemaGenerationError:
        return None


def _scalar(value: Any, kind: Any, scope: Scope) -> Outcome:
    adapter = _adapter(kind)
    assert adapter is not None
    # Texts stand for paths and members of an Enum; elsewhere "1" is not 1, nor True.
    loose = isinstance(kind, type) and issubclass(kind, Path | Enum)
    try:
        found = adapter.validate_python(value, strict=not loose)
        return Outcome(scope.folder / found if _lies_beside(found, scope) else found)
    except ValidationError as error:
        return scope.refuse(*(f"{_lower(e['msg'])}, got {value!r}." for e in error.errors()))


def _lies_beside(value: Any, scope: Scope) -> bool:
    """Whether a value is a path that is meant relative to the file it was written in."""
    return scope.folder is not None and isinstance(value, Path) and not value.is_absolute()


def _union(value: Any, kinds: tuple[Any, ...], scope: Scope, base: Any) -> Outcome:
    real = [kind for kind in kinds if kind is not types.NoneType]
    if len(real) < len(kinds) and (
        value is None or value == _NONE or (value == "none" and str not in real)
    ):
        return Outcome(None)
    outcomes = [_check(value, kind, scope, base) for kind in real]
    clean = [outcome for outcome in outcomes if not outcome.problems]
    if clean or len(real) == 1:
        return (clean or outcomes)[0]
    likely = [o for o, kind in zip(outcomes, real, strict=True) if _same_shape(value, kind)]
    if len(likely) == 1:
        return likely[0]
    names = " or ".join(getattr(kind, "__name__", str(kind)) for kind in real)
    return scope.refuse(f"expected {names}, got {value!r}.")


def _same_shape(value: Any, kind: Any) -> bool:
    origin = typing.get_origin(kind) or kind
    if isinstance(value, Mapping):
        return origin in _TABLES or not _is_scalar(kind)
    return isinstance(value, list | tuple) == (origin in _LISTS)


def _anything(value: Any, scope: Scope, base: Any) -> Outcome:
    if isinstance(value, Mapping):
        if "use" in value or is_dataclass(base):
            return part(value, object, scope, base, _check)
        return _table(value, Mapping[str, Any], scope)
    if isinstance(value, list | tuple):
        return _list(value, tuple[Any, ...], scope)
    return Outcome(value)


def _list(value: Any, kind: Any, scope: Scope) -> Outcome:
    if not isinstance(value, list | tuple | AbstractSet):
        return scope.refuse(f"expected a list, got {value!r}.")
    inner = typing.get_args(kind) or (Any, ...)
    origin = typing.get_origin(kind) or kind
    if origin is tuple and inner[-1] is not ...:
        if len(inner) != len(value):
            return scope.refuse(f"expected a list of {len(inner)}, got {len(value)}: {value!r}.")
        kinds: Sequence[Any] = inner
    else:
        kinds = [inner[0]] * len(value)
    outcomes = [
        _check(item, each, scope.item(i))
        for i, (item, each) in enumerate(zip(value, kinds, strict=True))
    ]
    make = origin if origin in (list, set, frozenset) else tuple
    return _gather(outcomes, frozenset if origin is AbstractSet else make)


def _table(value: Any, kind: Any, scope: Scope) -> Outcome:
    if not isinstance(value, Mapping):
        return scope.refuse(f"expected a table, got {value!r}.")
    key_kind, inner = typing.get_args(kind) or (str, Any)
    keys = [_key(key, key_kind, scope) for key in value]
    values = [_check(item, inner, scope.item(key)) for key, item in value.items()]
    make = dict if (typing.get_origin(kind) or kind) is dict else FrozenMapping
    pairs = _gather([_gather(keys, tuple), _gather(values, tuple)], tuple)
    if pairs.value is FAILED:
        return pairs
    return Outcome(make(dict(zip(*pairs.value, strict=True))), pairs.problems)


def _key(key: str, kind: Any, scope: Scope) -> Outcome:
    """Keys are texts in a file, whatever they mean: "3" may stand for 3."""
    adapter = _adapter(kind)
    try:
        return Outcome(key if adapter is None else adapter.validate_python(key))
    except ValidationError as error:
        return scope.refuse(f"key {key!r}: {_lower(error.errors()[0]['msg'])}.")


def _gather(outcomes: Sequence[Outcome], make: Callable[[list[Any]], Any]) -> Outcome:
    problems = tuple(problem for outcome in outcomes for problem in outcome.problems)
    if any(outcome.value is FAILED for outcome in outcomes):
        return Outcome(problems=problems)
    return Outcome(make([outcome.value for outcome in outcomes]), problems)


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]
