"""Run files: TOML from disk, `key=value` overrides, and parts that lie next to the file."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from anyfleet.config.loading import load
from anyfleet.errors import ConfigError, Problem
from anyfleet.naming import near

__all__ = ["Source", "override", "read"]

_BARE_WORD = re.compile(r"[A-Za-z_][\w.:/+-]*")


@dataclass(frozen=True)
class Source:
    """A run file as read: its data without `[allow]`, and whose code it may name.

    `problems` are those of overrides, which are not in the data; `load` reports them with the rest.
    """

    data: Mapping[str, Any]
    allow: tuple[str, ...] = ()
    folder: Path | None = None
    problems: tuple[Problem, ...] = ()

    def load(self, kind: Any = None, *, homes: Mapping[str, str] = MappingProxyType({})) -> Any:
        """The value that the file describes; see `load`.

        A module next to the file is found too, when its package is allowed.
        """
        try:
            with _importable(self.folder, self.allow):
                value = load(self.data, kind, allow=self.allow, homes=homes)
        except ConfigError as error:
            raise ConfigError((*self.problems, *error.problems)) from error
        if self.problems:
            raise ConfigError(self.problems)
        return value


def read(path: str | Path, overrides: Sequence[str] = (), allow: Collection[str] = ()) -> Source:
    """Read a TOML file, apply `key=value` overrides, and unite its `[allow] packages` with ours.

    Overrides that cannot be applied are kept for `Source.load`, to be told with all else.
    """
    file = Path(path)
    try:
        written = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([Problem(str(file), f"cannot be read: {error.strerror}.")]) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError([Problem(str(file), f"not valid TOML: {error}.")]) from error
    data, problems = _overridden(written, overrides)
    packages, wrong = _packages(data.pop("allow", {}))
    if wrong:  # Without the list, every own part would seem to be forbidden.
        raise ConfigError((*problems, *wrong))
    allowed = tuple(dict.fromkeys((*packages, *allow)))
    return Source(data, allowed, file.resolve().parent, problems)


def override(data: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of `data` with each `dotted.path=value` put in; values are TOML or bare words."""
    result, problems = _overridden(data, overrides)
    if problems:
        raise ConfigError(problems)
    return result


def _overridden(
    data: Mapping[str, Any], overrides: Sequence[str]
) -> tuple[dict[str, Any], tuple[Problem, ...]]:
    """With the overrides that can be applied, and what is wrong with the others."""
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
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError as error:
        if _BARE_WORD.fullmatch(text):
            return text
        raise ValueError(f"{text!r} is neither a TOML value nor a plain word: {error}.") from error


def _put(data: Any, keys: Sequence[str], value: Any) -> None:
    """Set one value in a tree that is ours; tables on the way are made."""
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
    raise ValueError(f"{key!r} is no position in a list of {len(items)}.")


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list | tuple) else value


def _packages(table: Any) -> tuple[tuple[str, ...], list[Problem]]:
    problems: list[Problem] = []
    packages = table.get("packages", []) if isinstance(table, Mapping) else None
    if not isinstance(packages, list) or not all(isinstance(name, str) for name in packages):
        problems.append(Problem("allow", 'expected [allow] with packages = ["name", ...].'))
    else:
        problems += [
            Problem(f"allow.{key}", f"unknown key{near(key, ['packages'])}")
            for key in table
            if key != "packages"
        ]
    return tuple(packages or ()) if not problems else (), problems


@contextmanager
def _importable(folder: Path | None, allow: Sequence[str]) -> Iterator[None]:
    """Let allowed modules that lie in `folder` be imported, for the time of a load only.

    The folder comes last, so that a file there cannot stand in for an installed package.
    """
    own = [] if folder is None else [name for name in allow if _lies_in(folder, name)]
    if not own:
        yield
        return
    _refuse_namesakes(folder, own)
    sys.path.append(str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _lies_in(folder: Path, name: str) -> bool:
    root = name.partition(".")[0]
    return (folder / f"{root}.py").is_file() or (folder / root).is_dir()


def _refuse_namesakes(folder: Path | None, names: Sequence[str]) -> None:
    """Python keeps one module per name: a second one of that name would silently be the first."""
    for root in {name.partition(".")[0] for name in names}:
        file = getattr(sys.modules.get(root), "__file__", None)
        if file is not None and folder not in Path(file).resolve().parents:
            message = f"{root} lies next to the run file, but {file} is loaded already: rename one."
            raise ConfigError([Problem("allow.packages", message)])
