"""Plain data to parts: every value is checked against its type, and all problems are reported."""

from __future__ import annotations

import importlib
import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, is_dataclass, replace
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, overload

from pydantic import PydanticSchemaGenerationError, TypeAdapter, ValidationError

from anyfleet.config.number_values import no_number, too_deep
from anyfleet.config.signatures import ABSENT, Entry, Form, form_of, hints_of, is_interface, lacking
from anyfleet.errors import AnyfleetError, BadName, CompositionError, ConfigError, Problem, Refusal
from anyfleet.names import (
    HOMES,
    OWN,
    Factory,
    FrozenMapping,
    find,
    lies_within,
    name_of,
    near,
    public_names,
)

__all__ = ["load", "names_for", "nearest"]

T = TypeVar("T")


# --- where a check stands, and what it found ----------------------------------------------------
FAILED: Any = object()


@dataclass(frozen=True)
class Outcome:
    """A checked value, or FAILED, with all problems found in it.

    A value may come with problems, such as an unknown key, and still be good enough to check other
    values against. `guess` is the result of a call without its wrong arguments; the fields of the
    result are checked against it.
    """

    value: Any = FAILED
    problems: tuple[Problem, ...] = ()
    guess: Any = FAILED


@dataclass(frozen=True)
class Scope:
    """A place in the data: its path, and the packages whose names may stand there."""

    allow: tuple[str, ...]
    homes: Mapping[str, str]  # by field: the package whose short names may stand there
    path: str = ""
    home: str = ""
    settled: bool = False  # whether `home` is this field's own, not that of the part around it
    folder: Path | None = None  # to which relative paths refer; None: the working directory
    folders: Mapping[str, Path | None] = field(default_factory=dict)  # others, by path of a key

    def field(self, key: str) -> Scope:
        """Return the scope of a field; a field without a home keeps that of the part around it."""
        path = f"{self.path}.{key}" if self.path else key
        home = self.homes.get(key, self.home)
        return replace(self, path=path, home=home, settled=key in self.homes)

    @property
    def base(self) -> Path | None:
        """The folder to which relative paths refer here."""
        return nearest(self.folders, self.path) or self.folder

    @property
    def packages(self) -> tuple[str, ...]:
        """The packages whose exports may be named here: the home, or all homes without one."""
        return (self.home,) if self.home else tuple(dict.fromkeys(self.homes.values()))

    def item(self, key: str | int) -> Scope:
        """Return the scope of an item of a list or table."""
        return replace(self, path=f"{self.path}.{key}" if self.path else str(key))

    def refuse(self, *messages: str) -> Outcome:
        """Return the outcome of a value that cannot be used, with these problems."""
        return Outcome(problems=tuple(Problem(self.path, message) for message in messages))


def nearest(table: Mapping[str, T | None], path: str) -> T | None:
    """Return the entry of a path, or of the nearest one above it; None without any."""
    while path and path not in table:
        path = path.rpartition(".")[0]
    return table.get(path)


# --- values of any type -------------------------------------------------------------------------
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
    folders: Mapping[str, Path | None] | None = ...,
) -> T: ...
@overload
def load(
    data: Any,
    kind: None = None,
    *,
    allow: Collection[str] = ...,
    homes: Mapping[str, str] = ...,
    folder: Path | None = ...,
    folders: Mapping[str, Path | None] | None = ...,
) -> Any: ...
def load(
    data: Any,
    kind: Any = None,
    *,
    allow: Collection[str] = (),
    homes: Mapping[str, str] = HOMES,
    folder: Path | None = None,
    folders: Mapping[str, Path | None] | None = None,
) -> Any:
    """Return the value that `data` describes, or raise ConfigError with every problem in it.

    `allow` names the packages besides `anyfleet` whose code may be used. `homes` tells for a field
    ("select") which package ("anyfleet.parts.select") exports what may stand there. A relative path
    refers to `folder`, or to the working directory without one; `folders` has others, by the path
    of a key.
    """
    if deep := too_deep(data):
        raise ConfigError([deep])
    scope = Scope(tuple(allow), homes, folder=folder, folders=folders or {})
    outcome = _check(data, Any if kind is None else kind, scope)
    if outcome.value is FAILED or outcome.problems:
        raise ConfigError(outcome.problems)
    return outcome.value


