"""`anyfleet compare --equal`: the same amount for everybody."""

import json
import math
from dataclasses import asdict
from pathlib import Path

import pytest

from anyfleet.analysis.comparison import Goal, compare
from anyfleet.analysis.equal_budgets import Resource, common_amount, within
from anyfleet.analysis.units import quantity
from anyfleet.cli.tables import learned, shortfalls
from anyfleet.experiment import RoundRecord
from anyfleet.store import read_rounds
from tests.cli.test_commands import anyfleet_command, succeeds
from tests.cli.test_resume import RUN_FILE


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of a command: HeteroFL and FedAvg, three rounds each."""
    (tmp_path / "half.toml").write_text(RUN_FILE)
    whole = RUN_FILE.replace("heterofl", "fedavg").replace("widths = [1.0, 0.5]", "#")
    (tmp_path / "whole.toml").write_text(whole)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_compare_tells_what_the_same_amount_taught(folder: Path) -> None:
    named = ["half.toml", "whole.toml", "fleet.use=levels", "fleet.speeds=[2e9, 1e9]"]
    wanted = ["--equal", "energy", "--equal", "bytes", "--equal", "energy"]
    shown = succeeds("compare", *named, *wanted, "--seeds", "2")
    runs = [
        read_rounds(folder / f"runs/compare/{name}/seed-{seed}")
        for name in ("half", "whole")
        for seed in (0, 1)
    ]
    results = json.loads((folder / "runs/compare/results.json").read_text())["runs"]
    told = [run["within"] for group in results.values() for run in group]
    asked: tuple[Resource, ...] = ("energy", "bytes")
    expected = [
        {each: asdict(within(points, each, common_amount(runs, each))) for each in asked}
        for points in runs
    ]
    assert told == expected
    assert told[0]["bytes"]["spent"]["rounds"] > told[2]["bytes"]["spent"]["rounds"]
    _, energy, traffic = shown.split("\nFor ")
    assert energy.startswith(quantity(told[0]["energy"]["amount"], "J") + ":")
    assert traffic.startswith(quantity(told[0]["bytes"]["amount"], "B") + " of traffic:")
    for text in (energy, traffic):
        half, whole, difference = text.splitlines()[2:5]
        assert half.split()[:4] == ["half", "2", "of", "2"]
        assert whole.split()[:4] == ["whole", "2", "of", "2"]
        assert difference.split()[:6] == ["whole", "−", "half", "2", "of", "2"]
        assert half.count("±") >= 6


def test_compare_says_which_runs_ended_before_the_budget(folder: Path) -> None:
    words = ["half.toml", "rounds=1", "--seeds", "1", "--equal", "flops", "--budget", "1e15"]
    shown = succeeds("compare", *words)
    (point,) = read_rounds(folder / "runs/compare/half/seed-0")
    title, _, row = shown.partition("For ")[2].splitlines()[:3]
    assert title == "1 PFLOP:"
    assert row.split()[:4] == ["half", "1", "of", "1"]
    assert f"half: 1 of 1 ended after {quantity(point.flops, 'FLOP')}." in shown.splitlines()
    result = json.loads((folder / "runs/compare/results.json").read_text())["runs"]["half"][0]
    assert result["within"]["flops"]["amount"] == 1e15
    assert result["within"]["flops"]["total"] == point.flops


def test_compare_goes_on_where_nothing_was_spent(folder: Path) -> None:
    """Nobody ever has room for an order: time passes, and that is all."""
    words = ["half.toml", "rounds=1", "fleet.use=levels", "fleet.memory=1.0", "--seeds", "1"]
    shown = succeeds("compare", *words, "--equal", "energy", "--equal", "time")
    _, energy, time = shown.split("\nFor ")
    assert energy.startswith("0 J:")
    assert "give an amount with --budget" in energy
    assert time.startswith("60 s of simulated time:")
    assert "--budget" not in time


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--equal", "joules"], "may be flops, time, energy, bytes; got 'joules'"),
        (["--budget", "3"], "got no --equal"),
        (["--equal", "time", "--equal", "bytes", "--budget", "3"], "--equal time --equal bytes"),
        (["--equal", "time", "--budget", "0"], "above 0, got 0.0"),
        (["--equal", "time", "--budget", "nan"], "above 0, got nan"),
        (["--equal", "time", "--budget", "inf"], "above 0, got inf"),
    ],
)
def test_compare_refuses_amounts_that_mean_nothing(
    folder: Path, words: list[str], told: str
) -> None:
    result = anyfleet_command("compare", "half.toml", *words)
    assert result.exit_code == 2
    # Lines are broken, inside a frame.
    assert told in " ".join(result.output.replace("│", " ").split())
    assert not (folder / "runs").exists()


def run(end: float, *evaluated: float) -> list[RoundRecord]:
    """A run whose accuracy is a tenth of the seconds at which it was evaluated."""
    return [
        RoundRecord(
            k, each, 7e3 * each, 0.0, 5e6 * each, 2 * each, 1, 0, 0.5, math.nan, scores=scores
        )
        for k, each in enumerate(sorted({*evaluated, end}))
        for scores in [{"accuracy": each / 10} if each in evaluated else {}]
    ]


def test_runs_that_did_not_use_the_amount_are_told() -> None:
    done, late, ended = run(6.0, 2.0, 4.0), run(6.0, 5.5), run(4.5, 3.0)
    runs = {"a": {0: done, 1: late, 2: ended}, "b": {0: done}, "c": {0: late}}
    found = compare(runs, Goal(equal=("time",), budget=5.0))
    assert list(shortfalls(found.lessons["time"])) == [
        "a: 1 of 3 ended after 4.5 s, 1 of 3 first evaluated after 5.5 s.",
        "c: 1 of 1 first evaluated after 5.5 s.",
    ]
    sheet = learned(found, "time")
    assert sheet.heads[-5:] == ("simulated s", "J", "kB", "MFLOP", "rounds")
    assert sheet.rows["a"][:4] == ["2 of 3", "35.0", "35.0", "3.5"]
    assert sheet.rows["b"] == ["1 of 1", "40.0", "40.0", "4.0", "8.0", "28.0", "20.0", "2"]
    assert sheet.rows["c"] == ["0 of 1", *["–"] * 7]
    assert list(sheet.rows) == ["a", "b", "c"]  # one common seed makes no difference
