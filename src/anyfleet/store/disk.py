"""Files that survive a crash: whole files, logs that only grow, one process per folder.

A file is written beside its place, forced to the disk and then renamed, and so is the folder that
lists it: after a crash or a loss of power there is the old file or the new one, never half of one.

Nothing is written through a symbolic link or a second name (a hard link), because a run folder may
come from a stranger.
"""

import errno
import os
import stat
import sys
import zlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedWriter, FileIO, IOBase
from pathlib import Path
from typing import Any, Literal

import msgspec

from anyfleet.errors import StoreError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
_VANISHED = {errno.ENOENT, errno.ENOTDIR, errno.ESTALE}


class DiskError(StoreError):
    """A file that cannot be written now; once that is mended, the run can go on."""


class Damaged(StoreError):
    """A file that differs from what was written."""


@contextmanager
def told(path: Path) -> Iterator[None]:
    """Turn an error of the system into a DiskError that says what to do."""
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        if error.errno in _FULL:
            advice = "there is no room left. Make room"
        elif error.errno in _FORBIDDEN:
            advice = "permission is denied. Give write permission, or move the folder"
        elif error.errno == errno.ELOOP:
            advice = "it is a symbolic link to another place. Remove it"
        elif error.errno in _VANISHED:
            advice = "its folder does not exist. Restore it"
        else:
            advice = f"{error.strerror or error}. Mend that"
        raise DiskError(f"{path} cannot be written: {advice}") from error


def write(file: Path, content: bytes, permissions: int = 0o666) -> None:
    """Write a file as a whole or not at all, also after a loss of power.

    The file is a new one: another name of the old one still shows the old content. The umask takes
    away from its permissions; with 0o600 nobody else can read it.
    """
    beside = file.with_name(f".{file.name}.part")
    try:
        with told(file):
            beside.unlink(missing_ok=True)  # it may be a second name of a file elsewhere
            with opened(beside, "xb", permissions) as raw, BufferedWriter(raw) as out:
                out.write(content)
                force(out)
            beside.replace(file)
            force_folder(file.parent)
    except DiskError:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


def opened(file: Path, mode: Literal["xb", "ab", "a+b"], permissions: int = 0o666) -> FileIO:
    """Open a file for writing, without a buffer; raise OSError if it is a symbolic link.

    With "xb", raise FileExistsError if it exists. A new file has these permissions, less the umask.
    """

    def without_links(file: str, flags: int) -> int:
        return os.open(file, flags | getattr(os, "O_NOFOLLOW", 0), permissions)

    return FileIO(file, mode, opener=without_links)


def refuse_links(folder: Path, files: Iterable[str], written: Collection[str] = ()) -> None:
    """Raise StoreError if one of these files lies outside its folder.

    That is a symbolic link, a pipe or a device node; and among those that are `written` in place, a
    file that has a second name elsewhere. A file that does not exist is fine.
    """
    for name in files:
        file = folder / name
        try:
            found = file.lstat()
        except OSError:
            continue
        if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
            told = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "not a plain file"
            raise StoreError(
                f"{file} is {told}: its content lies outside the run folder. If you trust the "
                "folder, put a copy of the file in its place; otherwise do not use it."
            )
        if name in written and found.st_nlink > 1 and stat.S_ISREG(found.st_mode):
            raise StoreError(
                f"{file} has a second name elsewhere (a hard link), which would change with it. "
                "Put a copy of the file in its place."
            )


def force(out: IOBase) -> None:
    """Wait until all that was written is on the disk."""
    out.flush()
    os.fsync(out.fileno())


def force_folder(folder: Path) -> None:
    """Wait until the list of a folder's files is on the disk; Windows does that by itself."""
    if sys.platform == "win32":
        return
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


# --- logs -------------------------------------------------------------------------------------


class Mark(msgspec.Struct, frozen=True):
    """How far a log goes: its length in bytes, and the CRC-32 of all of them."""

    bytes: int = 0
    crc32: int = 0


EMPTY = Mark()


