"""Plant known faults, one at a time, and check that the tests notice.

    python tools/mutants.py [WORD ...]

`faults.toml` beside this file holds the faults: a text of one source file, what stands there
instead, and the tests that must turn red. Every fault is planted into a copy of the source tree,
never here. WORDs choose the faults whose name contains one of them. The exit code is 1 if a fault
survives, if its text does not occur exactly once, or if its tests fail without it.
"""

import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.markup import escape
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_name("faults.toml")
COPIED = ("pyproject.toml", "src", "tests", "tools", "examples", "recipes")
SECONDS = 180  # after which tests are given up

RED, SURVIVED, MISPLACED, BROKEN = "red", "SURVIVED", "MISPLACED", "BROKEN"


@dataclass(frozen=True)
class Fault:
    """A fault: texts of a file, each of which occurs there once, become others."""

    name: str
    file: str
    edits: tuple[tuple[str, str], ...]  # old and new
    tests: tuple[str, ...]  # node ids, the fewest that must notice

    def planted(self, source: str) -> str:
        """Return the source of the file with the fault in it."""
        for old, new in self.edits:
            if source.count(old) != 1:
                raise ValueError(f"{self.file} has this text {source.count(old)} times: {old}")
            source = source.replace(old, new)
        return source


@dataclass(frozen=True)
class Verdict:
    """What became of a fault, and what the tests said."""

    fault: Fault
    result: str
    seconds: float = 0.0
    said: str = ""


def read(path: Path = LIST) -> list[Fault]:
    """Return all faults of a file; `old` and `new` are texts there, or lists of them."""
    rows = tomllib.loads(path.read_text(encoding="utf-8"))["fault"]
    return [
        Fault(
            name=row["name"],
            file=f"src/anyfleet/{row['file']}",
            edits=tuple(zip(_several(row["old"]), _several(row["new"]), strict=True)),
            tests=tuple(f"tests/{test}" for test in row["tests"]),
        )
        for row in rows
    ]


def _several(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


class Copy:
    """A copy of the source tree, into which faults are planted and from which they are removed.

    Every change gets a time of its own: Python must never use compiled code of another version.
    """

    def __init__(self, root: Path, folder: Path) -> None:
        self.folder = folder
        self._clock = int(time.time())
        ignored = shutil.ignore_patterns("__pycache__", ".*")
        for name in COPIED:
            if (root / name).is_dir():
                shutil.copytree(root / name, folder / name, ignore=ignored)
            elif (root / name).exists():
                shutil.copy2(root / name, folder / name)

    def judge(self, fault: Fault) -> Verdict:
        """Plant a fault, run its tests, and take it out again; return what became of it."""
        source = (self.folder / fault.file).read_text(encoding="utf-8")
        try:
            self._write(fault.file, fault.planted(source))
        except ValueError as error:
            return Verdict(fault, MISPLACED, said=str(error))
        begin = time.perf_counter()
        try:
            code, said = self.test(fault.tests)
        finally:
            self._write(fault.file, source)
        # Tests that cannot even be collected have noticed nothing.
        result = {0: SURVIVED, 1: RED}.get(code, BROKEN)
        return Verdict(fault, result, time.perf_counter() - begin, said)

    def test(self, tests: Iterable[str]) -> tuple[int, str]:
        """Return the exit code of these tests (-1: not through) and the end of their output."""
        command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "--tb=line"]
        quiet = ["-p", "no:cacheprovider", "-p", "no:xdist"]
        path = os.pathsep.join(str(self.folder / name) for name in ("src", "."))
        try:
            done = subprocess.run(  # noqa: S603 - this very interpreter, with our own arguments
                [*command, *quiet, *tests],
                cwd=self.folder,
                env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                timeout=SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return -1, f"did not end within {SECONDS} s"
        return done.returncode, done.stdout[-2000:] + done.stderr[-2000:]

    def _write(self, name: str, text: str) -> None:
        file = self.folder / name
        file.write_text(text, encoding="utf-8")
        self._clock += 2
        os.utime(file, (self._clock, self._clock))


def judge(faults: Sequence[Fault], root: Path = ROOT, jobs: int = 2) -> Iterator[Verdict]:
    """Yield what becomes of each fault, in order, once all tests are green without any."""
    with TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as workers:
        free: SimpleQueue[Copy] = SimpleQueue()
        for number in range(jobs):
            (Path(folder) / str(number)).mkdir()
            free.put(Copy(root, Path(folder) / str(number)))

        def sound(tests: Sequence[str]) -> str:
            copy = free.get()
            code, said = copy.test(tests) if tests else (0, "")
            free.put(copy)
            return said if code else ""

        def one(fault: Fault) -> Verdict:
            copy = free.get()
            verdict = copy.judge(fault)
            free.put(copy)
            return verdict

        tests = sorted({test for fault in faults for test in fault.tests})
        complaints = "".join(workers.map(sound, (tests[n::jobs] for n in range(jobs))))
        if complaints:
            yield from (Verdict(fault, BROKEN, said=complaints) for fault in faults)
            return
        yield from workers.map(one, faults)


def table(verdicts: Iterable[Verdict]) -> Table:
    """Return a table with one row for every fault."""
    shown = Table("fault", "file", "tests", "result", "s", box=None, pad_edge=False)
    for verdict in verdicts:
        fault = verdict.fault
        tests = "\n".join(re.sub(r"^tests/|\.py(?=:|$)", "", test) for test in fault.tests)
        file = fault.file.removeprefix("src/anyfleet/")
        texts = (fault.name, file, tests, verdict.result, f"{verdict.seconds:.0f}")
        shown.add_row(*map(escape, texts))
    return shown


def main(words: Sequence[str], faults: Sequence[Fault], root: Path = ROOT) -> int:
    """Plant the faults that the words choose; print the table, and what was not red."""
    console = Console(width=None if sys.stdout.isatty() else 160)
    chosen = [f for f in faults if not words or any(word in f.name for word in words)]
    if not chosen:
        console.print(f"No fault has {' or '.join(words)} in its name.")
        return 1
    verdicts = []
    for verdict in judge(chosen, root):
        verdicts.append(verdict)
        count, seconds = f"{len(verdicts):>3}/{len(chosen)}", f"{verdict.seconds:4.0f} s"
        console.print(f"{count} {verdict.result:<9} {seconds}  {verdict.fault.name}", markup=False)
    console.print(table(verdicts))
    alive = [verdict for verdict in verdicts if verdict.result != RED]
    for said in dict.fromkeys(verdict.said for verdict in alive):
        names = [f"{v.result}: {v.fault.name}" for v in alive if v.said == said]
        console.print("", *names, said, sep="\n", markup=False)
    console.print(f"{len(verdicts) - len(alive)} of {len(verdicts)} faults turned a test red.")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], read()))
