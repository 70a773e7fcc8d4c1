"""The options --device and --engine, and the first line, which says how a run is carried out."""

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from anyfleet.cli import demo
from anyfleet.cli.app import app
from anyfleet.runtime import Stacked
from anyfleet.runtime.simulated import engine_choice
from anyfleet.runtime.simulated.engines import Assignment, Engine
from anyfleet.world import Fleet, World
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


def test_the_engine_of_an_option_may_have_keys(folder: Path) -> None:
    (folder / "pinned.toml").write_text('engine = { use = "Threads", workers = 3 }\n' + RUN_FILE)
    words = ("pinned.toml", "rounds=1", "engine.chunk=4", "--engine", "Stacked", "--out")
    told = "device cpu, engine Stacked(chunk=4), float32"
    assert succeeds("run", *words, "run").splitlines()[0] == f"pinned: {told}"
    assert succeeds("compare", *words, "all").splitlines()[0] == f"All: {told}"


@pytest.mark.parametrize(
    ("option", "change"),
    [
        (("--engine", "Stacked"), "engine.use=Threads"),
        (("--engine", "auto"), 'engine = { use = "Threads" }'),
        (("--device", "cpu"), "device=auto"),
    ],
)
@pytest.mark.parametrize("command", ["run", "compare"])
def test_what_is_named_twice_is_refused(
    folder: Path, command: str, option: tuple[str, str], change: str
) -> None:
    result = anyfleet_command(command, "one.toml", change, *option)
    assert result.exit_code == 2, result.output
    key, told = change.partition("=")[0].strip(), " ".join(result.output.replace("│", "").split())
    assert f"{key}=… names it, too; keep one of them." in told
    assert not (folder / "runs").exists()


def test_a_setting_without_effect_is_noted_once_before_anything_runs(folder: Path) -> None:
    words = ("compare", "one.toml", "two.toml", "rounds=1", "--seeds", "2", "--engine", "Stacked")
    result = anyfleet_command(*words, "engine.precision=tf32", "--device", "cpu", "--out", "all")
    told = 'note: engine.precision = "tf32" has no effect: device cpu computes in float32.'
    assert result.output.count(told) == 1
    assert result.output.index(told) < result.output.index(": finished")
    assert "All: device cpu, engine Stacked(precision='tf32'), float32" in result.output


def test_runs_that_are_compared_have_one_engine(folder: Path) -> None:
    words = ("compare", "one.toml", "two.toml", "rounds=1", "--seeds", "2", "--out")
    assert succeeds(*words, "all").splitlines()[0] == f"All: {CHOSEN}"
    every = [f"all/{name}/seed-{seed}" for name in ("one", "two") for seed in (0, 1)]
    assert {settings(run) for run in every} == {("Sequential", "cpu")}
    shown = succeeds(*words, "named", "--engine", "Stacked")
    assert shown.splitlines()[0] == "All: device cpu, engine Stacked, float32"
    assert settings("named/two/seed-1") == ("Stacked", "cpu")


def test_runs_that_are_compared_are_told_one_by_one_where_they_differ(folder: Path) -> None:
    (folder / "pinned.toml").write_text('engine = { use = "Threads", workers = 3 }\n' + RUN_FILE)
    words = ("compare", "one.toml", "pinned.toml", "two.toml", "rounds=1", "--seeds", "1")
    assert succeeds(*words, "--out", "all").splitlines()[:3] == [
        f"one: {CHOSEN}",
        "pinned: device cpu, engine Threads(workers=3), float32",
        f"two: {CHOSEN}",
    ]
    assert settings("all/pinned/seed-0") == ("Threads", "cpu")


def test_a_run_has_the_engine_that_it_has_in_a_comparison(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANYFLEET_CACHE", str(folder / "cache"))
    compare = ("compare", "one.toml", "rounds=1", "--seeds", "2", "--out")
    run = ("run", "one.toml", "rounds=1", "--out")
    with monkeypatch.context() as faked:
        # Every run may be measured, and stacks are the fastest by this clock.
        faked.setattr(engine_choice, "_SHARE", 1e4)
        faked.setattr(engine_choice._Clock, "seconds", stacks_are_faster)
        compared = succeeds(*compare, "all").splitlines()[0]
        assert "engine Stacked(chunk=16) (measured: 2 times as fast as Sequential; pin" in compared
        ran = succeeds(*run, "run").splitlines()[0]
        assert ran.removeprefix("one: ") == compared.removeprefix("All: ")
    # Short runs may not be measured, and what is kept makes no difference.
    assert [*(folder / "cache/engines").iterdir()]
    assert succeeds(*run, "short").splitlines()[0] == f"one: {CHOSEN}"
    assert succeeds(*compare, "both").splitlines()[0] == f"All: {CHOSEN}"


def stacks_are_faster(clock: object, engine: Engine, orders: Assignment) -> float:
    """A clock by which stacks take half the time, on as many cores as they like."""
    return (5e-4 if isinstance(engine, Stacked) else 1e-3) * len(orders.orders)


def test_the_demonstration_has_one_engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "TASK", replace(demo.TASK, limit=300, server=20))
    assert succeeds("demo", "--rounds", "1", "--out", "demo").splitlines()[0] == f"All: {CHOSEN}"
    assert settings("demo/anycostfl/seed-0") == ("Sequential", "cpu")
    shown = succeeds("demo", "--rounds", "1", "--out", "named", "--engine", "Workers")
    assert shown.splitlines()[0] == "All: device cpu, engine Workers, float32"
    assert settings("named/anycostfl/seed-0") == ("Workers", "cpu")


def test_the_fleet_of_a_run_is_built_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[World] = []
    build_fleet = Fleet.build

    def counted(fleet: Fleet, *words: Any) -> World:
        made.append(build_fleet(fleet, *words))
        return made[-1]

    monkeypatch.setattr(Fleet, "build", counted)
    for words, fleets in (
        (("run", "one.toml", "rounds=1", "--out", "run"), 1),
        (("resume", "run", "--rounds", "2"), 1),
        (("validate", "one.toml"), 1),
        (("compare", "one.toml", "two.toml", "rounds=1", "--seeds", "2", "--out", "all"), 4),
    ):
        made.clear()
        succeeds(*words)
        assert len(made) == fleets, words


def test_the_demonstration_has_no_file_to_speak_of() -> None:
    shown = anyfleet_command("demo", "--help").output
    assert "the file says" not in " ".join(shown.split())
    assert shown.count("(auto)") == 2


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
    assert named == {"demo", "run", "compare", "sweep", "reproduce"}