def _check(value: Any, kind: Any, scope: Scope, base: Any = ABSENT) -> Outcome:
    """Check `value` as a `kind`; a table without `use` changes `base`, the value by default."""
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
        return _factory(value, scope, base)
    if origin in (Callable, type):
        return _code(value, kind, scope)
    if _is_scalar(kind):
        return _scalar(value, kind, scope)
    return _part(value, origin, scope, base)


def _is_scalar(kind: Any) -> bool:
    if isinstance(kind, type) and (is_dataclass(kind) or is_interface(kind)):
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
    # A text may stand for a path or a member of an Enum. Elsewhere "1" is neither 1 nor True.
    loose = isinstance(kind, type) and issubclass(kind, Path | Enum)
    try:
        found = adapter.validate_python(value, strict=not loose)
        relative = isinstance(found, Path) and not found.is_absolute()
        return Outcome(scope.base / found if relative and scope.base is not None else found)
    except ValidationError as error:
        return scope.refuse(*(f"{_lower(e['msg'])}, got {value!r}." for e in error.errors()))


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
    names = " or ".join(map(_kind_name, real))
    table = f'; a part is a table, {{ use = "{value}" }}' if _names_part(value, real) else ""
    return scope.refuse(f"expected {names}, got {value!r}{table}.")


