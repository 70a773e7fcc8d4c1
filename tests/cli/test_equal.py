"""`anyfleet compare --equal`: the same amount for everybody."""

import json
import math
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from anyfleet.analysis.equal_budgets import Resource, Within, common_amount, quantity, within
from anyfleet.analysis.summaries import Spent
from anyfleet.cli.tables import learned, shortfalls
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
    results = json.loads((folder / "runs/compare/results.json").read_text())
    told = [run["within"] for group in results.values() for run in group]
    asked: tuple[Resource, ...] = ("energy", "bytes")
    expected = [
        {each: asdict(within(points, each, common_amount(runs, each))) for each in asked}
        for points in runs
    ]
    assert told == expected
    assert told[0]["bytes"]["spent"]["rounds"] > told[2]["bytes"]["spent"]["rounds"]
    _, energy, traffic = shown.split("\nFor ")
    assert energy.startswith(quantity(told[0]["energy"]["amount"], "energy") + ":")
    assert traffic.startswith(quantity(told[0]["bytes"]["amount"], "bytes") + " of traffic:")
    for text in (energy, traffic):
        rows = text.splitlines()[2:4]
        assert [row.split()[:4] for row in rows] == [[n, "2", "of", "2"] for n in ("half", "whole")]
        assert [row.count("±") for row in rows] == [7, 7]


def test_compare_says_which_runs_ended_before_the_budget(folder: Path) -> None:
    words = ["half.toml", "rounds=1", "--seeds", "1", "--equal", "flops", "--budget", "1e15"]
    shown = succeeds("compare", *words)
    (point,) = read_rounds(folder / "runs/compare/half/seed-0")
    title, _, row = shown.partition("For ")[2].splitlines()[:3]
    assert title == "1,000 TFLOP:"
    assert row.split()[:4] == ["half", "1", "of", "1"]
    assert f"half: 1 of 1 ended after {quantity(point.flops, 'flops')}." in shown.splitlines()
    result = json.loads((folder / "runs/compare/results.json").read_text())["half"][0]
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


def test_runs_that_did_not_use_the_amount_are_told() -> None:
    spent = Spent(time=4.0, joules=8.0, bytes=28e3, flops=2e7, rounds=4)
    done = Within("time", 5.0, 6.0, 2.0, 0.6, 0.7, spent)
    ended = replace(done, total=4.5, score=0.5)
    late = replace(done, first=5.5, score=math.nan, best=math.nan, spent=None)
    runs = {"a": [done, late, ended], "b": [done], "c": [late]}
    assert list(shortfalls(runs)) == [
        "a: 1 of 3 ended after 4.5 s, 1 of 3 first evaluated after 5.5 s.",
        "c: 1 of 1 first evaluated after 5.5 s.",
    ]
    screen = Console(width=120, file=StringIO())
    screen.print(learned(runs, screen.width))
    head, *rows = screen.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert head.split()[-4:] == ["J", "MB", "GFLOP", "rounds"]
    told = [" ".join(row.split()) for row in rows]
    assert told[0].startswith("a 2 of 3 55.0 ±7.1 70.0 ±0.0 4.0 ±0.0 8.0 ±0.0 0.028 ±0.000 ")
    assert told[1] == "b 1 of 1 60.0 70.0 4.0 8.0 0.028 0.020 4.0"
    assert told[2] == "c 0 of 1 – – – – – – –"
