"""What commands say of runs with a metric of their own, of widths, and of runs that went wrong."""

import json
from pathlib import Path

import pytest

from tests.cli.test_commands import RUN_FILE, anyfleet_command, rows_of, succeeds

REGRESSION = """
rounds = 2
widths = [1.0, 0.5]

[task]
use = "Own"
model = { use = "tests.helpers.regression:net" }
data = { use = "tests.helpers.regression:data" }
loss = "anyfleet.tasks:squared_error"
metrics = { mae = "anyfleet.tasks:absolute_error", offset = "tests.helpers.regression:offset" }
devices = 4
test_share = 0.2

[method]
use = "fedavg"
lr = 0.2
"""
ALLOW = ("--allow", "tests")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of a command, with a regression and a classification in it."""
    (tmp_path / "small.toml").write_text(RUN_FILE)
    (tmp_path / "own.toml").write_text(REGRESSION)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def flat(text: str) -> str:
    """Without the frames and line breaks of an error."""
    return " ".join(text.replace("│", " ").split())


def test_a_run_shows_its_own_metric_everywhere(folder: Path) -> None:
    shown = succeeds("run", "own.toml", *ALLOW)
    assert "accuracy" not in shown
    assert "–" not in shown
    result = json.loads((folder / "runs/own/summary.json").read_text())["result"]
    assert result["metric"] == "mae"
    assert result["best"] <= result["score"]
    assert f"own: round 2/2, mae {result['score']:.4g}, " in shown
    ends, widths = rows_of(shown, "own")
    assert ends[1:4] == [f"{result[n]:.4g}" for n in ("score", "best")] + [
        f"{result['others']['offset']:.4g}"
    ]
    assert widths[1] == f"{result['score']:.4g} ".strip()
    assert "by width (mae)" in shown
    assert (folder / "runs/own/curves.png").stat().st_size > 10_000
    compared = succeeds("compare", "own.toml", *ALLOW, "--seeds", "1")
    assert f"s to {result['best']:.4g}" in compared


def test_a_run_without_metrics_is_measured_by_its_loss_everywhere(folder: Path) -> None:
    metrics = next(line for line in REGRESSION.splitlines() if line.startswith("metrics"))
    (folder / "bare.toml").write_text(REGRESSION.replace(metrics, ""))
    shown = succeeds("compare", "bare.toml", *ALLOW, "--seeds", "2", "--target", "1e3")
    assert "accuracy" not in shown
    assert "–" not in shown
    assert "by width (loss)" in shown
    assert "To reach loss 1000:" in shown
    results = json.loads((folder / "runs/compare/results.json").read_text())["runs"]["bare"]
    assert all(each["metric"] == "loss" and each["score"] == each["loss"] for each in results)
    assert [each["to_target"]["spent"]["rounds"] for each in results] == [1, 1]
    assert (folder / "runs/compare/comparison.png").stat().st_size > 10_000


def test_a_target_is_one_of_the_own_metric(folder: Path) -> None:
    words = ["compare", "own.toml", *ALLOW, "--seeds", "2", "--equal", "time"]
    shown = succeeds(*words, "--target", "100")
    assert "To reach mae 100:" in shown
    assert "2 of 2" in shown
    assert "accuracy" not in shown
    missed = succeeds(*words, "--target", "1e-9")
    assert "not reached (best " in missed
    assert "–" not in missed  # nothing was spent on it: no column of dashes
    results = json.loads((folder / "runs/compare/results.json").read_text())["runs"]["own"]
    assert [each["to_target"]["spent"]["rounds"] for each in results] == [1, 1]
    assert results[0]["within"]["time"]["metric"] == "mae"


def test_different_metrics_are_compared_as_far_as_they_can_be(folder: Path) -> None:
    shown = succeeds("compare", "own.toml", "small.toml", *ALLOW, "--seeds", "1")
    heads = next(line for line in shown.splitlines() if "mae" in line and "seed" not in line)
    assert "accuracy" in heads
    assert "runs are measured by different metrics (own: mae; small: accuracy)" in flat(shown)
    assert "To reach" not in shown
    assert (folder / "runs/compare/comparison.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["own.toml", "small.toml", "--target", "0.5"], "own by mae, small by accuracy"),
        (["small.toml", "--target", "80"], "a share from 0 to 1 (accuracy: 0.8 is 80 %), got 80"),
        (["own.toml", "--target", "nan"], "must be a number (mae)"),
    ],
)
def test_a_target_that_no_run_can_have_is_refused(
    folder: Path, words: list[str], told: str
) -> None:
    result = anyfleet_command("compare", *words, *ALLOW)
    assert result.exit_code == 2
    assert told in flat(result.output)
    assert not (folder / "runs").exists()


def test_widths_are_shown_in_comparisons(folder: Path) -> None:
    words = ["small.toml", "rounds=1", "--seeds", "2"]
    assert "by width" not in succeeds("compare", *words)
    shown = succeeds("compare", *words, "widths=[1.0, 0.5]")
    assert "The shared model at the end, by width (accuracy %):" in shown
    _, narrow, _ = rows_of(shown, "small")
    results = json.loads((folder / "runs/compare-2/results.json").read_text())["runs"]["small"]
    mean = sum(each["score"] for each in results) / 2
    assert narrow[1] == f"{100 * mean:.1f}"
    assert len(narrow) == 5  # two means, two margins


def test_a_run_in_which_everything_is_lost_says_what_to_change(folder: Path) -> None:
    late = 'method.schedule={use="Deadline", seconds=1e-6}'
    shown = succeeds("run", "small.toml", late)
    assert "None of the 4 orders brought an update that counted (4 too late)" in shown
    enough = shown.partition("for half of these orders, ")[2].partition(" s for all")[0]
    better = f'method.schedule={{use="Deadline", seconds={1.01 * float(enough)}}}'
    assert "too late" not in succeeds("run", "small.toml", better)
    compared = succeeds("compare", "small.toml", late, "--seeds", "2")
    assert compared.count("small (2 of 2 runs): None of the 4 orders") == 1


def test_a_resumed_run_that_explodes_says_so(folder: Path) -> None:
    shown = succeeds("run", "own.toml", *ALLOW, "rounds=1", "method.lr=1e8")
    assert "lower method.lr (1e+08 in this run)" in shown
    again = succeeds("resume", "runs/own", "--rounds", "2", *ALLOW)
    assert "lower method.lr (1e+08 in this run)" in again


def test_whale_says_when_it_is_nothing_but_its_cap(folder: Path) -> None:
    method = '[method]\nuse = "whale"\nwidths = [1.0, 0.5]\nlr = 0.1\n'
    (folder / "whale.toml").write_text(RUN_FILE.partition("[method]")[0] + method)
    shown = succeeds("run", "whale.toml", "rounds=1")
    assert "In all 4 choices by FisherUtility the device had no history" in shown
    assert "no history" not in succeeds("run", "whale.toml", "rounds=3")


def test_a_comparison_can_be_by_any_metric_and_from_any_run(folder: Path) -> None:
    (folder / "other.toml").write_text('extends = "small.toml"\n[method]\nlr = 0.01\n')
    words = ["compare", "small.toml", "other.toml", "rounds=1", "--seeds", "2"]
    shown = succeeds(*words, "--metric", "loss", "--reference", "other", "--x", "rounds")
    assert "To reach loss " in shown
    results = json.loads((folder / "runs/compare/results.json").read_text())
    assert results["reference"] == "other"
    assert results["goal"]["over"] == ["rounds"]
    assert all(run["metric"] == "loss" for group in results["runs"].values() for run in group)
    difference = results["differences"]["small"]["score"]
    runs = results["runs"]
    apart = [a["loss"] - b["loss"] for a, b in zip(runs["small"], runs["other"], strict=True)]
    assert difference["mean"] == pytest.approx(sum(apart) / 2)
    assert difference["low"] < difference["mean"] < difference["high"]
    (row,) = (each for each in rows_of(shown, "small") if each[1:4] == ["−", "other", "2"])
    assert row[4:6] == ["of", "2"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--metric", "mae"], "got 'mae', but small has accuracy, loss"),
        (["--reference", "big"], "must be one of small; got 'big'"),
        (["--x", "joules"], "may be rounds, time, energy, bytes, flops; got 'joules'"),
        (["--metric", "loss", "--target", "nan"], "must be a number (loss)"),
    ],
)
def test_what_runs_do_not_have_is_refused_before_they_begin(
    folder: Path, words: list[str], told: str
) -> None:
    result = anyfleet_command("compare", "small.toml", *words)
    assert result.exit_code == 2
    assert told in flat(result.output)
    assert not (folder / "runs").exists()
