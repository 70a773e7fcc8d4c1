"""Checks of calls from Python: unknown names and unfit values are refused as in a run file.

`checked` marks functions and classes that users call; every part of a method is checked because
its slot is a `Part`. What fits is read off the same annotations as for a run file, and one error
has all that is wrong with a call.
"""

import functools
import inspect
import numbers
import re
import types
import typing
from abc import ABC
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from decimal import Decimal
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np

from anyfleet.config.signatures import ABSENT, Form, form_of, lacking
from anyfleet.errors import BadCall, Refusal
from anyfleet.names import near

__all__ = ["OwnSignature", "Part", "check", "check_names", "checked", "described", "unfit"]

Target = TypeVar("Target", bound=Callable[..., Any])

_WORDS = {bool: "True or False", int: "a whole number", float: "a number", str: "a text"}
_BY_NAME = ("a function", "a text", "a path")  # a text is no slip there
_MOST = 60  # characters of a value that an error quotes


class OwnSignature:
    """The `__signature__` of a class whose `__new__` takes anything: the one of its `__init__`."""

    def __get__(self, instance: object, owner: type) -> inspect.Signature | None:
        if instance is not None:
            return None  # what can be called has a signature of its own
        whole = inspect.signature(owner.__init__)  # type: ignore[misc]
        return whole.replace(parameters=list(whole.parameters.values())[1:])


class Part(ABC):  # noqa: B024 - its slots have the abstract methods
    """The root of all slots. What fills a slot derives from it, so its arguments are checked."""

    def __new__(cls, /, *args: Any, **options: Any) -> Self:
        check(cls, args, options)
        return super().__new__(cls)


# Not in the class: what looks like a part need not have it.
Part.__signature__ = OwnSignature()  # type: ignore[attr-defined]


def checked(target: Target) -> Target:
    """Return a function or class that checks the names and types of its arguments first.

    A class keeps its `__init__`: the check happens in `__new__`, and subclasses inherit it. Its
    `_elsewhere`, if it has one, says of names that are not its own where they belong.
    """
    if isinstance(target, type):
        target.__new__ = _new  # type: ignore[method-assign]
        target.__signature__ = OwnSignature()  # type: ignore[attr-defined]
        return target

    @functools.wraps(target)
    def call(*args: Any, **options: Any) -> Any:
        check(call, args, options)
        return target(*args, **options)

    return typing.cast("Target", call)


def _new(cls: type, /, *args: Any, **options: Any) -> Any:
    check(cls, args, options)
    return object.__new__(cls)