def _kind_name(kind: Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return " or ".join(f'"{choice}"' for choice in typing.get_args(kind))
    if typing.get_origin(kind) is typing.Annotated:
        inner, *limits = typing.get_args(kind)
        return " ".join([_kind_name(inner), *filter(None, map(_limit, limits))])
    return str(getattr(kind, "__name__", kind))


def _limit(limit: Any) -> str:
    """Return what a limit of a number asks for, in words; "" if it is no such limit."""
    told = (("ge", "from {} on"), ("gt", "above {}"), ("le", "up to {}"), ("lt", "below {}"))
    found = ((getattr(limit, name, None), text) for name, text in told)
    return " ".join(text.format(value) for value, text in found if value is not None)


def _names_part(value: Any, kinds: Sequence[Any]) -> bool:
    """Return whether a text stands where a part is due, perhaps as its name."""
    return isinstance(value, str) and any(
        isinstance(kind, type) and not _is_scalar(kind) for kind in kinds
    )


def _same_shape(value: Any, kind: Any) -> bool:
    origin = typing.get_origin(kind) or kind
    if isinstance(value, Mapping):
        return origin in _TABLES or not _is_scalar(kind)
    return isinstance(value, list | tuple) == (origin in _LISTS)


def _anything(value: Any, scope: Scope, base: Any) -> Outcome:
    if isinstance(value, Mapping):
        if "use" in value or is_dataclass(base):
            return _part(value, object, scope, base)
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
    """Check a key. In a file it is a text, whatever it means: "3" may stand for 3."""
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


# --- parts: tables with `use` -------------------------------------------------------------------
def _part(value: Any, kind: type, scope: Scope, base: Any) -> Outcome:
    """Make the part that a table describes: call its class or function with its checked keys.

    A table without `use` changes `base`. A key that is no parameter of the function but a field of
    its result replaces that field.
    """
    if not isinstance(value, Mapping):
        return scope.refuse(f"expected a table{_choices(scope, kind)}, got {value!r}.")
    target = _target(value, kind, scope, base)
    if isinstance(target, Outcome):
        return target
    form = form_of(target)
    amended = base if "use" not in value and type(base) is target else ABSENT
    filled = _fill(form, value, scope, amended)
    made = _make(form, filled, scope, amended)
    if form.result:
        made = _amend(made, form, value, scope)
    wrong = _misfit(made.value, kind)
    problems = (*filled.problems, *made.problems)
    if made.value is not FAILED and wrong:
        return Outcome(problems=(*problems, *scope.refuse(wrong).problems))
    return Outcome(made.value, problems)


def _factory(value: Any, scope: Scope, base: Any) -> Outcome:
    """Check a call that is made later; a text is a name without options.

    Its result is not known yet. So a name of Anyfleet itself may stand only in a field that has a
    home, such as networks in `model`.
    """
    table = {"use": value} if isinstance(value, str) else value
    if not isinstance(table, Mapping):
        return scope.refuse(f"expected a table or a name{_choices(scope)}, got {value!r}.")
    written = base if "use" not in table and isinstance(base, Factory) else None
    if written is not None:
        table = {"use": written.use, **table}
    place = scope if scope.settled else replace(scope, home="", homes={})
    target = _looked_up(table, place)
    if isinstance(target, Outcome):
        return target
    kept = {} if written is None else dict(written.options)
    form = replace(form_of(target), result={})  # there is no result yet that could be changed
    filled = _fill(form, table, scope, ABSENT, known=kept)
    if filled.failed or filled.missing:
        return Outcome(problems=filled.problems)
    name = _full_name(table["use"], place)
    return Outcome(Factory(name, {**kept, **filled.values}), filled.problems)


def _code(value: Any, kind: Any, scope: Scope) -> Outcome:
    """Find a class or function by name; one of Anyfleet must say that it returns what is due."""
    if not isinstance(value, str):
        return scope.refuse(f'expected a name such as "package.module:name", got {value!r}.')
    try:
        found = find(_full_name(value, scope), scope.allow, scope.packages)
    except BadName as error:
        return scope.refuse(str(error))
    wanted = (typing.get_args(kind) or (Any,))[-1]
    if lies_within(found.__module__, (OWN,)) and wanted is not Any and _returned(found) != wanted:
        return scope.refuse(f"{found.__name__} does not return a {_word(wanted)}.")
    return Outcome(found)


@dataclass(frozen=True)
class _Filled:
    """The checked keys of a table: good values, wrong keys, and whether one is missing."""

    values: Mapping[str, Any]
    failed: frozenset[str]
    missing: bool
    problems: tuple[Problem, ...]


def _target(table: Mapping[str, Any], kind: type, scope: Scope, base: Any) -> Any:
    """Return the class or function that a table means, or the outcome that says what is wrong."""
    use = table.get("use")
    if use is None:
        if is_dataclass(base):
            return type(base)
        if is_dataclass(kind) and not inspect.isabstract(kind):
            return kind
        return scope.refuse(f"`use` is missing: it names the part{_choices(scope, kind)}.")
    if is_dataclass(kind) and use in _names(kind):
        return kind
    found = _looked_up(table, scope, kind)
    if isinstance(found, Outcome):
        other = _from_another_home(use, kind, scope)
        return found if other is None else other
    if wrong := _unfit(found, kind):
        return scope.item("use").refuse(wrong)
    return found


def _looked_up(table: Mapping[str, Any], scope: Scope, kind: type = object) -> Any:
    """Return the class or function that `use` names, or the outcome that says what is wrong.

    `kind` only chooses which names the message lists.
    """
    use = table.get("use")
    if not isinstance(use, str):
        return scope.item("use").refuse(f"expected a name, got {use!r}.")
    try:
        return find(_full_name(use, scope), scope.allow, scope.packages)
    except BadName as error:
        return scope.item("use").refuse(
            f"{_unnamed(use, error, scope, kind)}{_choices(scope, kind)}"
        )


def _unnamed(use: str, error: BadName, scope: Scope, kind: type) -> str:
    """Return why nothing can be used by this name; a short name is compared with those that fit."""
    if ":" in use or not scope.home:
        return str(error)
    hint = near(use, names_for(scope.home, kind)) or "."
    return f'"{use}" is no part that may stand here{hint}'


def _from_another_home(use: Any, kind: type, scope: Scope) -> Any:
    """Return what another home exports, for a field without a home that asks for that kind.

    A trainer of one's own, say, may have a codec inside. The class must have the kind as its base:
    to look like one is not enough.
    """
    if scope.settled or kind is object or not isinstance(use, str):
        return None
    try:
        found = find(use, (), scope.homes.values())
    except BadName:
        return None
    made = found if isinstance(found, type) else _returned(found)
    fits = isinstance(made, type) and kind in made.__mro__ and not _unfit(found, kind)
    return found if fits else None


def _names(kind: type) -> tuple[str, ...]:
    """Return the names of a class: where it is exported, and where it is defined."""
    try:
        return name_of(kind), f"{kind.__module__}:{kind.__name__}"
    except BadName:
        return ()


def _unfit(found: Any, kind: type) -> str:
    """Return why a class or function cannot be called where a `kind` is due, or "".

    A function of Anyfleet must say that it returns such a thing. Whoever allows other code trusts
    it: where that does not say what it returns, its result is checked instead.
    """
    if isinstance(found, type):
        reason = getattr(found, "unwritable", "")
        return str(reason) or _misfit_class(found, kind)
    made = _returned(found)
    if made is Any or not isinstance(made, type):
        own = lies_within(found.__module__, (OWN,))
        return f"{found.__name__} is no {kind.__name__} and makes none." if own else ""
    return _unfit(made, kind)


def _returned(function: Callable[..., Any]) -> Any:
    """Return the type that a function says it returns, or Any."""
    return hints_of(function).get("return", Any)


def _word(kind: Any) -> str:
    return getattr(kind, "__name__", str(kind))


def _full_name(use: str, scope: Scope) -> str:
    return use if ":" in use or not scope.home else f"{scope.home}:{use}"


def _choices(scope: Scope, kind: type = object) -> str:
    """Return the names that may stand here, as a remark in brackets, or ""."""
    names = names_for(scope.home, kind) if scope.home else ()
    return f" ({scope.home} has: {', '.join(names)})" if names else ""


def names_for(home: str, kind: type = object) -> tuple[str, ...]:
    """Return the names that a home package exports and that make a `kind`."""
    exported = {name: getattr(importlib.import_module(home), name) for name in public_names(home)}
    return tuple(name for name, found in exported.items() if _makes(found, kind))


def _makes(found: Any, kind: type) -> bool:
    if inspect.isclass(found):
        base = inspect.isabstract(found) or typing.Protocol in found.__bases__
        return not base and (kind is object or not _unfit(found, kind))
    return inspect.isfunction(found) and (kind is object or not _unfit(found, kind))


def _fill(
    form: Form,
    table: Mapping[str, Any],
    scope: Scope,
    base: Any,
    known: Collection[str] = (),
) -> _Filled:
    outcomes: dict[str, Outcome] = {}
    problems: list[Problem] = []
    for key in (key for key in table if key != "use"):
        kind = form.kind(key)
        if kind is not ABSENT:
            standing = getattr(base, key, ABSENT) if base is not ABSENT else _default(form, key)
            outcomes[key] = _check(table[key], kind, scope.field(key), standing)
            problems += outcomes[key].problems
        elif key not in form.result:
            problems += scope.field(key).refuse(_unknown(key, form)).problems
    left_out = [
        key
        for key, entry in form.entries.items()
        if entry.required and base is ABSENT and key not in table and key not in known
    ]
    for key in left_out:
        problems += scope.field(key).refuse("is missing.").problems
    values = {key: o.value for key, o in outcomes.items() if o.value is not FAILED}
    return _Filled(values, frozenset(outcomes) - values.keys(), bool(left_out), tuple(problems))


def _default(form: Form, key: str) -> Any:
    return form.entries.get(key, Entry(Any)).default


def _unknown(key: str, form: Form) -> str:
    names = (*form.entries, *form.result)
    hint = near(key, names) or f"; there are: {', '.join(names) or 'none'}."
    return f"unknown key of {form.target.__name__}{hint}"


def _make(form: Form, filled: _Filled, scope: Scope, base: Any) -> Outcome:
    """Call the target, unless a required key is missing or wrong."""
    if base is not ABSENT:
        return _try(lambda **fields: replace(base, **fields), filled, scope, filled.values)
    optional = {key for key, entry in form.entries.items() if not entry.required}
    needed = (*form.entries, *filled.failed)
    absent = [key for key in needed if key not in optional and key not in filled.values]
    if absent:
        return Outcome(problems=_further(form, filled, scope, absent))
    return _try(form.target, filled, scope, optional)


def _further(
    form: Form, filled: _Filled, scope: Scope, absent: Collection[str]
) -> tuple[Problem, ...]:
    """Return what a class says about its other keys, when required ones are missing or wrong.

    NaN, or an empty list, stands in for those. Most classes refuse that, which is only a
    consequence; so is every complaint that does not name a key that was given.
    """
    if not isinstance(form.target, type):
        return ()
    try:
        # Not by a call: that refuses the stand-ins before the class itself says anything.
        made: Any = object.__new__(form.target)
        made.__init__(**filled.values, **{key: _stand_in(form.kind(key)) for key in absent})
    except CompositionError:
        return ()
    except ValueError as error:
        told = _complaints(error, filled.values, {*filled.failed, *absent})
        return tuple(_placed(text, named, scope) for text, named in told if named)
    except (ArithmeticError, AttributeError, LookupError, TypeError):
        pass
    return ()


def _stand_in(kind: Any) -> Any:
    return () if typing.get_origin(kind) is tuple else math.nan


def _amend(made: Outcome, form: Form, table: Mapping[str, Any], scope: Scope) -> Outcome:
    """Replace fields of a function's result by those that its table gives."""
    keys = [key for key in table if key in form.result and form.kind(key) is ABSENT]
    if not keys:
        return made
    result = Form(form.target, {key: form.result[key] for key in keys})
    base = made.guess if made.value is FAILED else made.value
    given = {key: table[key] for key in keys}
    filled = _fill(result, given, scope, ABSENT if base is FAILED else base)
    problems = (*made.problems, *filled.problems)
    if made.value is FAILED:
        return Outcome(problems=problems)
    changed = _make(result, filled, scope, made.value)
    return Outcome(changed.value, (*problems, *changed.problems))


def _try(
    call: Callable[..., Any], filled: _Filled, scope: Scope, optional: Collection[str]
) -> Outcome:
    """Call with the good values; after a refusal, again without the keys that it names.

    So one refusal does not hide the next. A refusal that names a key already found wrong, or a
    composition without such a key, may be only a consequence, and is not reported.
    """
    values, wrong = dict(filled.values), set(filled.failed)
    problems: list[Problem] = []
    while True:
        try:
            value = call(**values)
        except CompositionError as error:
            misfits = () if wrong else scope.refuse(*error.problems).problems
            return Outcome(problems=(*problems, *misfits))
        except (ValueError, TypeError, AnyfleetError) as error:
            told = _complaints(error, values, wrong)
            problems += [_placed(text, named, scope) for text, named in told]
            if not told or not all(named and named <= set(optional) for _, named in told):
                return Outcome(problems=tuple(problems))
            wrong |= {key for _, named in told for key in named}
            values = {key: value for key, value in values.items() if key not in wrong}
        else:
            return Outcome(FAILED if wrong else value, tuple(problems), guess=value)


def _complaints(
    error: Exception, given: Collection[str], wrong: Collection[str]
) -> list[tuple[str, frozenset[str]]]:
    """Return what an error says, with the keys that it names; nothing about wrong keys."""
    texts = error.problems if isinstance(error, Refusal) else (str(error),)
    keys = frozenset((*given, *wrong))
    named = [(text, _named(text, keys)) for text in texts]
    return [(text, of) for text, of in named if not of.intersection(wrong)]


def _named(message: str, keys: frozenset[str]) -> frozenset[str]:
    """Return the keys that a message has as `Part.key`; without any, those that are its words."""
    return keys.intersection(re.findall(r"\w\.(\w+)", message)) or keys.intersection(
        re.findall(r"\w+", message)
    )


def _placed(message: str, named: frozenset[str], scope: Scope) -> Problem:
    """Return a problem at the one key that a complaint names, or at the whole table."""
    return Problem((scope.field(*named) if len(named) == 1 else scope).path, message)


def _misfit(value: Any, kind: type) -> str:
    return "" if value is FAILED else _misfit_class(type(value), kind)


def _misfit_class(found: type, kind: type) -> str:
    """Return why a class cannot stand where a `kind` is due, or ""."""
    if is_interface(kind):
        absent = lacking(found, kind)
        return (
            f"{found.__name__} is no {kind.__name__}: it lacks {', '.join(absent)}."
            if absent
            else ""
        )
    return "" if issubclass(found, kind) else f"{found.__name__} is no {kind.__name__}."
