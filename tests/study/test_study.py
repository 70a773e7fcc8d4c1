"""Studies in real processes: in parallel, killed, stopped, gone on with; the table is the same."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import chdir
from pathlib import Path

import pytest

from anyfleet.store import read_rounds
from anyfleet.store.disk import Lock
from tests.cli.test_commands import ENVIRONMENT, anyfleet_command, succeeds

RUN_FILE = """
rounds = 12

[task]
use = "Synthetic"
server = 20
data = { devices = 6, samples = 40 }
model = { use = "perceptron", features = 60, hidden = [8] }

[method]
use = "heterofl"
widths = [1.0, 0.5]
count = 3
lr = 0.1
"""
OTHER = RUN_FILE.replace('"heterofl"', '"fedavg"').replace("widths = [1.0, 0.5]\n", "")
FILES = ("one.toml", "two.toml")
WORDS = ("compare", *FILES, "--seeds", "2", "--engine", "Sequential", "--out", "study")
RUNS = [f"{name}/seed-{seed}" for name in ("one", "two") for seed in (0, 1)]
RECORD = ("config.toml", "rounds.jsonl", "ledger.jsonl", "model.safetensors", "remarks.json")
PATIENCE = 120.0


def started(folder: Path, *words: str) -> subprocess.Popen[str]:
    """A command in a process group of its own, as a shell starts it."""
    return subprocess.Popen(
        [sys.executable, "-m", "anyfleet.cli", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=ENVIRONMENT,
        start_new_session=True,
    )


def shown(folder: Path, *words: str) -> str:
    """What a command prints that succeeds."""
    process = started(folder, *words)
    out, told = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, told
    return out


def home(folder: Path) -> Path:
    """A working folder with two run files."""
    folder.mkdir(exist_ok=True)
    (folder / "one.toml").write_text(RUN_FILE)
    (folder / "two.toml").write_text(OTHER)
    return folder


def contents(study: Path) -> Mapping[str, bytes]:
    """What must be the same, whatever happened on the way."""
    files = [f"{run}/{name}" for run in RUNS for name in RECORD]
    return {name: (study / name).read_bytes() for name in ("results.json", "study.toml", *files)}


def unlike(one: Path, two: Path) -> list[str]:
    left, right = contents(one), contents(two)
    places = bytes(one.parent), bytes(two.parent)
    return [name for name in right if left[name].replace(*places) != right[name]]


def times(study: Path) -> Mapping[Path, int]:
    return {
        file: file.stat().st_mtime_ns
        for run in RUNS
        for file in (study / run).rglob("*")
        if file.is_file()
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The study that nobody disturbs, in this process, and what it prints."""
    folder = home(tmp_path_factory.mktemp("whole"))
    return folder / "study", printed(folder, *WORDS)


def printed(folder: Path, *words: str) -> str:
    """What a command prints that succeeds in this process."""
    with chdir(folder):
        result = anyfleet_command(*words)
    assert result.exit_code == 0, result.output
    return str(result.stdout)


def waited(process: subprocess.Popen[str], file: Path, lines: int) -> None:
    """Until a file has so many lines."""
    patience = time.monotonic() + PATIENCE
    while not (file.exists() and file.read_bytes().count(b"\n") >= lines):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < patience
        time.sleep(0.02)


