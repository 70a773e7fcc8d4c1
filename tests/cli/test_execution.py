"""The options --device and --engine, and the first line, which says how a run is carried out."""

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from anyfleet.cli import demo
from anyfleet.cli.app import app
from tests.cli.test_commands import anyfleet_command, succeeds
from tests.cli.test_resume import RUN_FILE, no_picture

CHOSEN = (
    "device cpu, engine Sequential (not measured: the run is short; pin it with engine = "
    '{ use = "Sequential" }), float32'
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with two run files, and no time for pictures."""
    (tmp_path / "one.toml").write_text(RUN_FILE)
    (tmp_path / "two.toml").write_text(RUN_FILE.replace("heterofl", "fedrolex"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("anyfleet.cli.run.draw", no_picture)
    return tmp_path


def settings(run: str) -> tuple[Any, str]:
    """The engine and the device in the configuration of a run."""
    written = tomllib.loads(Path(run, "config.toml").read_text())
    return written["engine"]["use"].rpartition(":")[2], written["device"]


def test_a_run_says_in_its_first_line_how_it_is_carried_out(folder: Path) -> None:
    assert (
        succeeds("run", "one.toml", "rounds=2", "--out", "run").splitlines()[0] == f"one: {CHOSEN}"
    )
    assert settings("run") == ("Sequential", "cpu")
    resumed = succeeds("resume", "run", "--rounds", "3").splitlines()
    assert resumed[0] == "run: device cpu, engine Sequential, float32"


def test_an_option_names_engine_and_device(folder: Path) -> None:
    options = ("--engine", "Stacked", "--device", "cpu")
    shown = succeeds("run", "one.toml", "rounds=2", "--out", "run", *options)
    assert shown.splitlines()[0] == "one: device cpu, engine Stacked, float32"
    assert settings("run") == ("Stacked", "cpu")
    (folder / "pinned.toml").write_text('engine = { use = "Threads", workers = 3 }\n' + RUN_FILE)
    succeeds("run", "pinned.toml", "rounds=1", "--out", "threads")
    assert settings("threads") == ("Threads", "cpu")
    succeeds("run", "pinned.toml", "rounds=1", "--out", "other", *options)
    assert settings("other") == ("Stacked", "cpu")
    shown = succeeds("run", "pinned.toml", "rounds=1", "--out", "auto", "--engine", "auto")
    assert shown.splitlines()[0] == f"pinned: {CHOSEN}"


def test_runs_that_are_compared_have_one_engine(folder: Path) -> None:
    words = ("compare", "one.toml", "two.toml", "rounds=1", "--seeds", "2", "--out")
    assert succeeds(*words, "all").splitlines()[0] == f"All: {CHOSEN}"
    every = [f"all/{name}/seed-{seed}" for name in ("one", "two") for seed in (0, 1)]
    assert {settings(run) for run in every} == {("Sequential", "cpu")}
    shown = succeeds(*words, "named", "--engine", "Stacked")
    assert "All: " not in shown
    assert settings("named/two/seed-1") == ("Stacked", "cpu")


def test_the_demonstration_has_one_engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "TASK", replace(demo.TASK, limit=300, server=20))
    assert succeeds("demo", "--rounds", "1", "--out", "demo").splitlines()[0] == f"All: {CHOSEN}"
    assert settings("demo/anycostfl") == ("Sequential", "cpu")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["run", "one.toml", "--engine", "Stackd"], 'engine.use: "Stackd" is no part'),
        (["compare", "one.toml", "--engine", "Stackd"], 'engine.use: "Stackd" is no part'),
        (["demo", "--engine", "Stackd"], 'engine.use: "Stackd" is no part'),
        (["run", "one.toml", "--device", "gpu"], 'device must be "auto", "cpu", "cuda"'),
        (["demo", "--device", "gpu"], 'device must be "auto", "cpu", "cuda"'),
    ],
)
def test_what_does_not_exist_is_told(folder: Path, words: list[str], told: str) -> None:
    result = anyfleet_command(*words)
    assert result.exit_code == 1, result.output
    assert told in result.output
    assert not (folder / "runs").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", ["run one.toml", "compare one.toml two.toml", "demo"])
def test_a_gpu_that_is_not_there_is_told_before_anything_runs(folder: Path, command: str) -> None:
    result = anyfleet_command(*command.split(), "--device", "cuda")
    assert result.exit_code == 1, result.output
    assert 'device: "cuda" asks for a GPU, but torch finds no CUDA device here' in result.output
    assert not (folder / "runs").exists()


def test_the_options_are_those_of_every_command_that_runs() -> None:
    named = {
        command.callback.__name__
        for command in app.registered_commands
        if command.callback and {"device", "engine"} <= command.callback.__annotations__.keys()
    }
    assert named == {"demo", "run", "compare"}
