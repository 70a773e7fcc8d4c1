"""What a table may contain: the fields of a dataclass, or the parameters of a function."""

from __future__ import annotations

import inspect
import sys
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from typing import Any

__all__ = ["ABSENT", "Entry", "Form", "form_of", "hints_of", "lacking"]

ABSENT: Any = object()


@dataclass(frozen=True)
class Entry:
    """One key: the type of its value, and what it is when left out."""

    kind: Any
    default: Any = ABSENT
    required: bool = False


@dataclass(frozen=True)
class Form:
    """The keys of a table that describes a call of `target`.

    `spare` is the type of any further key (`**rates: float`), `result` the fields of what a
    function returns: these may be written too, and replace what the function put there.
    """

    target: Callable[..., Any]
    entries: Mapping[str, Entry]
    spare: Any = ABSENT
    result: Mapping[str, Entry] = field(default_factory=dict)

    def kind(self, key: str) -> Any:
        """The type of an argument, ABSENT if there is no such argument."""
        entry = self.entries.get(key)
        return self.spare if entry is None else entry.kind


def form_of(target: Callable[..., Any]) -> Form:
    """Read a form off the annotations of a dataclass, a function or another class."""
    if isinstance(target, type) and is_dataclass(target):
        return Form(target, _fields(target))
    source = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]
    hints = hints_of(source)
    entries: dict[str, Entry] = {}
    spare = ABSENT
    for parameter in inspect.signature(target).parameters.values():
        kind = hints.get(parameter.name, Any)
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            spare, unpacked = _spare(kind)
            entries |= unpacked
        elif parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            required = parameter.default is parameter.empty
            entries[parameter.name] = Entry(
                kind, ABSENT if required else parameter.default, required
            )
    returned = hints.get("return")
    result = _fields(returned) if isinstance(returned, type) and is_dataclass(returned) else {}
    return Form(target, entries, spare, result)


def lacking(part: type, protocol: type) -> tuple[str, ...]:
    """The members of a protocol that a class does not have."""
    members: dict[str, None] = {}
    for base in protocol.__mro__:
        if typing.Protocol in base.__bases__:
            public = (name for name in vars(base) if name == "__call__" or name[0] != "_")
            members |= dict.fromkeys([*public, *inspect.get_annotations(base)])
    known = {*dir(part), *(entry.name for entry in _all_fields(part))}
    return tuple(member for member in members if member not in known)


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
    """What `**name: kind` takes: `Any` says nothing, so it takes nothing."""
    if typing.get_origin(kind) is typing.Unpack:
        (table,) = typing.get_args(kind)
        return ABSENT, {
            key: Entry(inner, required=key in table.__required_keys__)
            for key, inner in typing.get_type_hints(table).items()
        }
    return (ABSENT if kind in (Any, object) else kind), {}


def hints_of(target: Any) -> dict[str, Any]:
    """Return resolved annotations; one that names a type-checking import only counts as Any."""
    try:
        return typing.get_type_hints(target, include_extras=True)
    except NameError:
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
            except NameError:
                resolved[name] = Any
    return resolved
