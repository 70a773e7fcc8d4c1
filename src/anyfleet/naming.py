"""Names for code in plain data: "package.module:Name" to a class or function and back.

A name is looked up only inside `anyfleet` and the packages that the caller allows, so that a run
file cannot reach the rest of the interpreter: `os:system` is refused, and so is a name that an
allowed module merely imported from elsewhere.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from anyfleet.errors import BadName

__all__ = ["Factory", "FrozenMapping", "find", "name_of", "near", "public_names"]

_WORD = r"[A-Za-z]\w*"
_NAME = re.compile(rf"(?P<module>__main__|{_WORD}(?:\.{_WORD})*):(?P<attribute>{_WORD})")


def find(name: str, allow: Collection[str] = ()) -> Any:
    """The class or function called `name`, from `anyfleet` or a package in `allow`."""
    module_name = _parse(name)[0]
    if not _allowed(module_name, allow):
        root = module_name.partition(".")[0]
        raise BadName(
            f'"{name}" is outside the allowed packages ({", ".join(["anyfleet", *allow])}). '
            f'If you trust it, add "{root}" to [allow] packages, or use --allow {root}.'
        )
    found = _look_up(name)
    if not _allowed(found.__module__, allow):
        raise BadName(f'"{name}" comes from {found.__module__}, which is not an allowed package.')
    return found


def name_of(thing: Callable[..., Any]) -> str:
    """The name under which `find` gives `thing`, in the highest package below the root."""
    module_name, name = thing.__module__, thing.__qualname__
    if not name.isidentifier() or name.startswith("_"):
        raise BadName(
            f"{module_name}:{name} cannot be named in plain data. Define it at the top of a "
            "module, under a public name."
        )
    pieces = module_name.split(".")
    packages = (".".join(pieces[:depth]) for depth in range(min(2, len(pieces)), len(pieces)))
    for package in packages:
        if vars(sys.modules.get(package, ModuleType(package))).get(name) is thing:
            return f"{package}:{name}"
    return f"{module_name}:{name}"


def public_names(module_name: str) -> tuple[str, ...]:
    """What a module or package shows in its `__all__`; nothing when it cannot be imported."""
    try:
        return tuple(getattr(_module(module_name), "__all__", ()))
    except BadName:
        return ()


def near(word: str, words: Iterable[str]) -> str:
    """', did you mean "count" or "counts"?' when there are such words, otherwise nothing."""
    # A class rather than the module beside it that has its name in small letters.
    ordered = sorted(words, reverse=True)
    by_lower = {known.lower(): known for known in ordered if not known.startswith("_")}
    close = difflib.get_close_matches(word.lower(), by_lower, n=3)
    names = " or ".join(f'"{by_lower[lower]}"' for lower in close)
    return f", did you mean {names}?" if names else ""


class FrozenMapping(Mapping[str, Any]):
    """A mapping that cannot change and can be hashed; lists inside become tuples."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, Any]) -> None:
        self._items = {key: _frozen(value) for key, value in items.items()}

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)


@dataclass(frozen=True)
class Factory:
    """A call that is written down, not made yet: a class or function by name, and its options.

    Whoever makes a Factory answers for its name: `config.load` looks it up among the allowed
    packages only, `Factory.of` gets the thing itself.
    """

    use: str
    options: Mapping[str, Any] = field(default_factory=lambda: FrozenMapping({}))

    def __post_init__(self) -> None:
        _parse(self.use)
        if "use" in self.options:
            raise ValueError('options must not contain "use": it names the factory itself.')
        object.__setattr__(self, "options", FrozenMapping(self.options))

    @classmethod
    def of(cls, function: Callable[..., Any], **options: Any) -> Factory:
        """The written form of `function(**options)`."""
        return cls(name_of(function), options)

    def make(self) -> Any:
        """Make the call; every time a new object."""
        return _look_up(self.use)(**self.options)


def _parse(name: str) -> tuple[str, str]:
    match = _NAME.fullmatch(name)
    if match is None:
        raise BadName(f'"{name}" is not a name of the form "package.module:Name".')
    return match["module"], match["attribute"]


def _look_up(name: str) -> Any:
    module_name, attribute = _parse(name)
    module = _module(module_name)
    found = getattr(module, attribute, None)
    if found is None:
        hint = near(attribute, dir(module)) or "."
        raise BadName(f'There is no "{attribute}" in {module_name}{hint}')
    if not (inspect.isclass(found) or inspect.isfunction(found)):
        raise BadName(f'"{name}" is neither a class nor a function.')
    return found


def _allowed(module_name: str, allow: Collection[str]) -> bool:
    return any(
        module_name == package or module_name.startswith(f"{package}.")
        for package in ("anyfleet", *allow)
    )


def _module(module_name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except Exception as error:  # a user's module can fail in any way at import
        raise BadName(f"{module_name} cannot be imported: {_brief(error)}.") from error


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(".")


def _frozen(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_frozen(item) for item in value)
    return FrozenMapping(value) if isinstance(value, Mapping) else value
