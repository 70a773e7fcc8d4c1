"""Run files: TOML from disk with the files it extends, overrides, and code beside the file."""

from __future__ import annotations

import re
import tomllib
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anyfleet.config.allowed_packages import (
    importable,
    not_installed,
    refused,
    trusted,
)
from anyfleet.config.extending import written
from anyfleet.config.loading import load, nearest
from anyfleet.config.number_values import refuse_long_keys, too_deep
from anyfleet.errors import AnyfleetWarning, BadCall, ConfigError, Problem
from anyfleet.names import HOMES

__all__ = ["Source", "override", "read"]

_BARE_WORD = re.compile(r"[A-Za-z_][\w.:/+-]*")
_MEANT_AS_TEXT = re.compile(r"\w[\w .:/+-]*")


@dataclass(frozen=True)
class Source:
    """A run file as read: its data without `[allow]`, and the packages whose code it may name.

    `allow` is what the caller and the user's settings grant. `asked` is what the file asks for,
    which grants nothing. `problems` are those of overrides, which are not in the data; `load`
    reports them with the rest. `files` tells which other file gives a key, if it extends some.
    """

    data: Mapping[str, Any]
    allow: tuple[str, ...] = ()
    folder: Path | None = None
    problems: tuple[Problem, ...] = ()
    asked: tuple[str, ...] = ()
    installed: tuple[str, ...] = ()  # those of `allow` that only the settings name
    files: Mapping[str, Path | None] = field(default_factory=dict)  # by path; None: the run file

    def load(self, kind: Any = None, *, homes: Mapping[str, str] = HOMES) -> Any:
        """Return the value that the file describes, or raise ConfigError with every problem.

        A module beside the file is found too, if the caller has allowed its package. Relative paths
        refer to the folder of the file in which they stand. Warn of a package that the file asks
        for but does not need.
        """
        named = [name for name in self.allow if name not in self.installed]
        folders = {
            path: self.folder if file is None else file.resolve().parent
            for path, file in self.files.items()
        }
        try:
            with importable(self.folder, named):
                value = load(
                    self.data,
                    kind,
                    allow=self.allow,
                    homes=homes,
                    folder=self.folder,
                    folders=folders,
                )
        except ConfigError as error:
            requests = refused(self.asked, self.allow, self.folder)
            absent = not_installed(self.installed, self.folder)
            found = map(self._placed, error.problems)
            raise ConfigError((*self.problems, *requests, *absent, *found)) from error
        if self.problems:
            raise ConfigError(self.problems)
        for request in refused(self.asked, self.allow, self.folder):
            told = f"{request} It was not needed here."
            warnings.warn(told, AnyfleetWarning, stacklevel=2)
        return value

    def _placed(self, problem: Problem) -> Problem:
        """Return a problem with the file in which its key stands, if that is another one."""
        file = nearest(self.files, problem.path)
        return problem if file is None else Problem(f"{problem.path} (in {file})", problem.message)


def read(path: str | Path, overrides: Sequence[str] = (), allow: Collection[str] = ()) -> Source:
    """Read a TOML file with those it extends, and apply `key=value` overrides.

    Only `allow` and the user's own settings grant packages; `[allow]` in the file is a request.
    Overrides that cannot be applied are kept for `Source.load`, which reports all problems.
    """
    file = Path(path)
    _refuse_text("overrides", overrides)
    _refuse_text("allow", allow)
    found = written(file)
    data, problems = _overridden(found.data, overrides)
    if data.pop("allow", None) is not None:
        told = "cannot be an override: use --allow PACKAGE, or allow=[...] in Python."
        problems = (*problems, Problem("allow", told))
    if data.pop("extends", None) is not None:
        told = "cannot be an override: write a file that extends others."
        problems = (*problems, Problem("extends", told))
    deep = too_deep(data)
    if found.problems or deep:
        raise ConfigError((*problems, *found.problems, *([deep] if deep else [])))
    settings = tuple(name for name in trusted() if name not in allow)
    granted = tuple(dict.fromkeys((*allow, *settings)))
    asked, files = found.asked, _other_files(found.files, file, overrides)
    return Source(data, granted, file.resolve().parent, problems, asked, settings, files)


def _other_files(
    files: Mapping[str, Path], file: Path, overrides: Sequence[str]
) -> dict[str, Path | None]:
    """Return which other file gives a key; None for keys of the run file and of overrides."""
    found = {path: None if each == file else each for path, each in files.items()}
    for path in (text.partition("=")[0].strip() for text in overrides if found):
        found = {key: each for key, each in found.items() if not key.startswith(f"{path}.")}
        found[path] = None
    return found


def _refuse_text(name: str, given: Collection[str]) -> None:
    """Raise BadCall for one text where a list is due: it would be read letter by letter."""
    if isinstance(given, str | bytes):
        raise BadCall(f"{name} must be a list of texts, got the text {given!r}; write [{given!r}].")


def override(data: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return a copy of `data` with each `dotted.path=value`; values are TOML or bare words."""
    result, problems = _overridden(data, overrides)
    if problems:
        raise ConfigError(problems)
    return result


def _overridden(
    data: Mapping[str, Any], overrides: Sequence[str]
) -> tuple[dict[str, Any], tuple[Problem, ...]]:
    """Return the data with the overrides that can be applied, and the problems of the others."""
    result: Any = _copy(data)
    problems: list[Problem] = []
    for text in overrides:
        path, equals, value = text.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            problems.append(Problem(text, "an override has the form dotted.path=value."))
            continue
        try:
            _put(result, keys, _parse(value.strip()))
        except ValueError as error:
            problems.append(Problem(path.strip(), str(error)))
    return dict(result), tuple(problems)


def _parse(text: str) -> Any:
    refuse_long_keys(text)
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except RecursionError as error:
        raise ValueError("lists or tables are nested too deeply.") from error
    except ValueError as error:
        if _BARE_WORD.fullmatch(text):
            return text
        told = f"{text!r} is neither a TOML value nor a plain word: {error}."
        if _MEANT_AS_TEXT.fullmatch(text):
            told += f" A text with such signs has quotation marks: in a shell 'key=\"{text}\"'."
        raise ValueError(told) from error


def _put(data: Any, keys: Sequence[str], value: Any) -> None:
    """Set one value in place; tables on the way are made."""
    for depth, key in enumerate(keys[:-1]):
        data = data.setdefault(key, {}) if isinstance(data, dict) else data[_index(data, key)]
        if not isinstance(data, dict | list):
            where = ".".join(keys[: depth + 1])
            raise ValueError(f"there is nothing below {where}, which is {data!r}.")
    last = keys[-1]
    if isinstance(data, dict):
        data[last] = value
    else:
        data[_index(data, last)] = value


def _index(items: list[Any], key: str) -> int:
    if key.isdecimal() and int(key) < len(items):
        return int(key)
    raise ValueError(f"{key!r} is not a position in a list of {len(items)}.")


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list | tuple) else value