def check(target: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Raise BadCall with everything that is wrong with a call of `target`."""
    if not args and not options:
        return
    form = form_of(target)
    given = {**dict(zip(_in_order(target), args, strict=False)), **options}
    strange, misfits = [*_strangers(form, options)], dict(_misfits(form, given))
    if not strange and not misfits:
        return
    clear = not strange and all(_is_clear(given[key], form.kind(key)) for key in misfits)
    own = _own_words(target, args, options) if clear else ()
    said = set(re.findall(r"\w+", " ".join(own)))
    raise BadCall(*strange, *own, *(text for key, text in misfits.items() if key not in said))


def _is_clear(value: Any, kind: Any) -> bool:
    """Return whether a class can say something sensible of an unfit value.

    It would read a text for a tuple letter by letter, and arrays have no truth value.
    """
    kinds = (kind, *typing.get_args(kind))
    many = any(typing.get_origin(each) in (tuple, list, Sequence) for each in kinds)
    return not hasattr(value, "__array__") and (not many or isinstance(value, tuple | list))


def _own_words(
    target: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]
) -> tuple[str, ...]:
    """Return what a class itself says of unfit values, if it gets so far: it knows what to do."""
    if not isinstance(target, type):
        return ()
    try:
        made: Any = object.__new__(target)
        made.__init__(*args, **options)
    except BadCall:
        pass  # of another call, inside: that is not what the caller wrote
    except Refusal as error:
        return error.problems
    except ValueError as error:
        return (str(error),)
    except (ArithmeticError, AttributeError, LookupError, TypeError):
        pass
    return ()


def check_names(target: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raise BadCall where `target` has no arguments of these names."""
    if problems := tuple(_strangers(form_of(target), options)):
        raise BadCall(*problems)


def unfit(value: Any, kind: Any) -> str:
    """Return what an annotation asks for where `value` does not fit it, otherwise "".

    What an annotation says about code (protocols aside) or about arrays is not looked into.
    """
    origin = typing.get_origin(kind) or kind
    if origin is typing.Annotated:
        return unfit(value, typing.get_args(kind)[0])
    if origin in (typing.Union, types.UnionType):
        asked = [unfit(value, each) for each in typing.get_args(kind)]
        return " or ".join(dict.fromkeys(asked)) if all(asked) else ""
    if origin is typing.Literal:
        choices = typing.get_args(kind)
        known = any(value is each or (type(value), value) == (type(each), each) for each in choices)
        return "" if known else _one_of(choices)
    if origin in (None, types.NoneType):
        return "" if value is None else "None"
    if origin in (tuple, list, Sequence):
        return _unfit_list(value, kind)
    if origin is Callable or origin is typing.get_origin(Callable[..., Any]):
        return "" if callable(value) else "a function"
    return _unfit_class(value, origin) if isinstance(origin, type) else ""


def described(value: Any) -> str:
    """Return what a value is and, where it is a common slip, what to do about it."""
    if isinstance(value, type):
        return f"the class {value.__name__}; did you forget the parentheses?"
    if inspect.isroutine(value) or isinstance(value, functools.partial):
        name = getattr(value, "__name__", "partial")
        return f"the function {name}; did you forget to call it?"
    if isinstance(value, str):
        return f"the text {_short(value)}"
    if value is None or isinstance(value, bool | int | float | tuple | list | Mapping):
        return _short(value)
    article = "an" if type(value).__name__[0] in "AEIOU" else "a"
    return f"{article} {type(value).__name__} ({_short(value)})"


def _name(target: Callable[..., Any]) -> str:
    """Return how a caller writes it: `fedavg`, `Experiment`, `Task.of`."""
    return target.__qualname__.rpartition("<locals>.")[2]


@lru_cache(maxsize=512)
def _in_order(target: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of what may be given without a name."""
    parameters = inspect.signature(target).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in parameters if p.kind in kinds)


def _strangers(form: Form, options: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the names of arguments."""
    name = _name(form.target)
    if form.open:
        return
    for key in options:
        if form.kind(key) is not ABSENT:
            continue
        told = f"{name}() has no argument {key!r}"
        if key in form.result:
            made = f"dataclasses.replace({name}(...), {key}=...)"
            yield f"{told}: it is a slot of the method that {name}() returns; use {made}."
            continue
        elsewhere: Mapping[str, str] = getattr(form.target, "_elsewhere", {})
        if key in elsewhere:
            yield f"{told}: it belongs to {elsewhere[key]}."
            continue
        inside = [field for field, entry in form.entries.items() if key in _fields(entry.default)]
        if inside:
            part = type(form.entries[inside[0]].default).__name__
            yield f"{told}: it belongs to {inside[0]}; use {inside[0]}={part}({key}=...)."
            continue
        yield told + (near(key, form.entries) or f"; there are: {', '.join(form.entries)}.")


def _fields(value: Any) -> tuple[str, ...]:
    if not is_dataclass(value) or isinstance(value, type):
        return ()
    return tuple(field.name for field in fields(value) if field.init)


def _misfits(form: Form, given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with the values of arguments, each with its name."""
    wrong = {
        key: asked
        for key, value in given.items()
        if form.kind(key) is not ABSENT and (asked := unfit(value, form.kind(key)))
    }
    for key, asked in wrong.items():
        value = given[key]
        plain = isinstance(value, bool | numbers.Number | str | tuple | list | None)
        others = () if plain else (k for k in wrong if k != key and not unfit(value, form.kind(k)))
        swapped = "".join(f"; is it the {other}?" for other in others)
        told = described(value) + (swapped or _remedy(value, asked))
        end = "" if told.endswith("?") else "."
        yield key, f"{_name(form.target)}.{key} must be {asked}, got {told}{end}"


def _remedy(value: Any, asked: str) -> str:
    if isinstance(value, str) and "number" in asked:
        return "; leave out the quotation marks"
    if isinstance(value, float | np.floating) and "a whole number" in asked and value % 1 == 0:
        return f"; write {int(value)}"
    if "number" in asked and any(_wrapped(each) for each in _each(value)):
        return "; use .item()"
    if isinstance(value, Decimal) and "number" in asked:
        return "; use float(…)"
    if asked.startswith("a tuple") and hasattr(value, "tolist"):
        return "; use tuple(….tolist())"
    if isinstance(value, str) and "a tuple" in asked:
        return f"; write ({_short(value)},)"
    if isinstance(value, str) and asked[:2] in ("a ", "an") and asked not in _BY_NAME:
        return "; only run files name things by texts, from Python pass the thing itself"
    return ""


def _each(value: Any) -> Sequence[Any]:
    return value if isinstance(value, tuple | list) else (value,)


def _wrapped(value: Any) -> bool:
    """Return whether a value is an array or a tensor of one number without an axis."""
    return hasattr(value, "item") and getattr(value, "ndim", None) == 0


def _one_of(choices: Sequence[Any]) -> str:
    if len(choices) > 2:
        return f"one of {', '.join(map(str, choices))}"
    return " or ".join(f'"{each}"' for each in choices)


def _unfit_list(value: Any, kind: Any) -> str:
    inner, origin = typing.get_args(kind), typing.get_origin(kind) or kind
    one_by_one = isinstance(value, list | tuple)
    if origin is Sequence:
        # Arrays and ranges are not looked into: they may be large, and hold one kind only.
        one_by_one = one_by_one or isinstance(value, str | deque)
        if not one_by_one and isinstance(value, Sequence | np.ndarray):
            return ""
    if not one_by_one:
        what = _WORDS.get(inner[0], "") if inner else ""
        example = {"a number": " of numbers", "a whole number": " of whole numbers"}.get(what, "")
        return f"a tuple{example}"
    if origin is tuple and inner and inner[-1] is not ...:
        kinds: Sequence[Any] = inner
        if len(inner) != len(value):
            return f"a tuple of {len(inner)}"
    else:
        kinds = [inner[0] if inner else Any] * len(value)
    asked = (unfit(each, kind) for each, kind in zip(value, kinds, strict=True))
    return next((f"a tuple in which each is {each}" for each in asked if each), "")


def _unfit_class(value: Any, kind: type) -> str:
    if kind in (Any, object, type):
        return ""
    if kind in _WORDS:
        return "" if _is_plain(value, kind) else _WORDS[kind]
    name = f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__}"
    if issubclass(kind, Enum):
        known = isinstance(value, kind) or any(value == each.value for each in kind)
        return "" if known else _one_of([each.value for each in kind])
    if issubclass(kind, Path):
        return "" if isinstance(value, str | Path) else "a path"
    if isinstance(value, type):
        return name
    if issubclass(kind, Part):
        return "" if isinstance(value, kind) else name
    if typing.Protocol in kind.__bases__:
        return "" if kind in type(value).__mro__ or _has_all(value, kind) else name
    if kind in (Mapping, AbstractSet) or is_dataclass(kind):
        return "" if isinstance(value, kind) else name
    return ""


def _has_all(value: Any, protocol: type) -> bool:
    """Return whether a value has the members of a protocol; a stand-in may make them when asked."""
    return all(hasattr(value, member) for member in lacking(type(value), protocol))


def _is_plain(value: Any, kind: type) -> bool:
    """Return whether a value is a truth value, number or text; those of numpy are some too."""
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool | np.bool_) and kind is bool
    if kind is int:
        return isinstance(value, numbers.Integral)
    return isinstance(value, numbers.Real if kind is float else kind)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MOST else f"{text[: _MOST - 1]}…"
