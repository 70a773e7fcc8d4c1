"""Results from disk, as values and as a DataFrame."""

import math
import shutil
import sys
from pathlib import Path

import pytest

import anyfleet
from anyfleet.analysis.comparison import Goal, compare
from anyfleet.analysis.results import NoPandas, read_runs, result_rows
from anyfleet.cli.compare import compare_files
from anyfleet.cli.run import Means
from anyfleet.cli.study import Manner
from anyfleet.errors import StoreError
from anyfleet.store import read_rounds
from tests.cli.test_commands import RUN_FILE


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison of two files with two seeds each."""
    folder = tmp_path_factory.mktemp("study")
    for name, lr in (("slow", "0.01"), ("fast", "0.1")):
        (folder / f"{name}.toml").write_text(RUN_FILE.replace("lr = 0.1", f"lr = {lr}"))
    words = [str(folder / f"{name}.toml") for name in ("slow", "fast")]
    compare_files(
        [*words, "evaluate_every=5", "rounds=3"],
        seeds=2,
        means=Means(),
        goal=Goal(),
        manner=Manner(folder / "out", jobs=1),
    )
    return folder / "out"


def test_rows_are_the_rounds_of_all_runs(study: Path) -> None:
    rows = result_rows(study)
    keys = [(row["run"], row["seed"], row["round_index"]) for row in rows]
    assert keys == [(n, s, k) for n in ("slow", "fast") for s in (0, 1) for k in range(3)]
    assert all(row["finished"] for row in rows)
    record = read_rounds(study / "slow/seed-1")[2]
    (row,) = (
        each
        for each in rows
        if (each["run"], each["seed"]) == ("slow", 1) and each["round_index"] == 2
    )
    assert (row["time"], row["joules"], row["score"]) == (record.time, record.joules, record.score)
    assert row["test_accuracy"] == record.scores["accuracy"]
    assert row["test_loss"] == record.scores["loss"] != row["loss"]
    skipped = rows[1]
    assert "test_accuracy" not in skipped
    assert math.isnan(skipped["score"])


def test_runs_from_disk_can_be_compared(study: Path) -> None:
    runs = read_runs(study)
    assert {name: list(group) for name, group in runs.items()} == {"fast": [0, 1], "slow": [0, 1]}
    assert compare(runs).common_seeds("slow") == (0, 1)
    assert list(read_runs(study / "slow/seed-1")) == ["seed-1"]


def test_seeds_below_0_belong_to_their_run(study: Path, tmp_path: Path) -> None:
    shutil.copytree(study, tmp_path / "copy")
    (tmp_path / "copy/slow/seed-0").rename(tmp_path / "copy/slow/seed--1")
    file = tmp_path / "copy/slow/seed--1/config.toml"
    file.write_text(file.read_text().replace("seed = 0", "seed = -1"))
    runs = read_runs(tmp_path / "copy")
    assert {name: list(group) for name, group in runs.items()} == {"fast": [0, 1], "slow": [-1, 1]}


def test_runs_that_are_not_finished_are_marked(study: Path, tmp_path: Path) -> None:
    shutil.copytree(study, tmp_path / "copy")
    (tmp_path / "copy/slow/seed-1/summary.json").unlink()
    open_ = {
        (row["run"], row["seed"]) for row in result_rows(tmp_path / "copy") if not row["finished"]
    }
    assert open_ == {("slow", 1)}
    assert list(read_runs(tmp_path / "copy")["slow"]) == [0]


def test_runs_of_a_study_have_their_names_there(study: Path, tmp_path: Path) -> None:
    shutil.copytree(study / "slow", tmp_path / "mine_lr=0.1")
    shutil.copytree(study / "fast", tmp_path / "fedavg")
    (tmp_path / "study.toml").write_text('[cells."Mine, lr=0.1"]\n[cells.FedAvg]\n')
    assert list(read_runs(tmp_path)) == ["Mine, lr=0.1", "FedAvg"]


def test_folders_without_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="holds no run"):
        result_rows(tmp_path)
    with pytest.raises(StoreError, match="is not a folder"):
        result_rows(tmp_path / "none")
    (tmp_path / "environment.json").write_text("{}")
    with pytest.raises(StoreError, match=r"config\.toml cannot be read"):
        result_rows(tmp_path)
    (tmp_path / "config.toml").write_text("rounds = 3\n")
    with pytest.raises(StoreError, match="has no seed"):
        result_rows(tmp_path)


def test_a_data_frame_comes_of_one_call(study: Path) -> None:
    pytest.importorskip("pandas")
    frame = anyfleet.read_results(study)
    assert len(frame) == 12
    assert list(frame.columns[:4]) == ["run", "seed", "finished", "round_index"]
    last = frame[frame.round_index == 2].groupby("run")["score"].mean()
    expected = {name: compare(read_runs(study)).mean("score", name).mean for name in last.index}
    assert last.to_dict() == pytest.approx(expected)
    assert frame["test_accuracy"].isna().sum() == 4  # the second of three rounds


def test_without_pandas_the_message_says_what_to_install(
    study: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(NoPandas, match=r"pip install 'anyfleet\[report\]'"):
        anyfleet.read_results(study)
