"""Files that are whole, logs that only grow, folders that have one owner."""

import errno
import os
import resource
import signal
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from anyfleet.errors import StoreError
from anyfleet.store.disk import EMPTY, DiskError, Lock, Log, Mark, read_log, write


@contextmanager
def room(size: int) -> Iterator[None]:
    """No file of this process can become longer; the system says so as it says of a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    assert signal.getsignal(signal.SIGXFSZ) is signal.SIG_IGN
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "summary.json"
    write(file, b"old")
    with pytest.raises(DiskError, match="no room left"), room(100):
        write(file, b"new" * 1000)
    assert file.read_bytes() == b"old"
    assert [each.name for each in tmp_path.iterdir()] == ["summary.json"]
    write(file, b"new")
    assert file.read_bytes() == b"new"


def test_a_log_knows_how_far_it_goes(tmp_path: Path) -> None:
    log = Log(tmp_path / "log.jsonl")
    log.append([{"a": 1}, {"b": float("nan")}])
    log.append([])
    log.append([[3]])
    text = b'{"a":1}\n{"b":null}\n[3]\n'
    assert log.file.read_bytes() == text
    assert log.mark == Mark(len(text), zlib.crc32(text))
    assert log.fits()
    assert Log(log.file, Mark(8, zlib.crc32(text[:8]))).fits()
    assert not Log(log.file, Mark(8, zlib.crc32(text[:7]))).fits()
    assert not Log(log.file, Mark(len(text) + 1, log.mark.crc32)).fits()
    assert Log(tmp_path / "none", EMPTY).fits()
    assert not Log(tmp_path / "none", log.mark).fits()


def test_a_log_is_cut_back_and_grows_again(tmp_path: Path) -> None:
    log = Log(tmp_path / "log.jsonl")
    log.append([1])
    early = log.mark
    log.append([2, 3])
    again = Log(log.file, early)
    again.cut()
    assert log.file.read_bytes() == b"1\n"
    again.append([2, 3])
    assert again.mark == log.mark
    Log(tmp_path / "new.jsonl").cut()
    assert (tmp_path / "new.jsonl").read_bytes() == b""


def test_a_log_without_room_keeps_whole_lines(tmp_path: Path) -> None:
    log = Log(tmp_path / "log.jsonl")
    log.append([{"x": "x" * 50}])
    before = log.mark
    with pytest.raises(DiskError, match=r"log.jsonl cannot be written: there is no"), room(80):
        log.append([{"y": "y" * 50}])
    assert log.mark == before
    assert log.fits()
    assert read_log(log.file) == [{"x": "x" * 50}]
    assert log.file.stat().st_size == before.bytes


def test_readers_survive_half_a_line(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    file.write_bytes(b'{"a":1}\n{"a":2}\n{"a":')
    assert read_log(file) == [{"a": 1}, {"a": 2}]
    file.write_bytes(b'{"a"')
    assert read_log(file) == []
    assert read_log(tmp_path / "none") == []


def test_a_vanished_folder_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    log = Log(folder / "log.jsonl")
    log.append([1])
    log.file.unlink()
    folder.rmdir()
    with pytest.raises(DiskError, match="its folder does not exist"):
        log.append([2])
    with pytest.raises(DiskError, match="its folder does not exist"):
        log.force()
    with pytest.raises(DiskError, match="its folder does not exist"):
        write(folder / "a", b"")
    assert not folder.exists()


def test_a_folder_below_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DiskError, match="its folder does not exist"):
        write(tmp_path / "file" / "a", b"")


@contextmanager
def ordinary() -> Iterator[None]:
    """Permissions do not bind the administrator: becomes nobody for a while."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_read_only_folder_is_told(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with ordinary(), pytest.raises(DiskError, match="permission is denied"):
            write(tmp_path / "a", b"")
        with ordinary(), pytest.raises(DiskError, match="permission is denied"):
            Lock(tmp_path)
    finally:
        tmp_path.chmod(0o700)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", ["EROFS", "EACCES", "EDQUOT", "ENOSPC", "EIO"])
def test_every_error_of_the_system_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: str
) -> None:
    code = getattr(errno, number)

    def fail(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(DiskError, match="a cannot be written") as caught:
        write(tmp_path / "a", b"text")
    kinds = {
        "EROFS": "permission is denied",
        "EACCES": "permission is denied",
        "EDQUOT": "no room",
        "ENOSPC": "no room",
    }
    assert kinds.get(number, os.strerror(code)) in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_folder_has_one_owner(tmp_path: Path) -> None:
    lock = Lock(tmp_path)
    with pytest.raises(StoreError, match=f"in use by process {os.getpid()}"):
        Lock(tmp_path)
    lock.release()
    lock.release()
    assert (tmp_path / "lock").read_bytes() == b""
    Lock(tmp_path).release()


def test_a_killed_process_frees_its_folder(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        kept = Lock(tmp_path)
        os.write(writing, b"!")
        signal.pause()
        os._exit(kept is None)
    os.read(reading, 1)
    with pytest.raises(StoreError, match=f"in use by process {child}"):
        Lock(tmp_path)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    Lock(tmp_path).release()
