"""`[allow]` of a run file: a request for packages, which only the caller can grant."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from anyfleet.errors import ConfigError, Problem
from anyfleet.names import how_to_allow, lies_within, near

__all__ = ["importable", "not_installed", "packages_in", "refused"]


def packages_in(table: Any) -> tuple[tuple[str, ...], list[Problem]]:
    """Return the packages that a table `[allow]` names, and what is wrong with it."""
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
    """Tell of each package that a file asks for and nobody has allowed, and how to allow it."""
    for name in asked:
        if not lies_within(name, allow):
            place = f", from {folder}" if folder is not None and _lies_in(folder, name) else ""
            told = f'the file asks for the code of "{name}"{place}. {how_to_allow(name)}'
            yield Problem("allow.packages", told)


def not_installed(trusted: Collection[str], folder: Path | None) -> Iterator[Problem]:
    """Tell of each package of the user's settings that only lies beside the file."""
    for name in trusted:
        root = name.partition(".")[0]
        if folder is not None and _lies_in(folder, name) and not _installed(root):
            told = (
                f"your settings name {root}, and settings open installed packages only; this one "
                f"lies in {folder}. {how_to_allow(name)}"
            )
            yield Problem("allow.packages", told)


def _installed(root: str) -> bool:
    return root in sys.modules or importlib.util.find_spec(root) is not None


@contextmanager
def importable(folder: Path | None, allow: Sequence[str]) -> Iterator[None]:
    """Let allowed modules that lie in `folder` be imported, for the time of a load only.

    Nothing else is found there: neither a module that nobody allowed, nor one that some library
    looks for on its own account. What is installed comes first, and a namesake is refused.
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
    """Finds a few modules in a folder, and no others."""

    def __init__(self, folder: Path, roots: frozenset[str]) -> None:
        self._folder, self._roots = str(folder), roots

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return where a top-level module lies, if it is one of the few."""
        known = path is None and name in self._roots
        return PathFinder.find_spec(name, [self._folder], target) if known else None


def _lies_in(folder: Path, name: str) -> bool:
    root = name.partition(".")[0]
    return (folder / f"{root}.py").is_file() or (folder / root).is_dir()


def _refuse_namesakes(folder: Path, roots: Collection[str]) -> None:
    """Refuse a module beside the file when another one of its name would be taken instead."""
    for root in sorted(roots):
        other = _elsewhere(folder, root)
        if other is not None:
            message = f"{root} lies next to the run file, but {other} comes first: rename one."
            raise ConfigError([Problem("allow.packages", message)])


def _elsewhere(folder: Path, root: str) -> str | None:
    """Return the file that Python would take for a module, unless it lies in the folder."""
    loaded = sys.modules.get(root)
    if loaded is None:
        found = importlib.util.find_spec(root)
        file = None if found is None else found.origin or next(iter(_places(found)), None)
    else:
        file = getattr(loaded, "__file__", None)
    return None if file is None or folder in Path(file).resolve().parents else file


def _places(spec: ModuleSpec) -> Sequence[str]:
    """Return the folders of a package without a file of its own, each with a name inside."""
    return [str(Path(place) / "__init__.py") for place in spec.submodule_search_locations or ()]
