"""Run docs/deploy.md: its commands and programs, on two machines that are fresh environments.

    python -m tools.run_deploy_page [--borrow]

Each machine is an empty folder. `pip install` of the page makes a new environment in it, from a
wheel of this source tree; with --borrow the dependencies are those of the environment that runs
this program, which saves minutes. A block says in its first line where it belongs:

    # on the server                     run, and must succeed
    # on the Pi, leave it running       started, and left
    # …, in a second shell              tried again until it succeeds: what it asks for needs time
    # …, when the run has ended         run when what was left running there has ended
    # …, as root (as you log in, with Docker)    not run, but listed
    # NAME, on the server               written into a file

Only names are changed: the address of the server, ports, and `scp`, which copies between the two
folders.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "deploy.md"
ADDRESS, METRICS = "fleet.example.org:9443", "9464"
PATIENCE = 600.0  # seconds for a block, or for what was left running to end
WARNED = {"anyfleet fleet preflight": 3}  # exit codes that are warnings, by command
_BLOCK = re.compile(r"^```(\w+)\n# (.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PLACE = re.compile(r"(?:(?P<file>[\w./-]+), )?on the (?P<machine>server|Pi)(?:, (?P<manner>.*))?")
_LINES, _TOLD = 4, 4000  # of what a block prints: lines, and characters if something failed
_NOT_RUN = ("as root", "as you log in", "with Docker")
_SCP = """\
#!/bin/sh
# Copies between the folders of two machines: what stands behind a colon is at the other one.
set -e
other() {
  case "$1" in *:*) printf '%s/%s' "$OTHER_MACHINE" "${1#*:}" ;; *) printf '%s' "$1" ;; esac
}
test "$1" = -r && shift
exec cp -r "$(other "$1")" "$(other "$2")"
"""

screen = Console(highlight=False, soft_wrap=True, width=120, markup=False)


class Block(NamedTuple):
    """A block of the page: where it belongs, how it is run, and its text."""

    machine: str
    manner: str  # as the page says, or ""
    file: str  # that it is written to, or ""
    kind: str  # console, python, toml …
    text: str

    @property
    def runs(self) -> bool:
        """Whether it is run, and not only for people."""
        return not self.manner.startswith(_NOT_RUN)


def blocks(page: str) -> Iterator[Block]:
    """Yield the blocks of a page that say where they belong; raise ValueError for others."""
    for kind, head, text in _BLOCK.findall(page):
        found = _PLACE.fullmatch(head)
        if found is None:
            raise ValueError(f"a block does not say where it belongs: {head}")
        yield Block(found["machine"], found["manner"] or "", found["file"] or "", kind, text)


def commands(block: Block) -> Iterator[str]:
    """Yield the lines of a block of commands."""
    yield from (line for line in block.text.replace("\\\n", " ").splitlines() if line.strip())


@dataclass(eq=False)
class Machine:
    """A folder that plays a machine, and what was left running on it."""

    home: Path
    settings: dict[str, str]
    left: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, script: str, log: Path) -> subprocess.Popen[bytes]:
        """Start lines of a shell in which the environment stays active, as in one window."""
        active = "if [ -f venv/bin/activate ]; then . venv/bin/activate; fi\n"
        with log.open("ab") as out:
            return subprocess.Popen(  # noqa: S603 - the page of this project
                ["/bin/bash", "-e", "-o", "pipefail", "-c", active + script],
                cwd=self.home,
                env=self.settings,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def end(self) -> None:
        """End what was left running, as Ctrl-C does."""
        for each in self.left:
            with suppress(ProcessLookupError):
                os.killpg(each.pid, signal.SIGINT)
        for each in self.left:
            with suppress(subprocess.TimeoutExpired):
                each.wait(30)
            with suppress(ProcessLookupError):
                os.killpg(each.pid, signal.SIGKILL)  # its children, too
        self.left.clear()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def _wheel(folder: Path) -> Path:
    """Build a wheel from a copy of the source, and return its folder."""
    tree = folder / "source"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, tree)
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__"))
    words = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", str(folder), "."]
    subprocess.run(words, cwd=tree, check=True, capture_output=True)  # noqa: S603
    return folder


def _machines(folder: Path, wheels: Path) -> dict[str, Machine]:
    """Return the two machines: empty folders with what the page takes for granted."""
    tools = folder / "tools"
    tools.mkdir()
    (tools / "scp").write_text(_SCP)
    (tools / "scp").chmod(0o755)
    # The interpreter of this program is the one that the page calls python3.
    (tools / "python3").symlink_to(Path(sys.base_prefix) / "bin" / "python3")
    made: dict[str, Machine] = {}
    for name, other in (("server", "Pi"), ("Pi", "server")):
        home = folder / name
        home.mkdir()
        shutil.copy(ROOT / "constraints.txt", home)
        settings = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL"))}
        settings |= {
            "PATH": f"{tools}:{os.defpath}:/usr/local/bin",
            "PIP_FIND_LINKS": " ".join(filter(None, [str(wheels), _find_links()])),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "OTHER_MACHINE": str(folder / other),
            "ANYFLEET_CACHE": str(home / "cache"),
        }
        made[name] = Machine(home, settings)
    return made


def _find_links() -> str:
    """Return where pip looks for wheels besides; a variable would hide what its settings say."""
    words = [sys.executable, "-m", "pip", "config", "get", "global.find-links"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)  # noqa: S603
    return done.stdout.strip() if done.returncode == 0 else ""


def _borrowed(line: str) -> str:
    """Return a line of the page that installs nothing but the wheel, and borrows the rest."""
    if not line.startswith("pip install"):
        return line
    where = "$(python -c 'import sysconfig; print(sysconfig.get_path(\"purelib\"))')"
    borrow = f"echo {sysconfig.get_path('purelib')} > {where}/borrowed.pth"
    link = f"ln -s {Path(sys.executable).parent}/flower-superlink venv/bin/"
    return f"pip install --quiet --no-deps --no-index anyfleet && {borrow} && {link}"


def _succeeded(script: str, code: int) -> bool:
    warned = [other for known, other in WARNED.items() if script.strip().startswith(known)]
    return code in (0, *warned)


def _run(block: Block, machine: Machine, script: str, log: Path) -> bool:
    """Run a block; return whether it succeeded."""
    if "leave it running" in block.manner:
        machine.left.append(machine.start(script, log))
        return True
    if "when the run has ended" in block.manner and machine.left[-1].wait(PATIENCE):
        return False
    until = time.monotonic() + PATIENCE
    while True:
        code = machine.start(script, log).wait(max(1.0, until - time.monotonic()))
        if _succeeded(script, code):
            return True
        dead = any(each.poll() for each in machine.left)
        if "second shell" not in block.manner or dead or time.monotonic() > until:
            return False
        time.sleep(0.5)


def run_page(page: str, folder: Path, *, borrow: bool) -> bool:
    """Run a page in a folder, say what is done, and return whether everything succeeded."""
    machines = _machines(folder, _wheel(folder))
    names = {ADDRESS: f"localhost:{_free_port()}", METRICS: str(_free_port())}
    skipped = 0
    try:
        for number, block in enumerate(blocks(page)):
            machine, text = machines[block.machine], block.text
            for name, here in names.items():
                text = text.replace(name, here)
            if block.file:
                (machine.home / block.file).write_text(text, encoding="utf-8")
                screen.print(f"{block.machine:<6} wrote   {block.file}")
                continue
            if not block.runs:
                skipped += 1
                screen.print(f"{block.machine:<6} not run {block.text.splitlines()[0]} …")
                continue
            lines = [_borrowed(line) if borrow else line for line in text.splitlines()]
            begin, log = time.monotonic(), folder / f"log-{number:02d}.txt"
            good = _run(block, machine, "\n".join(lines), log)
            seconds = time.monotonic() - begin
            told = "started" if "running" in block.manner else "ran" if good else "FAILED"
            screen.print(f"{block.machine:<6} {told:<7} {seconds:4.0f} s  {lines[-1]}")
            if not good:
                for each in sorted(folder.glob("log-*.txt")):  # of what was left running, too
                    screen.print(each.read_text(errors="replace")[-_TOLD:])
                return False
            if "running" not in block.manner:
                for line in log.read_text(errors="replace").splitlines()[-_LINES:]:
                    screen.print(f"{'':24}{line}")
    finally:
        for machine in machines.values():
            machine.end()
    screen.print(f"All blocks ran; {skipped} that need root, a login or Docker were not run.")
    return True


def main(words: Sequence[str]) -> int:
    """Run the page of the project; return the exit code."""
    with tempfile.TemporaryDirectory(prefix="anyfleet-deploy-") as folder:
        begin = time.monotonic()
        good = run_page(PAGE.read_text(encoding="utf-8"), Path(folder), borrow="--borrow" in words)
        screen.print(f"{time.monotonic() - begin:.0f} s")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