class Log:
    """A file of JSON lines that only grows, and the mark up to which it counts."""

    def __init__(self, file: Path, mark: Mark = EMPTY) -> None:
        self.file, self.mark = file, mark

    def append(self, rows: Iterable[Any]) -> None:
        """Append lines of JSON, which survive this process and, after `force`, a loss of power.

        The file is opened anew each time: lines for a folder that was removed would be lost.
        """
        lines = b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
        with told(self.file), opened(self.file, "ab") as out:
            left = memoryview(lines)
            try:
                while left:
                    left = left[out.write(left) :]
            except OSError:
                with suppress(OSError):  # half a line helps nobody
                    out.truncate(self.mark.bytes)
                raise
        self.mark = Mark(self.mark.bytes + len(lines), zlib.crc32(lines, self.mark.crc32))

    def go_back(self, mark: Mark) -> None:
        """Forget the lines after a mark; if they cannot be cut off now, resuming does that."""
        self.mark = mark
        with suppress(DiskError, OSError):
            if self.file.exists():
                self.cut()

    def force(self) -> None:
        """Wait until all lines are on the disk."""
        with told(self.file), opened(self.file, "ab") as out:
            force(out)

    def fits(self) -> bool:
        """Return whether the file begins as the mark says."""
        if not self.file.is_file():
            return self.mark == EMPTY
        try:
            with self.file.open("rb") as content:
                # Before anything is read, because the mark may be damaged too.
                if not 0 <= self.mark.bytes <= os.fstat(content.fileno()).st_size:
                    return False
                read = content.read(self.mark.bytes)
        except OSError:
            return False
        return Mark(len(read), zlib.crc32(read)) == self.mark

    def cut(self) -> None:
        """Cut the file off at the mark."""
        with told(self.file), opened(self.file, "ab") as out:
            out.truncate(self.mark.bytes)
            force(out)

    def rows(self) -> list[dict[str, Any]]:
        """Return the lines before the mark; raise StoreError for one that is damaged."""
        with told(self.file):
            content = self.file.read_bytes()[: self.mark.bytes] if self.file.exists() else b""
        return decoded(content, self.file)


def read_log(file: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a log, without one that was being written at a crash."""
    try:
        content = file.read_bytes() if file.exists() else b""
    except OSError as error:
        raise StoreError(f"{file} cannot be read: {error.strerror}. Mend that.") from error
    return decoded(content, file)


def decoded(content: bytes, file: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a log's content; raise StoreError for one that is damaged."""
    lines = content.split(b"\n")[:-1]
    return [_line(file, number, line) for number, line in enumerate(lines, start=1)]


def _line(file: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise damaged_line(file, number, error) from error


def damaged_line(file: Path, number: int, error: BaseException) -> StoreError:
    """Return the error to raise for a line of a log that cannot be used."""
    return StoreError(
        f"{file}, line {number}, is damaged: {error!r}. Remove the line, or make the run again."
    )


# --- one process per folder -------------------------------------------------------------------


class Lock:
    """The right to write into a folder; the system frees it when the process ends."""

    def __init__(self, folder: Path, name: str = "lock") -> None:
        file = folder / name
        with told(file):
            self._file = opened(file, "a+b")
        try:
            _hold(self._file)
        except OSError as error:
            self._file.seek(0)
            owner = self._file.read(32).decode(errors="replace").strip() or "unknown"
            self._file.close()
            raise StoreError(
                f"{folder} is in use by process {owner}. Wait until it ends, or end it."
            ) from error
        with told(file):
            self._file.truncate(0)
            self._file.write(f"{os.getpid()}\n".encode())

    def release(self) -> None:
        """Release the lock. Its file stays: without it two processes could each hold one."""
        if not self._file.closed:
            with suppress(OSError):
                self._file.truncate(0)
            self._file.close()


if sys.platform == "win32":
    import msvcrt

    _FAR = 1 << 30  # Windows locks single bytes; nobody reads this one

    def _hold(file: Any) -> None:
        file.seek(_FAR)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)

else:
    import fcntl

    def _hold(file: Any) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
