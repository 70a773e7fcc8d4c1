"""Runs go on with the device, the engine and the precision they had, whoever chose them."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from anyfleet.errors import StoreError
from anyfleet.experiment import Experiment, play, prepare
from anyfleet.runtime import Sequential, Stacked, Threads, Workers
from anyfleet.runtime.simulated.engines import Engine
from anyfleet.runtime.simulated.execution import Auto
from anyfleet.store import Origin, Recording, Terms, reopen
from tests.helpers import runs

ROUNDS, BEFORE = 4, 2  # of all and before it was killed


def recorded(folder: Path, experiment: Experiment, rounds: int) -> Path:
    """A folder of a run, as it is when its process is killed after so many rounds."""
    folder.mkdir()
    prepared = prepare(experiment)
    recording = Recording(folder, experiment, origin=Origin(prepared.task), every=1)
    for result in prepared.play():
        recording.append(result)
        if result.record.round_index + 1 == rounds:
            break
    if rounds == experiment.rounds:
        recording.__exit__(None, None, None)
    else:
        recording._lock.release()
    return folder


@pytest.mark.parametrize(
    "engine",
    [Sequential(), Workers(), Threads(), Stacked(), Stacked(2, workers=2), "auto"],
    ids=str,
)
def test_a_killed_run_ends_with_the_same_bytes_under_every_engine(
    tmp_path: Path, engine: Engine | Auto
) -> None:
    experiment = replace(runs.EXPERIMENT, engine=engine, rounds=ROUNDS)
    whole = recorded(tmp_path / "whole", experiment, ROUNDS)
    killed = recorded(tmp_path / "killed", experiment, BEFORE)
    opened = reopen(killed, Terms())
    assert opened.past.state is not None
    assert opened.past.progress.rounds == BEFORE
    runs.go_on(killed, opened)
    assert runs.contents(killed) == runs.contents(whole)


def test_a_run_that_left_its_engine_open_goes_on_with_the_one_it_had(tmp_path: Path) -> None:
    """Also if another one would be chosen by now."""
    left_open = replace(runs.EXPERIMENT, engine="auto", rounds=ROUNDS)
    folder = tmp_path / "run"
    folder.mkdir()
    recording = Recording(folder, left_open, every=1)
    for result in play(replace(left_open, engine=Stacked(), rounds=BEFORE)):
        recording.append(result)
    recording._lock.release()
    opened = reopen(folder, Terms())
    *_, last = play(opened.experiment, opened.task, resume=opened.past.state)
    opened.past.lock.release()
    assert str(last.execution) == "device cpu, engine Stacked, float32"


def test_the_folder_of_a_prepared_run_names_engine_and_device(tmp_path: Path) -> None:
    prepared = prepare(replace(runs.EXPERIMENT, engine="auto", rounds=1))
    with Recording(tmp_path, prepared.experiment, origin=Origin(prepared.task)) as recording:
        for result in prepared.play():
            recording.append(result)
    written = tomllib.loads((tmp_path / "config.toml").read_text())
    assert (written["engine"], written["device"]) == ({"use": "anyfleet.runtime:Sequential"}, "cpu")
    conditions = json.loads((tmp_path / "environment.json").read_text())["conditions"]
    assert conditions["device"] == "cpu"
    assert conditions["engine"] == written["engine"]
    summary = json.loads((tmp_path / "summary.json").read_text())["execution"]
    assert (summary["device"], summary["precision"]) == ("cpu", "float32")
    assert summary["why"] == "not measured: the run is short"


def changed(folder: Path, old: str, new: str) -> None:
    """Edit the configuration of a run."""
    text = (folder / "config.toml").read_text()
    assert text.count(old) == 1
    (folder / "config.toml").write_text(text.replace(old, new))


def test_another_engine_is_told_and_must_be_accepted(tmp_path: Path) -> None:
    folder = recorded(tmp_path / "run", replace(runs.EXPERIMENT, rounds=ROUNDS), BEFORE)
    changed(folder, '"anyfleet.runtime:Sequential"', '"anyfleet.runtime:Stacked"')
    with pytest.raises(StoreError, match=r"engine: Sequential then, Stacked\(chunk=0, .* now"):
        reopen(folder, Terms())
    opened = reopen(folder, Terms(not_identical=True))
    *_, last = play(opened.experiment, opened.task, resume=opened.past.state)
    opened.past.lock.release()
    assert str(last.execution) == "device cpu, engine Stacked, float32"
    assert last.record.round_index + 1 == ROUNDS


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_run_of_a_gpu_says_how_to_go_on_without_one(tmp_path: Path) -> None:
    folder = recorded(tmp_path / "run", replace(runs.EXPERIMENT, rounds=ROUNDS), BEFORE)
    changed(folder, 'device = "auto"', 'device = "cuda"')
    told = r'device "cuda" asks for a GPU.*change `device` in .*config.toml and.*--not-identical'
    with pytest.raises(StoreError, match=told):
        reopen(folder, Terms())
