"""The keys that a table may have: the fields of a dataclass, or the parameters of a function."""

from __future__ import annotations

import inspect
import sys
import typing
from abc import ABC
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, InitVar, dataclass, field, fields, is_dataclass
from functools import lru_cache
from typing import Any

__all__ = ["ABSENT", "Entry", "Form", "form_of", "hints_of", "is_interface", "lacking"]

ABSENT: Any = object()


@dataclass(frozen=True)
class Entry:
    """One key: the type of its value, and its default."""

    kind: Any
    default: Any = ABSENT
    required: bool = False


@dataclass(frozen=True)
class Form:
    """The keys of a table that describes a call of `target`.

    `spare` is the type of further keys (`**lrs: float`). `result` has the fields of a function's
    result: a table may give these too, and they replace what the function put there. `open` says
    that the target takes any further argument (`**options`): a call from Python may give some, but
    the keys of a table must be known.
    """

    target: Callable[..., Any]
    entries: Mapping[str, Entry]
    spare: Any = ABSENT
    result: Mapping[str, Entry] = field(default_factory=dict)
    open: bool = False

    def kind(self, key: str) -> Any:
        """Return the type of an argument, or ABSENT if there is no such argument."""
        entry = self.entries.get(key)
        return self.spare if entry is None else entry.kind


@lru_cache(maxsize=1024)
def form_of(target: Callable[..., Any]) -> Form:
    """Return the keys that a dataclass, a function or another class takes, by its annotations.

    It is found once for each: to resolve annotations takes longer than all else about a run file.
    """
    declared = _declared(target)
    source = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]
    parameters = inspect.signature(target).parameters
    if declared and declared.keys() == parameters.keys():
        return Form(target, declared)
    hints = hints_of(source)
    entries: dict[str, Entry] = {}
    spare, anything = ABSENT, False
    for parameter in parameters.values():
        kind = _plain(hints.get(parameter.name, Any))
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            spare, unpacked = _spare(kind)
            entries |= unpacked
            anything = spare is ABSENT and not unpacked
        elif parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            required = parameter.default is parameter.empty
            entries[parameter.name] = declared.get(parameter.name) or Entry(
                kind, ABSENT if required else parameter.default, required
            )
    returned = hints.get("return")
    result = _fields(returned) if isinstance(returned, type) and is_dataclass(returned) else {}
    return Form(target, entries, spare, result, anything)


def _declared(target: Callable[..., Any]) -> dict[str, Entry]:
    """Return the fields of a dataclass that its `__init__` takes as they are declared.

    An `__init__` written by hand may take other arguments, or these with other types. An `InitVar`
    is no field: it stands in the signature alone.
    """
    if not isinstance(target, type) or not is_dataclass(target):
        return {}
    asked = inspect.signature(target.__init__).parameters
    own = {each.name for each in fields(target) if _as_declared(asked.get(each.name), each)}
    return {name: entry for name, entry in _fields(target).items() if name in own}


def _as_declared(parameter: inspect.Parameter | None, given: Field[Any]) -> bool:
    if parameter is None or parameter.annotation != given.type:
        return False
    required = given.default is MISSING and given.default_factory is MISSING
    return required == (parameter.default is parameter.empty)


def _plain(kind: Any) -> Any:
    """Return the type of an argument that is no field."""
    return kind.type if isinstance(kind, InitVar) else kind


def is_interface(kind: type) -> bool:
    """Return whether a class only says what others have: a protocol, or the slot of a part."""
    return typing.Protocol in kind.__bases__ or (ABC in kind.__mro__ and not is_dataclass(kind))


def lacking(part: type, protocol: type) -> tuple[str, ...]:
    """Return the members of a protocol that a class lacks."""
    known = {*dir(part), *(entry.name for entry in _all_fields(part))}
    return tuple(member for member in _members(protocol) if member not in known)


@lru_cache(maxsize=1024)
def _members(protocol: type) -> tuple[str, ...]:
    """Return the members that a protocol asks for."""
    members: dict[str, None] = {}
    for base in protocol.__mro__:
        if is_interface(base):
            public = (name for name in vars(base) if name == "__call__" or name[0] != "_")
            members |= dict.fromkeys([*public, *inspect.get_annotations(base)])
    return tuple(members)


def _fields(part: type) -> dict[str, Entry]:
    hints = hints_of(part)
    return {each.name: _entry(each, hints) for each in _all_fields(part) if each.init}


def _all_fields(part: type) -> tuple[Field[Any], ...]:
    return fields(part) if is_dataclass(part) else ()


def _entry(given: Field[Any], hints: Mapping[str, Any]) -> Entry:
    kind = hints.get(given.name, Any)
    if given.default_factory is not MISSING:
        return Entry(kind, given.default_factory())
    if given.default is not MISSING:
        return Entry(kind, given.default)
    return Entry(kind, required=True)


def _spare(kind: Any) -> tuple[Any, dict[str, Entry]]:
    """Return what `**name: kind` takes; nothing for `Any`, which does not say."""
    if typing.get_origin(kind) is typing.Unpack:
        (table,) = typing.get_args(kind)
        return ABSENT, {
            key: Entry(inner, required=key in table.__required_keys__)
            for key, inner in typing.get_type_hints(table).items()
        }
    return (ABSENT if kind in (Any, object) else kind), {}


def hints_of(target: Any) -> dict[str, Any]:
    """Return the resolved annotations; one that cannot be resolved counts as Any.

    It may name an import for type checkers only, be a text for readers, or be wrong.
    """
    try:
        return typing.get_type_hints(target, include_extras=True)
    except Exception:  # noqa: BLE001 - annotations of a user's part are code, and may fail in any way
        return _hints_one_by_one(target)


def _hints_one_by_one(target: Any) -> dict[str, Any]:
    resolved: dict[str, Any] = {}
    owners = reversed(target.__mro__) if isinstance(target, type) else (target,)
    for owner in owners:
        scope = vars(sys.modules.get(owner.__module__, typing))
        for name, annotation in inspect.get_annotations(owner).items():
            stub = type("Stub", (), {"__annotations__": {name: annotation}})
            try:
                resolved |= typing.get_type_hints(stub, globalns=scope, include_extras=True)
            except Exception:  # noqa: BLE001 - as above
                resolved[name] = Any
    return resolved
