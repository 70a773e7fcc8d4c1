"""The user's own settings: which installed packages any run file may name.

    [allow]
    packages = ["my_parts"]

The file is `~/.config/anyfleet/settings.toml`, or the one whose full path the environment variable
ANYFLEET_SETTINGS holds (empty: none). Nobody but its owner may be able to write it. It opens only
installed packages, never a module that lies beside a run file: that file may be a stranger's.
"""

from __future__ import annotations

import os
import stat
import sys
import tomllib
from pathlib import Path
from typing import Any

from anyfleet.config.requests import packages_in
from anyfleet.errors import ConfigError, Problem

__all__ = ["DEFAULT_FILE", "VARIABLE", "trusted"]

VARIABLE = "ANYFLEET_SETTINGS"
DEFAULT_FILE = Path("~/.config/anyfleet/settings.toml")


def trusted() -> tuple[str, ...]:
    """Return the packages that the user's settings allow; none where there are no settings."""
    named = os.environ.get(VARIABLE)
    if named == "":
        return ()
    file = DEFAULT_FILE.expanduser() if named is None else Path(named)
    if named is None and not file.exists():
        return ()
    if not file.is_absolute():
        raise _refusal(file, f"is no full path. {VARIABLE} needs one, whatever the current folder.")
    data = _read(file)
    packages, problems = packages_in(data.pop("allow", {}))
    unknown = [Problem(key, "unknown key: settings have [allow] only.") for key in data]
    if problems or unknown:
        found = [Problem(f"{file}: {each.path}", each.message) for each in (*problems, *unknown)]
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
    """Say who else could have written the settings; Windows has other rights, and is not asked."""
    if sys.platform == "win32":
        return ""
    if found.st_uid not in (os.getuid(), 0):
        return "belongs to somebody else. Settings must be your own file."
    if stat.S_IMODE(found.st_mode) & (stat.S_IWGRP | stat.S_IWOTH):
        return "can be written by others. Take that right away: chmod go-w."
    return ""


def _refusal(file: Path, why: str) -> ConfigError:
    return ConfigError([Problem(str(file), why)])
