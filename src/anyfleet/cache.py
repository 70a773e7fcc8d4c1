"""The user's cache: what takes long to compute and is the same every time, kept in files.

It lies in the folder that the variable ANYFLEET_CACHE names ("" or "off": there is none), otherwise
in `$XDG_CACHE_HOME/anyfleet` or `~/.cache/anyfleet`, with a folder for each kind of entry. A key is
plain data that holds everything the content depends on; where that cannot be known, nothing is
kept. So a cache changes no result, and an entry never becomes wrong: it only ceases to be found.

An entry is data and never code. It begins with a checksum of its key and its content: what is
damaged, cut off, or in the place of another is removed and computed again. Files are written beside
their place and renamed, so that several processes may write at once. Folders and files are the
user's alone; a folder that others own or may write to is not used.
"""

import hashlib
import os
import stat
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

VARIABLE = "ANYFLEET_CACHE"
LIMIT = 512 << 20  # bytes of all entries; those that were not used for longest are removed first
# What is kept, by the name of its folder.
KINDS: Mapping[str, str] = {
    "engines": "how long engines take for runs of a shape",
    "images": "unpacked images, and their mean and deviation",
    "networks": "blueprints of networks, traced and checked",
    "prices": "memory that training a slice takes",
}
# Measured, so that nothing computes them again with the same result: never removed to make room.
_LASTING = frozenset({"engines"})
_OFF = frozenset({"", "off"})
_MARK = b"anyfleet-cache-1"
_START = len(_MARK) + hashlib.sha256().digest_size


class Holding(NamedTuple):
    """What the cache holds of one kind."""

    kind: str
    entries: int
    size: int  # bytes
    folder: Path


def home() -> Path | None:
    """Return the folder of the cache; None where the user wants none."""
    named = os.environ.get(VARIABLE)
    if named is not None and named.strip().lower() in _OFF:
        return None
    usual = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "anyfleet"
    try:
        return Path(named or usual).expanduser()
    except RuntimeError:  # a user without a home
        return None


def key_digest(key: Any) -> bytes:
    """Return the SHA-256 of a key, which is plain data."""
    return hashlib.sha256(msgspec.json.encode(key, order="sorted")).digest()


@lru_cache(maxsize=1)
def code_digest() -> str | None:
    """Return the SHA-256 of the source of Anyfleet; None where there is no source to read."""
    folder = Path(__file__).parent
    found = hashlib.sha256()
    try:
        for file in sorted(folder.rglob("*.py")):
            content = file.read_bytes()
            found.update(f"{file.relative_to(folder).as_posix()} {len(content)}\n".encode())
            found.update(content)
    except OSError:
        return None
    return found.hexdigest()


def computed_by(**others: Any) -> dict[str, Any] | None:
    """Return what a computation depends on besides its input: our code, Python, and `others`.

    None where the code is not known, and nothing may be kept.
    """
    code = code_digest()
    known: dict[str, Any] = {"anyfleet": code, "python": sys.version, **others}
    return None if code is None else known


# --- entries --------------------------------------------------------------------------------------


def read(kind: str, key: Any) -> memoryview | None:
    """Return the content that is kept for a key; None if there is none that can be trusted."""
    file = _file(kind, key)
    if file is None or not _private(file.parent):
        return None
    try:
        with open(file, "rb", opener=_without_links) as opened:
            whole = opened.read() if _plain(os.fstat(opened.fileno())) else b""
    except OSError:
        return None
    content = memoryview(whole)[_START:]
    if whole[:_START] != _MARK + _checksum(kind, key, content):
        with suppress(OSError):
            file.unlink()
        return None
    with suppress(OSError):
        os.utime(file)  # so that it is known to be in use
    return content


def write(kind: str, key: Any, content: bytes) -> None:
    """Keep the content for a key; without a place for it, do nothing."""
    file = _file(kind, key)
    if file is None or len(content) > LIMIT:
        return
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if _private(file.parent):
            replace_file(file, _MARK + _checksum(kind, key, content) + content)
            trim()


def replace_file(file: Path, content: bytes) -> None:
    """Write a file as a whole, readable by the user alone; raise OSError where that fails."""
    beside = file.with_name(f".{file.name}.{os.getpid()}.{threading.get_ident()}.part")
    try:
        beside.unlink(missing_ok=True)
        with open(beside, "xb", opener=_without_links) as out:
            out.write(content)
        beside.replace(file)
    except OSError:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


def _file(kind: str, key: Any) -> Path | None:
    assert kind in KINDS, kind
    folder = home()
    return None if folder is None else folder / kind / key_digest(key).hex()


def _checksum(kind: str, key: Any, content: bytes | memoryview) -> bytes:
    found = hashlib.sha256(kind.encode() + b"\n" + key_digest(key))
    found.update(content)
    return found.digest()


def _without_links(file: str, flags: int) -> int:
    return os.open(file, flags | getattr(os, "O_NOFOLLOW", 0), 0o600)


def _plain(found: os.stat_result) -> bool:
    return stat.S_ISREG(found.st_mode) and found.st_size <= LIMIT + _START


def _private(folder: Path) -> bool:
    """Return whether a folder is there, is the user's own, and nobody else may write into it."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    if not stat.S_ISDIR(found.st_mode):
        return False
    if sys.platform == "win32":
        return True
    return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


# --- the cache as a whole -------------------------------------------------------------------------


def holdings() -> list[Holding]:
    """Return what the cache holds, kind by kind; empty where there is none."""
    folder = home()
    if folder is None:
        return []
    found = {kind: [size for _, size, _ in _entries(folder / kind)] for kind in sorted(KINDS)}
    return [Holding(kind, len(all_), sum(all_), folder / kind) for kind, all_ in found.items()]


def clear(kind: str | None = None) -> Holding:
    """Remove all entries, or those of one kind; return how many and how large they were.

    Only files that the cache made are removed: data sets may lie in the same folder.
    """
    folder = home() or Path()
    kinds = [] if home() is None else sorted(KINDS) if kind is None else [kind]
    entries = size = 0
    for _, length, file in (each for name in kinds for each in _entries(folder / name)):
        with suppress(OSError):
            file.unlink()
            entries, size = entries + 1, size + length
    return Holding(kind or "", entries, size, folder)


def trim(limit: int = LIMIT) -> None:
    """Remove entries until all are within the limit, those that were not used for longest first."""
    folder = home()
    if folder is None:
        return
    found = sorted(each for kind in KINDS.keys() - _LASTING for each in _entries(folder / kind))
    excess = sum(size for _, size, _ in found) - limit
    for _, size, file in found:
        if excess <= 0:
            return
        with suppress(OSError):  # another process was faster
            file.unlink()
        excess -= size


def _entries(folder: Path) -> Iterator[tuple[float, int, Path]]:
    """Yield when each entry of a folder was last used, its bytes, and its file."""
    try:
        files = sorted(os.scandir(folder), key=lambda each: each.name)
    except OSError:
        return
    for each in files:
        with suppress(OSError):
            found = each.stat(follow_symlinks=False)
            if stat.S_ISREG(found.st_mode) and _made_here(each.name):
                yield found.st_mtime, found.st_size, Path(each.path)


def _made_here(name: str) -> bool:
    """Return whether a file has a name that the cache gives: a digest, or one being written."""
    parts = name.split(".")
    if parts[0] == "" and parts[-1] == "part":  # left by a process that was killed
        parts = parts[1:2]
    elif parts[1:] not in ([], ["json"]):
        return False
    return len(parts[0]) == 2 * hashlib.sha256().digest_size and set(parts[0]) <= set(
        "0123456789abcdef"
    )