def group_is_gone(leader: int) -> bool:
    """Whether no process of a group is left; what serves multiprocessing ends after the others."""
    patience = time.monotonic() + 20.0
    while time.monotonic() < patience:
        try:
            os.killpg(leader, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_processes_change_nothing(whole: tuple[Path, str], tmp_path: Path) -> None:
    folder = home(tmp_path)
    assert shown(folder, *WORDS, "--jobs", "2") == whole[1]
    assert unlike(whole[0], folder / "study") == []


def test_a_study_that_is_killed_ends_with_the_same_table(
    whole: tuple[Path, str], tmp_path: Path
) -> None:
    folder, luck = home(tmp_path), random.Random(0)
    for _ in range(2):
        process = started(folder, *WORDS, "--jobs", "2")
        if (folder / "study/study.toml").exists():  # else it is killed while it begins
            time.sleep(2.0)
        time.sleep(4.0 * luck.random())
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert printed(folder, *WORDS) == whole[1]
    assert unlike(whole[0], folder / "study") == []


SLOW = """
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from anyfleet.parts.select import Uniform

CALLS = count()

@dataclass(frozen=True)
class Slow(Uniform):
    def __call__(self, *words):
        if next(CALLS) == 3 and Path(__file__).with_name("slow").exists():
            time.sleep(300)
        return super().__call__(*words)
"""


def test_processes_do_not_outlive_the_one_that_started_them(
    whole: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = home(tmp_path)
    (folder / "slow_part.py").write_text(SLOW)
    (folder / "slow").touch()
    own = 'select = { use = "slow_part:Slow", count = 3 }\n'
    for name, text in (("one", RUN_FILE), ("two", OTHER)):
        (folder / f"{name}.toml").write_text(text.replace("count = 3\n", own))
    words = (*WORDS, "--allow", "slow_part")
    process = started(folder, *words, "--jobs", "2")
    for run in RUNS[:2]:  # each of another task, so that two processes have them
        waited(process, folder / "study" / run / "rounds.jsonl", 3)
    process.kill()  # it alone, in the middle of a round of the others
    process.communicate(timeout=PATIENCE)
    assert group_is_gone(process.pid)
    (folder / "slow").unlink()
    assert printed(folder, *words) == whole[1]
    monkeypatch.delitem(sys.modules, "slow_part")


def test_what_is_finished_is_not_run_again(
    whole: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(whole[0].parent)
    before = times(whole[0])
    for words in (WORDS, ("resume", "study")):
        again = anyfleet_command(*words)
        assert again.stderr == "4 of 4 runs are finished already; 0 to play.\n"
        assert again.stdout == whole[1]
    assert times(whole[0]) == before


def test_what_is_missing_is_played(
    whole: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "home"
    shutil.copytree(whole[0].parent, folder)
    written = folder / "study/study.toml"
    written.write_bytes(written.read_bytes().replace(bytes(whole[0].parent), bytes(folder)))
    monkeypatch.chdir(folder)
    gone = folder / "study/two/seed-1"
    for file in sorted(gone.rglob("*"), reverse=True):
        (file.rmdir if file.is_dir() else file.unlink)()
    kept = {file: at for file, at in times(folder / "study").items() if gone not in file.parents}
    for name in ("one.toml", "two.toml"):
        (folder / name).unlink()  # the study knows them
    again = succeeds("resume", "study", "--jobs", "1")
    assert "3 of 4 runs are finished already; 1 to play." in again
    assert again.count(": finished") == 1
    assert unlike(whole[0], folder / "study") == []
    now = times(folder / "study")
    assert {file: now[file] for file in kept} == kept


def test_the_same_command_goes_on_without_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was killed could not say how to go on."""
    monkeypatch.chdir(home(tmp_path))
    engine = ("--engine", "Sequential", "--jobs", "1")
    words = ("compare", "one.toml", "rounds=2", "--seeds", "2", *engine)
    first = succeeds(*words)
    assert "Folder: runs/compare\n" in first
    assert "Folder: runs/compare-2\n" in succeeds(*words)  # the first one is finished
    study = Path("runs/compare")
    shutil.rmtree(study / "one/seed-1")
    lock = Lock(study)
    assert "Folder: runs/compare-3\n" in succeeds(*words)  # somebody plays the first one
    lock.release()
    assert "Folder: runs/compare-4\n" in succeeds(*words, "method.lr=0.2")  # it is another one
    (Path("runs/compare-2") / "study.toml").write_text("nothing")
    again = succeeds(*words)
    assert f"Going on with {study}, which holds this study unfinished" in again
    assert "1 of 2 runs are finished already; 1 to play." in again
    assert not Path("runs/compare-5").exists()
    monkeypatch.setattr("anyfleet.cli.study.holds_study", lambda _: False)  # as it begins
    lock = Lock(study)
    refused = anyfleet_command(*words, "--out", "runs/compare")
    assert refused.exit_code == 1
    assert f"in use by process {os.getpid()}" in refused.output
    lock.release()


def test_seeds_are_added_to_a_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home(tmp_path))
    words = ("compare", "one.toml", "two.toml", "rounds=2", "--engine", "Sequential")
    succeeds(*words, "--seeds", "1", "--out", "study")
    finished = [*Path("study").glob("*/seed-0/*.*")]
    before = {file: file.stat().st_mtime_ns for file in finished}
    more = succeeds(*words, "--seeds", "3", "--out", "study")
    assert "2 of 6 runs are finished already; 4 to play." in more
    assert {file: file.stat().st_mtime_ns for file in finished} == before
    succeeds(*words, "--seeds", "3", "--out", "anew")
    assert unlike(Path("study"), Path("anew")) == ["study.toml"]  # which names its folder
    again = succeeds("resume", "study")
    assert "6 of 6 runs are finished already; 0 to play." in again
    state = Path("study/study.toml").read_bytes()
    refused = anyfleet_command(*words, "--seeds", "4", "--out", "study", "--metric", "nothing")
    assert refused.exit_code == 2
    assert Path("study/study.toml").read_bytes() == state
    # Another number of seeds without --out is another study, also if the first is unfinished.
    succeeds(*words, "--seeds", "1")
    shutil.rmtree("runs/compare/one/seed-0")
    assert "Folder: runs/compare-2\n" in succeeds(*words, "--seeds", "2")


def test_another_study_is_refused(whole: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(whole[0].parent)
    before = times(whole[0])
    words = ("compare", "one.toml", "--seeds", "3", "--out", "study", "method.lr=0.2")
    refused = anyfleet_command(*words, "--threads", "2")
    assert refused.exit_code == 1
    for told in (
        "study holds another study:",
        "--threads: 1 there, 2 asked for",
        "two: runs there, not asked for",
        "one: method.train.lr.start: 0.1 there, 0.2 asked for",
        "anyfleet resume study",
    ):
        assert told in refused.output
    fewer = anyfleet_command("compare", "one.toml", "two.toml", "--seeds", "1", "--out", "study")
    told = "one: seeds 0, 1 there, 0 asked for; seeds can be added to a study, but not left out"
    assert told in " ".join(fewer.output.split())
    added = anyfleet_command("sweep", "one.toml", "method.lr=[0.1]", "--out", "study")
    assert "one, lr=0.1: asked for, not there" in added.output
    assert times(whole[0]) == before
    assert anyfleet_command("run", "one.toml", "--out", "study").exit_code == 2


def test_a_study_can_be_compared_by_another_goal(
    whole: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(home(tmp_path))
    words = ("compare", "one.toml", "rounds=1", "--seeds", "1", "--out", "study")
    succeeds(*words)
    assert "To reach 12.0 %" in succeeds(*words, "--target", "0.12")
    assert "To reach 12.0 %" in succeeds("resume", "study")
    assert "To reach 13.0 %" in succeeds("compare", "study", "--target", "0.13")
    for command in ("compare", "sweep"):
        assert "To reach 13.0 %" in succeeds(command, "study")  # which nobody changes
    refused = anyfleet_command("compare", "study", "--target", "13")
    assert (refused.exit_code, "must be a share" in refused.output) == (2, True)
    refused = anyfleet_command("compare", "study", "--metric", "mae")
    assert "is not a metric of every file" in refused.output


@pytest.mark.parametrize("command", ["compare", "sweep"])
def test_the_folder_of_a_study_takes_no_options_of_a_new_one(
    whole: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(whole[0].parent)
    before = contents(whole[0])
    for option, value in (
        ("--seeds", "3"),
        ("--out", "other"),
        ("--threads", "1"),
        ("--engine", "Stacked"),
        ("--device", "cpu"),
    ):
        refused = anyfleet_command(command, "study", option, value)
        assert refused.exit_code == 2
        assert option in refused.output
        assert "is for a new study" in refused.output
    for word in ("rounds=3", "one.toml"):
        refused = anyfleet_command(command, "study", word)
        assert (refused.exit_code, "takes no changes" in refused.output) == (2, True)
    assert contents(whole[0]) == before


def test_a_folder_in_use_is_refused(
    whole: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(whole[0].parent)
    lock = Lock(whole[0])
    for words in (WORDS, ("resume", "study")):
        refused = anyfleet_command(*words)
        assert refused.exit_code == 1
        assert f"study is in use by process {os.getpid()}" in refused.output
    lock.release()


def test_a_study_that_had_not_begun_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home(tmp_path))
    Path("study").mkdir()
    Lock(Path("study")).release()
    Path("study/.study.toml.part").write_text("form")
    words = ("compare", "one.toml", "rounds=1", "--seeds", "1", "--out", "study")
    assert "1 of 1" in succeeds(*words)
    Path("other").mkdir()
    Path("other/file").write_text("of somebody")
    refused = anyfleet_command(*words[:-1], "other")
    assert (refused.exit_code, "not empty" in refused.output) == (2, True)
    assert [file.name for file in Path("other").iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"]
)
def test_a_study_that_is_stopped_shows_what_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int
) -> None:
    folder = home(tmp_path)
    # Played first, since it could be the longest; its first score ends it.
    (folder / "one.toml").write_text("stop_at = 0.0\n" + RUN_FILE.replace("12", "200000", 1))
    (folder / "two.toml").write_text(OTHER.replace("rounds = 12", "rounds = 100000"))
    process = started(folder, *WORDS, "--jobs", "2")
    study = folder / "study"
    for run in RUNS[2:]:
        waited(process, study / run / "rounds.jsonl", 2)
    second = anyfleet_command(*WORDS[:-1], str(study))
    if number == signal.SIGINT:  # as a terminal does: to all of them
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    out, told = process.communicate(timeout=PATIENCE)
    assert process.returncode == code, told
    assert "Traceback" not in told
    assert "Partial: 2 of 4 runs." in out
    assert out.splitlines()[-1] == "To go on: anyfleet resume study"
    assert group_is_gone(process.pid)
    for run in RUNS[2:]:
        summary = json.loads((study / run / "summary.json").read_text())
        assert summary["ended"] == "interrupted"
        assert summary["result"]["rounds"] == len(read_rounds(study / run)) > 1
    monkeypatch.chdir(folder)
    assert second.exit_code == 1, second.output


FATAL = """
import os, signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from anyfleet.parts.select import Uniform

@dataclass(frozen=True)
class Fatal(Uniform):
    def __call__(self, *words):
        with suppress(FileExistsError):  # for all processes but the first
            Path(__file__).with_name("killed").touch(exist_ok=False)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(*words)
"""


def test_a_process_that_dies_takes_only_its_run_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = home(tmp_path)
    (folder / "fatal_part.py").write_text(FATAL)
    own = 'select = { use = "fatal_part:Fatal", count = 3 }\n'
    (folder / "two.toml").write_text(OTHER.replace("count = 3\n", own))
    words = (*WORDS, "--allow", "fatal_part")
    process = started(folder, *words, "--jobs", "2")
    out, told = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1, told
    assert "died: its process was ended by SIGKILL" in told
    assert told.count(": finished") == 3
    assert "Partial: 3 of 4 runs." in out
    assert out.splitlines()[-1] == "To go on: anyfleet resume study --allow fatal_part"
    monkeypatch.chdir(folder)
    again = succeeds(*words)
    assert "3 of 4 runs are finished already; 1 to play." in again
    assert "Partial" not in again


def test_an_error_in_one_run_ends_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = home(tmp_path)
    wrong = FATAL.replace("os.kill(os.getpid(), signal.SIGKILL)", "raise ZeroDivisionError('mine')")
    (folder / "wrong_part.py").write_text(wrong)
    own = 'select = { use = "wrong_part:Fatal", count = 3 }\n'
    (folder / "one.toml").write_text(RUN_FILE.replace("count = 3\n", own))
    monkeypatch.chdir(folder)
    words = (*WORDS, "--allow", "wrong_part")
    result = anyfleet_command(*words)
    assert result.exit_code == 1
    assert result.output.count("Traceback") == 1
    assert "one/seed-0: failed: ZeroDivisionError: mine" in result.output
    assert "Raised by select=Fatal(count=3" in result.output
    assert "Partial: 3 of 4 runs." in result.output
    assert "1 to play" in succeeds(*words)
    monkeypatch.delitem(sys.modules, "wrong_part")


def test_json_lines_are_all_that_is_printed(tmp_path: Path) -> None:
    folder = home(tmp_path)
    out = printed(folder, *WORDS, "rounds=2", "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    events = [line["event"] for line in lines]
    assert [events.count(each) for each in ("begun", "round", "run", "result")] == [4, 8, 4, 1]
    last = lines[-1]
    assert (last["folder"], last["finished"], last["planned"]) == ("study", 4, 4)
    assert last["results"] == json.loads((folder / "study/results.json").read_text())
    assert {(line["run"], line["seed"]) for line in lines if line["event"] == "run"} == {
        ("one", 0),
        ("one", 1),
        ("two", 0),
        ("two", 1),
    }
