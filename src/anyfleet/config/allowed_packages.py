"""Allowed packages: whose code, besides Anyfleet's own, a run file may name.

Only the caller grants that, with `--allow` or `allow=[...]`, or the user's own settings. A table
`[allow]` in a run file is a request and grants nothing: the file may be a stranger's.

The settings are a TOML file with the same table:

    [allow]
    packages = ["my_parts"]

It is `~/.config/anyfleet/settings.toml`, or the file whose full path the environment variable
ANYFLEET_SETTINGS holds (empty: none). Nobody but its owner may be able to write it. It opens only
installed packages, never a module that lies beside a run file.
"""

from __future__ import annotations

import importlib.util
import os
import stat
import sys
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from anyfleet.errors import ConfigError, Problem
from anyfleet.names import how_to_allow, lies_within, near


def packages_in(table: Any) -> tuple[tuple[str, ...], list[Problem]]:
    """Return the packages that a table `[allow]` names, and the problems in it."""
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


def refused(
    asked: Collection[str], allow: Collection[str], folder: Path | None
) -> Iterator[Problem]:
    """Yield a problem for each package that a file asks for and nobody has allowed."""
    for name in asked:
        if not lies_within(name, allow):
            place = f", from {folder}" if folder is not None and _lies_in(folder, name) else ""
            told = f'the file asks for the code of "{name}"{place}. {how_to_allow(name)}'
            yield Problem("allow.packages", told)


def not_installed(trusted: Collection[str], folder: Path | None) -> Iterator[Problem]:
    """Yield a problem for each package of the settings that lies beside the file only."""
    for name in trusted:
        root = name.partition(".")[0]
        if folder is not None and _lies_in(folder, name) and not _installed(root):
            told = (
                f"your settings allow {root}, but settings open installed packages only, and this "
                f"one lies in {folder}. {how_to_allow(name)}"
            )
            yield Problem("allow.packages", told)


def _installed(root: str) -> bool:
    return root in sys.modules or importlib.util.find_spec(root) is not None


@contextmanager
def importable(folder: Path | None, allow: Sequence[str]) -> Iterator[None]:
    """Let allowed modules in `folder` be imported while the block runs.

    No other module is found there, whoever looks for it. An installed module comes first, so that
    one of the same name beside the file is refused.
    """
    roots = {name.partition(".")[0] for name in allow}
    own = frozenset() if folder is None else frozenset(r for r in roots if _lies_in(folder, r))
    if folder is None or not own:
        yield
        return
    _refuse_namesakes(folder, own)
    finder = _Beside(folder, own)
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Beside:
    """A finder of a few modules in one folder."""

    def __init__(self, folder: Path, roots: frozenset[str]) -> None:
        self._folder, self._roots = str(folder), roots

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return where a top-level module lies, or None if it is not one of the few."""
        known = path is None and name in self._roots
        return PathFinder.find_spec(name, [self._folder], target) if known else None


def _lies_in(folder: Path, name: str) -> bool:
    root = name.partition(".")[0]
    return (folder / f"{root}.py").is_file() or (folder / root).is_dir()


def _refuse_namesakes(folder: Path, roots: Collection[str]) -> None:
    """Raise ConfigError for a module beside the file that another of its name would hide."""
    for root in sorted(roots):
        other = _elsewhere(folder, root)
        if other is not None:
            message = (
                f"{root} lies next to the run file, but Python would import {other}: rename one."
            )
            raise ConfigError([Problem("allow.packages", message)])


def _elsewhere(folder: Path, root: str) -> str | None:
    """Return the file that Python would import as a module, or None if it lies in the folder."""
    loaded = sys.modules.get(root)
    if loaded is None:
        found = importlib.util.find_spec(root)
        file = None if found is None else found.origin or next(iter(_places(found)), None)
    else:
        file = getattr(loaded, "__file__", None)
    return None if file is None or folder in Path(file).resolve().parents else file


def _places(spec: ModuleSpec) -> Sequence[str]:
    """Return the places of a package without a file of its own, each with a name inside."""
    return [str(Path(place) / "__init__.py") for place in spec.submodule_search_locations or ()]


# --- the user's settings ------------------------------------------------------------------------

VARIABLE = "ANYFLEET_SETTINGS"
DEFAULT_FILE = Path("~/.config/anyfleet/settings.toml")


def trusted() -> tuple[str, ...]:
    """Return the packages that the user's settings allow; none without settings."""
    named = os.environ.get(VARIABLE)
    if named == "":
        return ()
    file = DEFAULT_FILE.expanduser() if named is None else Path(named)
    if named is None and not file.exists():
        return ()
    if not file.is_absolute():
        raise _refusal(file, f"is not a full path. Set {VARIABLE} to one that begins at the root.")
    data = _read(file)
    packages, problems = packages_in(data.pop("allow", {}))
    unknown = [Problem(key, "unknown key: settings have [allow] only.") for key in data]
    if problems or unknown:
        found = [each.within(file) for each in (*problems, *unknown)]
        raise ConfigError(found)
    return packages


def _read(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as opened:
            if wrong := _open_to_others(os.fstat(opened.fileno())):
                raise _refusal(file, wrong)
            return tomllib.load(opened)
    except OSError as error:
        raise _refusal(file, f"cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise _refusal(file, f"not valid TOML: {error}.") from error


def _open_to_others(found: os.stat_result) -> str:
    """Return who else could have written the settings, or ""; not checked on Windows."""
    if sys.platform == "win32":
        return ""
    if found.st_uid not in (os.getuid(), 0):
        return "belongs to somebody else. Use a settings file of your own."
    if stat.S_IMODE(found.st_mode) & (stat.S_IWGRP | stat.S_IWOTH):
        return "can be written by others. Take that right away: chmod go-w."
    return ""


def _refusal(file: Path, why: str) -> ConfigError:
    return ConfigError([Problem(str(file), why)])
