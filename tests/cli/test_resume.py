"""`anyfleet resume`: runs that were stopped go on, and say what stands against it."""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from anyfleet.analysis.plots import NoPictures
from anyfleet.cli import demo
from anyfleet.experiment import Prepared, RoundResult
from anyfleet.store import read_rounds
from anyfleet.store.disk import Lock
from tests.cli.test_commands import anyfleet_command, succeeds

RECORD = ("config.toml", "rounds.jsonl", "ledger.jsonl", "model.safetensors", "papers.bib")
RUN_FILE = """
rounds = 3

[task]
use = "Synthetic"
server = 20
data = { devices = 4, samples = 40 }
model = { use = "perceptron", features = 60, hidden = [8] }

[method]
use = "heterofl"
widths = [1.0, 0.5]
count = 2
lr = 0.1
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working folder with a run file, and with a run of it that nobody disturbed."""
    made = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        (made / "small.toml").write_text(RUN_FILE)
        succeeds("run", "small.toml", "--out", "whole", "--checkpoint-every", "1")
        yield made


def no_picture(*_: object, **__: object) -> None:
    raise NoPictures


@pytest.fixture
def folder(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of a command: as above, its own; and no time for pictures."""
    shutil.copytree(home, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("anyfleet.cli.run.draw", no_picture)
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
    _, then, *_ = succeeds("run", "small.toml", "rounds=1").splitlines()
    assert then == "Run folder: runs/small (if it stops: anyfleet resume runs/small)"


def test_a_run_that_was_cut_short_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Path] = []
    monkeypatch.setattr("anyfleet.cli.run.draw", lambda file, *_, **__: drawn.append(file))
    shutil.copytree("whole", "cut")
    cut_short(folder / "cut", 2)
    shown = succeeds("resume", "cut")
    assert "Run folder: cut (goes on after 2 of 3 rounds)" in shown
    assert "round 3/3" in shown
    assert "accuracy" in shown
    assert contents(folder / "cut") == contents(folder / "whole")
    summaries = [json.loads((folder / n / "summary.json").read_text()) for n in ("whole", "cut")]
    assert summaries[0]["result"] == summaries[1]["result"]
    assert drawn == [Path("cut/curves.png")]


def test_a_finished_run_is_left_alone(folder: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in (folder / "whole").rglob("*")}
    assert "whole has all of its rounds" in succeeds("resume", "whole")
    assert {file: file.stat().st_mtime_ns for file in (folder / "whole").rglob("*")} == before


def test_a_run_that_ended_at_its_score_is_left_alone(folder: Path) -> None:
    succeeds("run", "small.toml", "stop_at=0.0", "--out", "run")
    assert len(read_rounds("run")) == 1
    assert "run has reached the score at which it ends" in succeeds("resume", "run")
    assert "run has reached the score" in succeeds("resume", "run", "--rounds", "5")
    assert len(read_rounds("run")) == 1


def test_a_finished_run_can_become_longer(folder: Path) -> None:
    succeeds("run", "small.toml", "rounds=2", "--out", "run")
    assert "round 3/3" in succeeds("resume", "run", "--rounds", "3")
    assert contents(folder / "run") == contents(folder / "whole")


def test_what_stands_against_it_is_told(folder: Path) -> None:
    cut_short(folder / "whole", 2)
    file = folder / "whole/environment.json"
    recorded = json.loads(file.read_text())
    recorded["conditions"]["numpy"] = "0.9"
    file.write_text(json.dumps(recorded))
    refused = anyfleet_command("resume", "whole")
    assert refused.exit_code == 1
    assert "numpy: 0.9 then" in refused.output
    assert "--not-identical" in refused.output
    assert "Not identical from here on: numpy" in succeeds("resume", "whole", "--not-identical")
    assert len(read_rounds(folder / "whole")) == 3


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["resume", "small.toml"], "small.toml is a file; name the folder of a run"),
        (["resume", "small.toml"], "To start a run file: anyfleet run small.toml"),
        (["resume", "none"], "none does not exist."),
        (["resume", "."], ". has no environment.json"),
        (["run", "small.toml", "--out", "small.toml/run"], "cannot be written"),
    ],
)
def test_errors_are_messages(folder: Path, words: list[str], told: str) -> None:
    result = anyfleet_command(*words)
    assert result.exit_code == 1, result.output
    assert told in result.output
    assert isinstance(result.exception, SystemExit)


def test_a_run_in_use_is_refused(folder: Path) -> None:
    cut_short(folder / "whole", 2)
    lock = Lock(folder / "whole")
    refused = anyfleet_command("resume", "whole")
    assert f"whole is in use by process {os.getpid()}" in refused.output
    lock.release()
    succeeds("resume", "whole")


def test_runs_of_a_comparison_can_be_resumed_one_by_one(folder: Path) -> None:
    # After the first step and at the end there is always a checkpoint.
    (folder / "small.toml").write_text(RUN_FILE.replace("rounds = 3", "rounds = 2"))
    succeeds("compare", "small.toml", "--seeds", "1", "--out", "all")
    run = folder / "all/small/seed-0"
    before = contents(run)
    cut_short(run, 1)
    assert "(goes on after 1 of 2 rounds)" in succeeds("resume", str(run))
    assert contents(run) == before


MINE = """
from dataclasses import dataclass, replace
from anyfleet.parts.select import Everyone

@dataclass(frozen=True)
class _Seen:
    rounds: tuple[int, ...] = ()

@dataclass(frozen=True)
class Counting(Everyone):
    def init(self, view):
        return _Seen()
    def learn(self, updates, diagnostics, view, state):
        return _Seen((*state.rounds, view.round_index))
    def diagnostics(self, state):
        return {"seen": float(sum(state.rounds))}
"""


def test_code_beside_the_run_file_is_found_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "counting_part.py").write_text(MINE)
    changes = 'select = { use = "counting_part:Counting" }\n[allow]\npackages = ["counting_part"]\n'
    (folder / "own.toml").write_text(RUN_FILE.replace("count = 2\n", "") + changes)
    trust = ("--allow", "counting_part")
    succeeds("run", "own.toml", "--out", "run", "--checkpoint-every", "1", *trust)
    before = contents(folder / "run")
    cut_short(folder / "run", 2)
    monkeypatch.delitem(sys.modules, "counting_part")
    refused = anyfleet_command("resume", "run")
    assert refused.exit_code == 1
    assert "--allow counting_part" in refused.output
    assert "counting_part" not in sys.modules
    assert "(goes on after 2 of 3 rounds)" in succeeds("resume", "run", *trust)
    assert contents(folder / "run") == before
    monkeypatch.delitem(sys.modules, "counting_part")


def test_a_comparison_that_is_stopped_says_what_can_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played: list[Prepared] = []
    play = Prepared.play

    def stopped_in_the_second(prepared: Prepared, *rest: Any) -> Iterator[RoundResult]:
        played.append(prepared)
        for result in play(prepared, *rest):
            yield result
            if len(played) > 1:
                raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Prepared, "play", stopped_in_the_second)
    Path("run.toml").write_text(RUN_FILE)
    shown = anyfleet_command("compare", "run.toml", "--seeds", "3", "--out", "out")
    assert shown.exit_code == 130
    assert "Partial: 1 of 3 runs." in shown.output
    assert shown.output.splitlines()[-1] == "To go on: anyfleet resume out"
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert "goes on after 1 of 3" in succeeds("resume", "out/run/seed-1")
    again = succeeds("resume", "out", "--jobs", "1")
    assert "1 of 3 runs are finished already" in again  # the other lacks its remarks
    assert "Partial" not in again


def test_a_demonstration_that_is_stopped_says_what_can_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: Any, **__: Any) -> Iterator[RoundResult]:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Prepared, "play", stopped)
    monkeypatch.setattr(demo, "TASK", replace(demo.TASK, limit=300, server=20))
    shown = anyfleet_command("demo", "--out", "out")
    assert shown.exit_code == 130
    assert "None of the 6 runs is finished." in shown.output
    assert shown.output.splitlines()[-1] == "To go on: anyfleet resume out"
