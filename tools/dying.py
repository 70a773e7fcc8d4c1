"""Processes that die: after a time, at an operation on files, at a byte of a file. POSIX only."""

import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SECONDS = 120  # after which a process is given up


def tell(pipe: int) -> None:
    """Send a sign of life through a pipe."""
    os.write(pipe, b"!")


@dataclass(frozen=True)
class Process:
    """A fork of this process, in which something runs."""

    pid: int
    pipe: int

    @staticmethod
    def start(work: Callable[[Callable[[], None]], None]) -> "Process":
        """Fork, call `work` in the fork with a function that tells this process that it runs."""
        reading, writing = os.pipe()
        pid = os.fork()
        if pid:
            os.close(writing)
            return Process(pid, reading)
        os.close(reading)
        signal.alarm(SECONDS)
        status = 1
        try:
            work(lambda: tell(writing))
            status = 0
        except BaseException as error:  # noqa: BLE001 - told, whatever it is
            sys.stderr.write(f"{error!r}\n")
        finally:
            os._exit(status)

    def end(self) -> tuple[int, bool]:
        """Wait for its end; return the signal that ended it, or 0, and whether it got to run."""
        _, status = os.waitpid(self.pid, 0)
        reached = bool(os.read(self.pipe, 1))
        os.close(self.pipe)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status):
            raise RuntimeError("a process failed by itself")
        ended = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if ended == signal.SIGALRM:
            raise RuntimeError(f"a process did not end within {SECONDS} s")
        return ended, reached


# --- ways to die ------------------------------------------------------------------------------

Work = Callable[[Callable[[], None]], None]
_EVENTS = ("open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.truncate", "os.listdir")


def at_time(work: Work, share: float, scale: "Scale") -> Process:
    """Start a process that dies after a share of the time that a whole run takes."""
    process = Process.start(work)
    time.sleep(share * scale.seconds)
    os.kill(process.pid, signal.SIGKILL)
    return process


def at_operation(work: Work, share: float, scale: "Scale") -> Process:
    """Start a process that dies at an operation on files: opening, renaming, forcing to disk."""

    def counted(reached: Callable[[], None]) -> None:
        watch(int(share * scale.operations), lambda: os.kill(os.getpid(), signal.SIGKILL))
        work(reached)

    return Process.start(counted)


def at_byte(work: Work, share: float, scale: "Scale") -> Process:
    """Start a process that the system ends when a file grows beyond so many bytes."""

    def limited(reached: Callable[[], None]) -> None:
        limit = int(share**3 * scale.bytes)  # small files are written too
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        work(reached)

    return Process.start(limited)


WAYS = (at_time, at_operation, at_byte)


def watch(count: int, fire: Callable[[], None]) -> list[int]:
    """Call `fire` at operation `count` on files of this process; return a list with the count."""
    seen = [0]

    def operate() -> None:
        if seen[0] == count:
            fire()
        seen[0] += 1

    def hook(event: str, _: object) -> None:
        if event in _EVENTS:
            operate()

    force = os.fsync

    def forced(fd: Any) -> None:
        operate()
        force(fd)

    sys.addaudithook(hook)
    os.fsync = forced
    return seen


@dataclass(frozen=True)
class Scale:
    """The size of an undisturbed run: its seconds, its file operations, its longest file."""

    seconds: float
    operations: int
    bytes: int  # of its longest file
