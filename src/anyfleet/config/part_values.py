"""Tables with a `use`: which code they mean, which keys fit it, and what it makes of them."""

from __future__ import annotations

import inspect
import math
import re
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, Protocol

from anyfleet.config.forms import ABSENT, Entry, Form, form_of, hints_of, lacking
from anyfleet.config.outcome import FAILED, Outcome, Scope
from anyfleet.errors import AnyfleetError, BadName, CompositionError, Problem, Refusal
from anyfleet.names import OWN, Factory, find, lies_within, name_of, near, public_names

__all__ = ["Check", "code", "factory", "part"]


class Check(Protocol):
    """How to check a value below a part; `base` is what stands there by default."""

    def __call__(self, value: Any, kind: Any, scope: Scope, base: Any = ABSENT) -> Outcome: ...


def part(value: Any, kind: type, scope: Scope, base: Any, check: Check) -> Outcome:
    """The part that a table describes: call its class or function with its checked keys.

    A table without `use` changes `base`. Keys of a function that are no parameters but fields of
    what it returns replace these fields.
    """
    if not isinstance(value, Mapping):
        return scope.refuse(f"expected a table{_choices(scope)}, got {value!r}.")
    target = _target(value, kind, scope, base)
    if isinstance(target, Outcome):
        return target
    form = form_of(target)
    amended = base if "use" not in value and type(base) is target else ABSENT
    filled = _fill(form, value, scope, amended, check)
    made = _make(form, filled, scope, amended)
    if form.result:
        made = _amend(made, form, value, scope, check)
    wrong = _misfit(made.value, kind)
    problems = (*filled.problems, *made.problems)
    if made.value is not FAILED and wrong:
        return Outcome(problems=(*problems, *scope.refuse(wrong).problems))
    return Outcome(made.value, problems)


def factory(value: Any, scope: Scope, base: Any, check: Check) -> Outcome:
    """A call that is checked now and made later; a text is a name without options.

    What it will return is not known yet. So a name of Anyfleet's own may stand only in a field that
    has a home for it: networks in `model`.
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
    filled = _fill(form, table, scope, ABSENT, check, known=kept)
    if filled.failed or filled.missing:
        return Outcome(problems=filled.problems)
    name = _full_name(table["use"], place)
    return Outcome(Factory(name, {**kept, **filled.values}), filled.problems)


def code(value: Any, kind: Any, scope: Scope) -> Outcome:
    """A class or function itself, by its name; one of ours must return what is asked for."""
    if not isinstance(value, str):
        return scope.refuse(f'expected a name such as "package.module:name", got {value!r}.')
    try:
        found = find(_full_name(value, scope), scope.allow, scope.packages)
    except BadName as error:
        return scope.refuse(f"{error}{_choices(scope)}")
    wanted = (typing.get_args(kind) or (Any,))[-1]
    if lies_within(found.__module__, (OWN,)) and wanted is not Any and _returned(found) != wanted:
        return scope.refuse(f"{found.__name__} does not return a {_word(wanted)}{_choices(scope)}")
    return Outcome(found)


@dataclass(frozen=True)
class _Filled:
    """A form after checking: what fits, which keys failed, and whether something is missing."""

    values: Mapping[str, Any]
    failed: frozenset[str]
    missing: bool
    problems: tuple[Problem, ...]


def _target(table: Mapping[str, Any], kind: type, scope: Scope, base: Any) -> Any:
    """The class or function that a table means, or the outcome that says why there is none."""
    use = table.get("use")
    if use is None:
        if is_dataclass(base):
            return type(base)
        if is_dataclass(kind) and not inspect.isabstract(kind):
            return kind
        return scope.refuse(f"`use` is missing: it names the part{_choices(scope)}.")
    if is_dataclass(kind) and use in _names(kind):
        return kind
    found = _looked_up(table, scope)
    if isinstance(found, Outcome):
        other = _from_another_home(use, kind, scope)
        return found if other is None else other
    if wrong := _unfit(found, kind):
        return scope.item("use").refuse(wrong)
    return found


def _looked_up(table: Mapping[str, Any], scope: Scope) -> Any:
    """The class or function that `use` names, or the outcome that says why it may not."""
    use = table.get("use")
    if not isinstance(use, str):
        return scope.item("use").refuse(f"expected a name, got {use!r}.")
    try:
        return find(_full_name(use, scope), scope.allow, scope.packages)
    except BadName as error:
        return scope.item("use").refuse(f"{error}{_choices(scope)}")


def _from_another_home(use: Any, kind: type, scope: Scope) -> Any:
    """What another home exports, where a field that has none asks for a part of that very kind.

    A trainer of one's own, say, may have a codec inside. The class must name the kind as its base:
    that it merely looks like one is not enough.
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
    """How a class itself is named: by where it is shown, or by where it is defined."""
    try:
        return name_of(kind), f"{kind.__module__}:{kind.__name__}"
    except BadName:
        return ()


