"""Run files that build on others: `extends = "base.toml"`, or a list of files, the last wins.

Tables are joined key by key, and the file that extends has the last word. A table whose `use` names
another part replaces the whole table below it: the keys of the one part mean nothing to the other.
Everything else is replaced as a whole, lists too.

Names of files are relative to the file in which they stand, and so are all relative paths: a base
file means the same data whoever extends it. A base file gains nothing by being one: `[allow]` in it
is a request like any other, and code is looked for beside the run file alone.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anyfleet.config.allowed_packages import packages_in
from anyfleet.config.number_values import refuse_long_keys, too_deep
from anyfleet.errors import ConfigError, Problem

_MOST = 20  # files, each of which extends the next


@dataclass(frozen=True)
class Written:
    """What stands in a run file and in those that it extends, without `extends` and `[allow]`."""

    data: dict[str, Any]
    files: Mapping[str, Path]  # by path of a key: the file that gives it; empty: the run file alone
    asked: tuple[str, ...]  # packages whose code the files ask for
    problems: tuple[Problem, ...]  # of their tables [allow]


@dataclass(frozen=True)
class _Given:
    """A value of a run file, and the file that gives it; a table holds further ones."""

    value: Any
    file: Path


@dataclass(frozen=True)
class _Joined:
    """A run file, joined with those that it extends."""

    table: _Given
    asked: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()


def written(file: Path) -> Written:
    """Return what a run file says together with those it extends; raise ConfigError if it cannot.

    That is if a file is missing, is not plain, is not TOML, or extends itself in the end.
    """
    data = _parsed(file)
    extended = "extends" in data
    found = _joined(file, data, (), {})
    files = dict(_files(found.table, "")) if extended else {}
    return Written(_plain(found.table), files, found.asked, found.problems)


def _joined(
    file: Path, data: dict[str, Any], above: tuple[Path, ...], known: dict[Path, _Joined | None]
) -> _Joined:
    """Return a file with those it extends; raise ConfigError if one of them is wrong.

    `above` are the files that extend it. `known` are files that were read before: each is read, and
    its problems are told, once; None stands for a wrong one.
    """
    above = (*above, file)
    bases = [*_bases(data.pop("extends", []), file, above)]
    asked, wrong = packages_in(data.pop("allow", {}))
    if len(above) > 1:
        wrong = [Problem(f"{each.path} (in {file})", each.message) for each in wrong]
    under = _Joined(_Given({}, file))
    problems: list[Problem] = []
    for base in bases:
        place = base.resolve()
        if place not in known:
            known[place] = None
            try:
                known[place] = _joined(base, _parsed(base), above, known)
            except ConfigError as error:
                problems += error.problems
        if (found := known[place]) is not None:
            under = _over(under, found)
    if problems:
        raise ConfigError(problems)
    return _over(under, _Joined(_given(data, file), asked, tuple(wrong)))


def _bases(extends: Any, file: Path, above: tuple[Path, ...]) -> Iterator[Path]:
    """Yield the files that a file extends; raise ConfigError with all that it cannot."""
    names = [extends] if isinstance(extends, str) else extends
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            [Problem(_where(above), 'expected "base.toml", or a list of such names.')]
        )
    paths = [file.parent / name for name in names]
    wrong = [why for path in paths if (why := _unfit(path, above))]
    if wrong:
        raise ConfigError([Problem(_where(above), why) for why in wrong])
    yield from paths


def _where(above: tuple[Path, ...]) -> str:
    return "extends" if len(above) == 1 else f"extends (in {above[-1]})"


def _unfit(path: Path, above: tuple[Path, ...]) -> str:
    """Return why a file cannot be extended, or ""."""
    try:
        place = path.resolve()
        if place.suffix != ".toml":
            return f"{path} is not a run file: its name must end in .toml."
        if not place.exists():
            return f"{path} does not exist; name a file relative to the one that extends it."
        if not place.is_file():
            return f"{path} is not a plain file."
        files = [each.resolve() for each in above]
    except (OSError, RuntimeError, ValueError) as error:  # a ring of links, no name of a file
        return f"{str(path)!r} cannot be read: {error}."
    if place in files:
        ring = " extends ".join(str(each) for each in (*above[files.index(place) :], path))
        return f"files extend each other in a ring: {ring}. Take one of them out."
    return f"more than {_MOST} files extend each other; join some." if len(above) >= _MOST else ""


def _parsed(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
        refuse_long_keys(text)
        found = tomllib.loads(text)
    except OSError as error:
        raise ConfigError([Problem(str(file), f"cannot be read: {error.strerror}.")]) from error
    except RecursionError as error:
        told = "not valid TOML: tables or lists are nested too deeply."
        raise ConfigError([Problem(str(file), told)]) from error
    except ValueError as error:  # also bytes that are no text, and numbers of thousands of digits
        raise ConfigError([Problem(str(file), f"not valid TOML: {error}.")]) from error
    if deep := too_deep(found):
        raise ConfigError([Problem(f"{deep.path} (in {file})", deep.message)])
    return found


# --- tables whose values know their file --------------------------------------------------------


def _given(value: Any, file: Path) -> _Given:
    inner = {key: _given(item, file) for key, item in value.items()} if _is_table(value) else value
    return _Given(inner, file)


def _is_table(value: Any) -> bool:
    return isinstance(value, dict)


def _over(under: _Joined, over: _Joined) -> _Joined:
    """Return two run files as one, in which the second has the last word."""
    return _Joined(
        _laid(under.table, over.table),
        tuple(dict.fromkeys((*under.asked, *over.asked))),
        (*under.problems, *over.problems),
    )


def _laid(under: _Given, over: _Given) -> _Given:
    """Return a value laid over another: tables are joined, unless they mean different parts."""
    if not (_is_table(under.value) and _is_table(over.value)) or _another(under, over):
        return over
    joined = dict(under.value)
    for key, item in over.value.items():
        joined[key] = _laid(joined[key], item) if key in joined else item
    return _Given(joined, under.file)


def _another(under: _Given, over: _Given) -> bool:
    """Return whether the table above names another part than the one below."""
    names = [given.value["use"].value if "use" in given.value else None for given in (under, over)]
    return names[1] is not None and names[0] != names[1]


def _plain(given: _Given) -> Any:
    if not _is_table(given.value):
        return given.value
    return {key: _plain(item) for key, item in given.value.items()}


def _files(given: _Given, path: str) -> Iterator[tuple[str, Path]]:
    """Yield the path of every key, and the file that gives it."""
    if path:
        yield path, given.file
    if _is_table(given.value):
        for key, item in given.value.items():
            yield from _files(item, f"{path}.{key}" if path else key)


def laid_over(under: Mapping[str, Any], *over: Mapping[str, Any]) -> dict[str, Any]:
    """Return tables laid over one another, as files that extend one another are."""
    nowhere = Path()
    found = _given(dict(under), nowhere)
    for table in over:
        found = _laid(found, _given(dict(table), nowhere))
    joined: dict[str, Any] = _plain(found)
    return joined
