"""What is written stays: whole files, logs that only grow, one process per folder.

A file is written beside its place, forced to the disk and then renamed, and so is the folder that
lists it: after a crash or a loss of power there is the old file or the new one, never half of one.
"""

import errno
import os
import sys
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from anyfleet.errors import StoreError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
_VANISHED = {errno.ENOENT, errno.ENOTDIR, errno.ESTALE}


class DiskError(StoreError):
    """A file that cannot be written now; when that is seen to, the run can go on."""


class Damaged(StoreError):
    """A file that is not as it was written."""


@contextmanager
def told(path: Path) -> Iterator[None]:
    """Turns an error of the system into one that says what to do."""
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        if error.errno in _FULL:
            advice = "there is no room left. Make room"
        elif error.errno in _FORBIDDEN:
            advice = "it may not be written. Allow that, or move the folder to where it may"
        elif error.errno in _VANISHED:
            advice = "the folder it lies in is not there, or is none. Bring it back"
        else:
            advice = f"{error.strerror or error}. See to that"
        raise DiskError(f"{path} cannot be written: {advice}") from error


def write(file: Path, content: bytes) -> None:
    """The whole file or none, also after a loss of power."""
    beside = file.with_name(f".{file.name}.part")
    try:
        with told(file):
            with beside.open("wb") as out:
                out.write(content)
                force(out)
            beside.replace(file)
            force_folder(file.parent)
    except DiskError:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


def force(out: BinaryIO) -> None:
    """What was written is on the disk when this returns."""
    out.flush()
    os.fsync(out.fileno())


def force_folder(folder: Path) -> None:
    """Which files are in it, too; Windows has no way to say so, and does it by itself."""
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
    """A file of lines that only grows."""

    def __init__(self, file: Path, mark: Mark = EMPTY) -> None:
        self.file, self.mark = file, mark

    def append(self, rows: Iterable[Any]) -> None:
        """Lines of JSON. They survive the end of this process, and after `force` that of power.

        The file is opened anew: what went into a folder that was removed meanwhile would be lost.
        """
        lines = b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
        with told(self.file), self.file.open("ab", buffering=0) as out:
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
        """Forgets the lines after a mark; where they cannot be cut off now, resuming does it."""
        self.mark = mark
        with suppress(DiskError, OSError):
            if self.file.exists():
                self.cut()

    def force(self) -> None:
        with told(self.file), self.file.open("ab") as out:
            force(out)

    def fits(self) -> bool:
        """Whether the file begins as the mark says."""
        if not self.file.is_file():
            return self.mark == EMPTY
        try:
            with self.file.open("rb") as content:
                # Before anything is read: the mark, too, may be damaged.
                if not 0 <= self.mark.bytes <= os.fstat(content.fileno()).st_size:
                    return False
                read = content.read(self.mark.bytes)
        except OSError:
            return False
        return Mark(len(read), zlib.crc32(read)) == self.mark

    def cut(self) -> None:
        """Takes away what comes after the mark."""
        with told(self.file), self.file.open("ab") as out:
            out.truncate(self.mark.bytes)
            force(out)


def read_log(file: Path) -> list[dict[str, Any]]:
    """The complete lines of a log; what was being written when a process died is none."""
    lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
    return [msgspec.json.decode(line) for line in lines]


# --- one process per folder -------------------------------------------------------------------


class Lock:
    """Held for as long as a process writes into a folder; the system frees it when that dies."""

    def __init__(self, folder: Path) -> None:
        file = folder / "lock"
        with told(file):
            self._file = file.open("a+b", buffering=0)
        try:
            _hold(self._file)
        except OSError as error:
            self._file.seek(0)
            owner = self._file.read(32).decode(errors="replace").strip() or "unknown"
            self._file.close()
            raise StoreError(
                f"{folder} is in use by process {owner}. Wait for it to end, or end it."
            ) from error
        with told(file):
            self._file.truncate(0)
            self._file.write(f"{os.getpid()}\n".encode())

    def release(self) -> None:
        """The file stays: removing it would let two others each hold one of that name."""
        if not self._file.closed:
            with suppress(OSError):
                self._file.truncate(0)
            self._file.close()


if sys.platform == "win32":
    import msvcrt

    _FAR = 1 << 30  # Windows locks bytes: one that nobody reads

    def _hold(file: Any) -> None:
        file.seek(_FAR)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)

else:
    import fcntl

    def _hold(file: Any) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
