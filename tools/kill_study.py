"""Kill a study at random moments, go on with the same command, and see whether the table differs.

    python -m tools.kill_study [N] [--seed S] [--jobs J]

`anyfleet compare` of five methods with three seeds each on the task of the demo is played once
without disturbing it and with one process, then with J processes, and then again while it is killed
N times (by default 10) with SIGKILL, each time after a random time, and started again with the same
command. Every other time only the process that was started is killed, otherwise all of its group.
What the last command prints and every file of results must have the
same bytes, and no run that was finished may be played again. The exit code is 1 otherwise. POSIX
only.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from anyfleet.cli.demo import experiments
from anyfleet.store import describe

METHODS = ("FedAvg", "HeteroFL", "FedPMT", "WHALE-FL", "AnycostFL")
SEEDS = 3
FILES = ("rounds.jsonl", "ledger.jsonl", "model.safetensors", "config.toml", "remarks.json")


def _say(text: str) -> None:
    Console(highlight=False).print(text, markup=False, soft_wrap=True)


def command(folder: Path, jobs: int) -> Sequence[str]:
    """Return the command that begins the study, and that goes on with it."""
    files = [str(folder / f"{name}.toml") for name in METHODS]
    options = ["--seeds", str(SEEDS), "--out", "study", "--jobs", str(jobs)]
    return [sys.executable, "-m", "anyfleet.cli", "compare", *files, *options]


def start(home: Path, words: Sequence[str]) -> subprocess.Popen[str]:
    """Start a command in a process group of its own, in a working folder of its own."""
    home.mkdir(exist_ok=True)
    return subprocess.Popen(  # noqa: S603 - our own command
        words,
        cwd=home,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def ended(process: subprocess.Popen[str]) -> str:
    """Wait until a command ends well, and return what it printed."""
    out, told = process.communicate()
    if process.returncode:
        raise SystemExit(f"exit code {process.returncode}:\n{out}\n{told}")
    return out


def results(study: Path) -> Mapping[str, bytes]:
    """Return the bytes of all files that must be the same."""
    found = [file for name in FILES for file in study.rglob(name)]
    found += [study / name for name in ("results.csv", "results.json", "results.tex")]
    return {str(file.relative_to(study)): file.read_bytes() for file in sorted(found)}


def closed(study: Path) -> Mapping[str, int]:
    """Return when each finished run was closed."""
    marks = study.rglob("remarks.json")
    return {str(mark.parent): mark.with_name("summary.json").stat().st_mtime_ns for mark in marks}


def kill(home: Path, words: Sequence[str], moments: Sequence[float]) -> list[str]:
    """Kill the study after so many seconds each time; return the runs that were played again."""
    again: list[str] = []
    for number, moment in enumerate(moments):
        before = closed(home / "study")
        process = start(home, words)
        time.sleep(moment)
        alone = number % 2 == 1
        (os.kill if alone else os.killpg)(process.pid, signal.SIGKILL)
        process.communicate()  # until those that it started are gone, too
        after = closed(home / "study")
        again += [run for run, at in before.items() if after[run] != at]
        who = "the parent alone" if alone else "the group"
        _say(f"killed {who} after {moment:.1f} s: {len(after)} runs are finished")
    return again


def main(kills: int, seed: int, jobs: int, rounds: int) -> int:
    """Play the study undisturbed and killed, compare, and return the exit code."""
    luck = random.Random(seed)  # noqa: S311 - no secret
    with TemporaryDirectory() as made:
        folder = Path(made)
        chosen = experiments(rounds=rounds, seed=0, references=False)
        for name in METHODS:
            (folder / f"{name}.toml").write_text(describe(chosen[name]))
        seconds, shown = {}, {}
        for count in (1, jobs):
            began = time.monotonic()
            shown[count] = ended(start(folder / f"jobs-{count}", command(folder, count)))
            seconds[count] = time.monotonic() - began
            _say(f"--jobs {count}: {seconds[count]:.1f} s")
        _say(f"--jobs {jobs} takes {seconds[jobs] / seconds[1]:.2f} of --jobs 1")
        # So that all of them together take about as long as the study, and some hit its beginning.
        moments = [luck.uniform(0.5, 2 * (6 + seconds[jobs] / kills)) for _ in range(kills)]
        home = folder / "killed"
        again = kill(home, command(folder, jobs), moments)
        last = ended(start(home, command(folder, jobs)))
        wrong = [f"table of --jobs {count}" for count, text in shown.items() if text != last]
        whole = results(folder / "jobs-1" / "study")
        for other in (folder / f"jobs-{jobs}" / "study", home / "study"):
            found = results(other)
            wrong += [name for name in {**whole, **found} if whole.get(name) != found.get(name)]
    _say(last)
    told = ", ".join(wrong) or "nothing"
    _say(f"{kills} kills: {told} differs; finished runs that were played again: {len(again)}.")
    return 1 if wrong or again else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Kill a study and go on with it.")
    parser.add_argument("kills", nargs="?", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    sys.exit(main(given.kills, given.seed, given.jobs, given.rounds))
