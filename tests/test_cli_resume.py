"""`anyfleet resume`: runs that were stopped go on, and say what stands against it."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from anyfleet.store import read_points
from anyfleet.store.disk import Lock
from tests.test_cli import RUN_FILE, anyfleet_command, succeeds

RECORD = ("config.toml", "points.jsonl", "ledger.jsonl", "model.safetensors", "papers.bib")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of a command, with a run file in it."""
    (tmp_path / "small.toml").write_text(RUN_FILE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents(run: Path) -> dict[str, bytes]:
    return {name: (run / name).read_bytes() for name in RECORD}


def cut_short(run: Path, steps: int) -> None:
    """As if the process had been killed before it wrote more."""
    for path in (run / "checkpoints").iterdir():
        if int(path.name) > steps:
            shutil.rmtree(path)
    for name in ("summary.json", "model.safetensors", "curves.png"):
        (run / name).unlink(missing_ok=True)


def test_a_run_says_at_once_how_to_resume_it(folder: Path) -> None:
    first = succeeds("run", "small.toml", "rounds=1").splitlines()[0]
    assert first == "Run folder: runs/small (should it stop: anyfleet resume runs/small)"


def test_a_run_that_was_cut_short_goes_on(folder: Path) -> None:
    succeeds("run", "small.toml", "rounds=3", "--out", "whole", "--checkpoint-every", "1")
    shutil.copytree("whole", "cut")
    cut_short(folder / "cut", 2)
    shown = succeeds("resume", "cut")
    assert "Run folder: cut (goes on after 2 of 3 steps)" in shown
    assert "step 3/3" in shown
    assert "accuracy" in shown
    assert contents(folder / "cut") == contents(folder / "whole")
    summaries = [json.loads((folder / n / "summary.json").read_text()) for n in ("whole", "cut")]
    assert summaries[0]["result"] == summaries[1]["result"]
    assert (folder / "cut/curves.png").exists()


def test_a_finished_run_is_left_alone(folder: Path) -> None:
    succeeds("run", "small.toml", "--out", "run")
    before = {file: file.stat().st_mtime_ns for file in (folder / "run").rglob("*")}
    assert "run has all of its steps" in succeeds("resume", "run")
    assert {file: file.stat().st_mtime_ns for file in (folder / "run").rglob("*")} == before
    assert "step 4/4" in succeeds("resume", "run", "--rounds", "4")
    succeeds("run", "small.toml", "rounds=4", "--out", "longer")
    assert contents(folder / "run") == contents(folder / "longer")


def test_what_stands_against_it_is_told(folder: Path) -> None:
    succeeds("run", "small.toml", "--out", "run", "--checkpoint-every", "1")
    cut_short(folder / "run", 1)
    file = folder / "run/environment.json"
    recorded = json.loads(file.read_text())
    recorded["conditions"]["numpy"] = "0.9"
    file.write_text(json.dumps(recorded))
    refused = anyfleet_command("resume", "run")
    assert refused.exit_code == 1
    assert "numpy: 0.9 then" in refused.output
    assert "--not-identical" in refused.output
    assert "Not identical from here on: numpy" in succeeds("resume", "run", "--not-identical")
    assert len(read_points(folder / "run")) == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["resume", "small.toml"], "has no environment.json"),
        (["resume", "none"], "has no environment.json"),
        (["run", "small.toml", "--out", "small.toml/run"], "cannot be written"),
    ],
)
def test_errors_are_messages(folder: Path, words: list[str], told: str) -> None:
    result = anyfleet_command(*words)
    assert result.exit_code == 1, result.output
    assert told in result.output
    assert isinstance(result.exception, SystemExit)


def test_a_run_in_use_is_refused(folder: Path) -> None:
    succeeds("run", "small.toml", "--out", "run", "--checkpoint-every", "1")
    cut_short(folder / "run", 1)
    lock = Lock(folder / "run")
    refused = anyfleet_command("resume", "run")
    assert f"run is in use by process {os.getpid()}" in refused.output
    lock.release()
    succeeds("resume", "run")


def test_runs_of_a_comparison_can_be_resumed_one_by_one(folder: Path) -> None:
    words = ("compare", "small.toml", "--seeds", "1", "--out", "all")
    succeeds(*words)
    run = folder / "all/small/seed-0"
    before = contents(run)
    cut_short(run, 1)
    assert "(goes on after 1 of 2 steps)" in succeeds("resume", str(run))
    assert contents(run) == before


MINE = """
from dataclasses import dataclass, replace
from anyfleet.method import Policy
from anyfleet.select import Everyone

@dataclass(frozen=True)
class _Seen:
    steps: tuple[int, ...] = ()

@dataclass(frozen=True)
class Counting(Everyone):
    def init(self, view):
        return _Seen()
    def learn(self, state, arrivals, notes, view):
        return _Seen((*state.steps, view.step))
    def tells(self, state):
        return {"seen": float(sum(state.steps))}
"""


def test_code_beside_the_run_file_is_found_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "counting_part.py").write_text(MINE)
    changes = 'select = { use = "counting_part:Counting" }\n[allow]\npackages = ["counting_part"]\n'
    (folder / "own.toml").write_text(RUN_FILE.replace("count = 2\n", "") + changes)
    succeeds("run", "own.toml", "rounds=3", "--out", "run", "--checkpoint-every", "1")
    before = contents(folder / "run")
    cut_short(folder / "run", 2)
    monkeypatch.delitem(sys.modules, "counting_part")
    assert "(goes on after 2 of 3 steps)" in succeeds("resume", "run")
    assert contents(folder / "run") == before
    monkeypatch.delitem(sys.modules, "counting_part")
