"""Flower's SuperLink as a child of this process: on loopback, with TLS and node keys, on SQLite.

It is started again if it dies. It does not outlive this process, also if that is killed with
SIGKILL: Linux ends it at once; elsewhere the next server finds it by its process file and ends it.
What it knows is in its database, so nothing is lost with it.
"""

import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from contextlib import closing, suppress
from http.client import HTTPException, HTTPSConnection
from io import FileIO
from pathlib import Path

import msgspec
import psutil

from anyfleet.deployment.fleet_folder import FleetFolder
from anyfleet.errors import LinkError
from anyfleet.store.disk import DiskError, Lock, opened, told, write

HOST = "127.0.0.1"
_START = 60.0  # seconds until it answers; it imports a lot
_ATTEMPTS = 3  # to start it in the first place
_STOP = 3.0  # seconds to end by itself
_LOOK = 0.1  # seconds between two looks
_WAITS = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)  # seconds before a start, by starts that failed in a row
_STEADY = 60.0  # seconds after which a start counts as a success
_MOST_LOG = 32 << 20  # bytes of the log, before it is moved away at a start
_NAME = "flower-superlink"

# Run in the child before the SuperLink: its files are private, and Linux ends it with its parent.
# The parent may have died before it could be asked for that.
_PRELUDE = """
import ctypes, os, signal, sys
os.umask(0o077)
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


class SuperLink:
    """The SuperLink of a fleet, from `start` to `close`; nobody else can serve the fleet then."""

    def __init__(self, folder: FleetFolder, port: int = 0) -> None:
        folder.check()
        self._folder, self._program = folder, find_program()
        self._authority = ssl.create_default_context(cafile=str(folder.authority))
        self._lock = Lock(folder.path)
        self.port = port or _free_port()
        self._closing, self._answers = threading.Event(), threading.Event()
        self._child: subprocess.Popen[bytes] | None = None
        self._restarts = 0
        # It must live as long as the child: Linux takes the thread that started a child for its
        # parent.
        self._thread = threading.Thread(target=self._watch, name="superlink", daemon=True)

    @property
    def address(self) -> str:
        """The address on loopback, for the gate and for the run."""
        return f"{HOST}:{self.port}"

    @property
    def pid(self) -> int | None:
        """The process, or None between two of them."""
        child = self._child
        return child.pid if child is not None and child.poll() is None else None

    @property
    def restarts(self) -> int:
        """How many times it has died and was started again."""
        return self._restarts

    def start(self) -> "SuperLink":
        """Start it, and wait until it answers; raise LinkError if it does not."""
        end_orphan(self._folder)
        self._thread.start()
        until = time.monotonic() + _START
        while not self.wait(_LOOK):
            if self._restarts >= _ATTEMPTS or time.monotonic() > until:
                self.close()
                raise LinkError(
                    f"Flower's SuperLink does not answer on {self.address}. "
                    f"Its log says why: {self._folder.log}"
                )
        return self

    def wait(self, seconds: float) -> bool:
        """Wait until it answers, at most so long; return whether it does."""
        return self._answers.wait(seconds)

    def close(self) -> None:
        """Close it, and let others serve the fleet."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        self._folder.pid.unlink(missing_ok=True)
        self._lock.release()

    def __enter__(self) -> "SuperLink":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- in the thread ----------------------------------------------------------------------------

    def _watch(self) -> None:
        """Start the child, and start it again whenever it dies, until it shall end."""
        failures = 0
        while not self._closing.wait(_WAITS[min(failures, len(_WAITS) - 1)]):
            began = time.monotonic()
            try:
                self._run()
            except (OSError, DiskError):  # no memory for a process, no room on the disk: try again
                failures += 1
                continue
            if self._closing.is_set():
                return
            self._restarts += 1
            failures = 0 if time.monotonic() - began > _STEADY else failures + 1

    def _run(self) -> None:
        """Run the child once: until it dies, or shall end."""
        child = self._child = self._spawn()
        try:
            began = psutil.Process(child.pid).create_time()
            write(self._folder.pid, msgspec.json.encode({"pid": child.pid, "began": began}), 0o600)
            while not self._closing.wait(_LOOK) and child.poll() is None:
                if not self._answers.is_set() and self._is_answering():
                    self._answers.set()
        finally:
            self._answers.clear()
            _end(child)

    def _spawn(self) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-c", _PRELUDE, str(os.getpid()), self._program, *self._options()]
        with _log(self._folder.log) as log:
            return subprocess.Popen(  # noqa: S603 - our own command
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                cwd=self._folder.path,
                start_new_session=True,  # Ctrl-C is for the run, which closes it in good order
            )

    def _options(self) -> list[str]:
        folder = self._folder
        files = {
            "--ssl-ca-certfile": folder.authority,
            "--ssl-certfile": folder.certificate,
            "--ssl-keyfile": folder.key,
            "--superexec-auth-secret-file": folder.secret,
            "--database": folder.database,
        }
        named = [word for name, file in files.items() for word in (name, str(file.resolve()))]
        plain = ["--enable-supernode-auth", "--disable-runtime-dependency-installation"]
        return [*named, *plain, "--isolation", "process", "--host", HOST, "--port", str(self.port)]

    def _environment(self) -> dict[str, str]:
        quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
        # Whoever changes these for Flower's own tools does not mean this one.
        given = {name: each for name, each in os.environ.items() if not name.startswith("FLWR_")}
        return {**given, **quiet, "FLWR_HOME": str(self._folder.path.resolve() / "flower")}

    def _is_answering(self) -> bool:
        link = HTTPSConnection(HOST, self.port, timeout=2.0, context=self._authority)
        with closing(link), suppress(OSError, HTTPException):
            link.request("GET", "/health")
            return link.getresponse().status == 200
        return False


def find_program() -> str:
    """Return the path of Flower's program; raise LinkError if it is not installed."""
    beside = Path(sys.executable).with_name(_NAME)
    found = str(beside) if beside.is_file() else shutil.which(_NAME)
    if found is None:
        raise LinkError(f"{_NAME} is not installed. Run: pip install 'anyfleet[fleet]'")
    return found


def end_orphan(folder: FleetFolder) -> bool:
    """Close a SuperLink that a killed server has left behind; return whether there was one.

    Whoever calls this holds the fleet's lock, so that no living server has started it. A process
    counts only if it has the id and the moment of its start that were written down.
    """
    try:
        noted = msgspec.json.decode(folder.pid.read_bytes(), type=dict[str, float])
        found = psutil.Process(int(noted["pid"]))
        ours = bool(abs(found.create_time() - noted["began"]) < 0.05)
    except (OSError, LookupError, msgspec.MsgspecError, psutil.Error, ValueError):
        ours = False
    if ours:
        with suppress(psutil.Error):
            found.kill()
            found.wait(_STOP)
    folder.pid.unlink(missing_ok=True)
    return ours


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ask the child to end, and kill it if it does not."""
    with suppress(ProcessLookupError):
        child.send_signal(signal.SIGTERM)
    try:
        child.wait(_STOP)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _log(file: Path) -> FileIO:
    """Open the log for more lines; one that has grown large is moved away first."""
    with told(file):
        if file.is_file() and file.stat().st_size > _MOST_LOG:
            file.replace(file.with_suffix(".log.1"))
        return opened(file, "ab", 0o600)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