def _unfit(found: Any, kind: type) -> str:
    """Why a class or function may not be called where a `kind` is expected; empty if it may.

    One of Anyfleet's own functions must say that it returns such a thing. Whoever allows other
    code trusts it: where that does not say what it returns, its result is looked at instead.
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
    """The type that a function says it returns; Any if it does not say."""
    return hints_of(function).get("return", Any)


def _word(kind: Any) -> str:
    return getattr(kind, "__name__", str(kind))


def _full_name(use: str, scope: Scope) -> str:
    return use if ":" in use or not scope.home else f"{scope.home}:{use}"


def _choices(scope: Scope) -> str:
    names = public_names(scope.home) if scope.home else ()
    return f" ({scope.home} has: {', '.join(names)})" if names else ""


def _fill(
    form: Form,
    table: Mapping[str, Any],
    scope: Scope,
    base: Any,
    check: Check,
    known: Collection[str] = (),
) -> _Filled:
    outcomes: dict[str, Outcome] = {}
    problems: list[Problem] = []
    for key in (key for key in table if key != "use"):
        kind = form.kind(key)
        if kind is not ABSENT:
            standing = getattr(base, key, ABSENT) if base is not ABSENT else _default(form, key)
            outcomes[key] = check(table[key], kind, scope.field(key), standing)
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
    """Call the target, unless a key that it cannot do without is missing or wrong."""
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
    """What a class says about its other keys, when some that it cannot do without are wrong.

    No number, or an empty list, stands in for those. Most classes refuse that, which is a
    consequence only; so is all that is not a complaint about a key that was given.
    """
    if not isinstance(form.target, type):
        return ()
    try:
        # Not by a call: that would refuse the stand-ins before the class itself says anything.
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


def _amend(
    made: Outcome, form: Form, table: Mapping[str, Any], scope: Scope, check: Check
) -> Outcome:
    """Replace fields of what a function returned by those that its table gives."""
    keys = [key for key in table if key in form.result and form.kind(key) is ABSENT]
    if not keys:
        return made
    result = Form(form.target, {key: form.result[key] for key in keys})
    base = made.guess if made.value is FAILED else made.value
    given = {key: table[key] for key in keys}
    filled = _fill(result, given, scope, ABSENT if base is FAILED else base, check)
    problems = (*made.problems, *filled.problems)
    if made.value is FAILED:
        return Outcome(problems=problems)
    changed = _make(result, filled, scope, made.value)
    return Outcome(changed.value, (*problems, *changed.problems))


def _try(
    call: Callable[..., Any], filled: _Filled, scope: Scope, optional: Collection[str]
) -> Outcome:
    """Call with the good values; after a refusal again without what it names.

    So one refusal does not hide the next. A refusal that speaks of a key already found wrong, or
    a composition seen with such a key left out, may be a consequence only, and is not told.
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
    """What an error says, each with the keys that it names; nothing about keys known as wrong."""
    texts = error.problems if isinstance(error, Refusal) else (str(error),)
    keys = frozenset((*given, *wrong))
    named = [(text, _named(text, keys)) for text in texts]
    return [(text, of) for text, of in named if not of.intersection(wrong)]


def _named(message: str, keys: frozenset[str]) -> frozenset[str]:
    """The keys that a message has as `Part.key`; without any, those that are words of it."""
    return keys.intersection(re.findall(r"\w\.(\w+)", message)) or keys.intersection(
        re.findall(r"\w+", message)
    )


def _placed(message: str, named: frozenset[str], scope: Scope) -> Problem:
    """At the one key that a complaint names; otherwise at the whole table."""
    return Problem((scope.field(*named) if len(named) == 1 else scope).path, message)


def _misfit(value: Any, kind: type) -> str:
    return "" if value is FAILED else _misfit_class(type(value), kind)


def _misfit_class(found: type, kind: type) -> str:
    """Why a class cannot stand where a `kind` is expected; empty if it can."""
    if typing.Protocol in kind.__bases__:
        absent = lacking(found, kind)
        return (
            f"{found.__name__} is no {kind.__name__}: it lacks {', '.join(absent)}."
            if absent
            else ""
        )
    return "" if issubclass(found, kind) else f"{found.__name__} is no {kind.__name__}."
