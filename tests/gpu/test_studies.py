"""Studies on a CUDA device: runs are played together, survive a kill, and equal single runs."""

import os
import signal
import time
from pathlib import Path

import torch

from anyfleet.store import read_rounds
from tests.study.test_study import OTHER, PATIENCE, RUN_FILE, shown, started

DEVICE = "cuda"
LONG = RUN_FILE.replace("rounds = 12", "rounds = 400")
SWEEP = ("sweep", "short.toml", "long.toml", "method.lr=[0.05, 0.1]", "--seeds", "2")
WORDS = (*SWEEP, "--device", DEVICE, "--engine", "Stacked", "--out", "study")


def home(folder: Path) -> Path:
    (folder / "short.toml").write_text(OTHER.replace("rounds = 12", "rounds = 4"))
    (folder / "long.toml").write_text(LONG)
    return folder


def runs(study: Path) -> list[Path]:
    return sorted(file.parent for file in study.glob("*/seed-*/config.toml"))


def parameters(run: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(run / "model.safetensors")


def times(run: Path) -> dict[str, int]:
    return {file.name: file.stat().st_mtime_ns for file in run.iterdir() if file.is_file()}


def finished(study: Path) -> list[Path]:
    return [run for run in runs(study) if (run / "remarks.json").is_file()]  # written last


def under_way(study: Path) -> list[Path]:
    files = [run / "rounds.jsonl" for run in runs(study) if run not in finished(study)]
    return [file.parent for file in files if file.is_file() and file.read_bytes().count(b"\n") > 1]


def test_a_sweep_that_is_killed_goes_on_and_plays_nothing_finished_again(tmp_path: Path) -> None:
    folder = home(tmp_path)
    process, study = started(folder, *WORDS), folder / "study"
    patience = time.monotonic() + PATIENCE
    while not (finished(study) and under_way(study)):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < patience
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=PATIENCE)
    before = {run: times(run) for run in finished(study)}
    assert 0 < len(before) < 8
    shown(folder, *WORDS)
    assert {run: times(run) for run in before} == before
    assert [len(read_rounds(run)) for run in runs(study)] == [*[400] * 4, *[4] * 4]


def test_runs_of_a_sweep_are_single_runs(tmp_path: Path) -> None:
    folder = home(tmp_path)
    (folder / "long.toml").write_text(RUN_FILE)
    shown(folder, *WORDS)
    for run in runs(folder / "study")[::5]:  # a long one, and a short one
        single = folder / f"alone-{run.parent.name}-{run.name}"
        shown(folder, "run", str(run / "config.toml"), "--out", str(single))
        for name, value in parameters(single).items():
            found = parameters(run)[name]
            assert torch.allclose(found, value, rtol=1e-4, atol=1e-5), name
        pairs = zip(read_rounds(single), read_rounds(run), strict=True)
        assert all(
            (one.time, one.up, one.down) == (two.time, two.up, two.down) for one, two in pairs
        )
