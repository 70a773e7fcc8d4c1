"""The screen: live lines on a terminal, plain lines elsewhere, lines of JSON for programs."""

import json
import math
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from anyfleet.cli.screen import (
    Pace,
    duration,
    progress,
    put_event,
    study_progress,
)
from anyfleet.experiment import RoundRecord
from anyfleet.study.events import Advanced, Begun, Ended, Event, Noted
from anyfleet.study.plan import PlannedRun
from tests.cli.test_commands import RUN_FILE, anyfleet_command, succeeds

ONE = PlannedRun("a, widths=[1.0]", 0, 4, Path("a"))
TWO = PlannedRun("b", 0, 4, Path("b"))
EVENTS: tuple[Event, ...] = (
    Begun(ONE, 2),
    Begun(TWO, 0),
    Advanced(TWO, 1, "accuracy", 0.25, 1.5, 2.0),
    Advanced(ONE, 3, "accuracy", math.nan, 1.5, 4.0),
    Advanced(ONE, 4, "accuracy", 0.5, 1.5, 4.0),
    Ended(ONE, "finished"),
    Noted("something"),
    Ended(TWO, "died", "its process was ended by SIGKILL"),
)


def console(out: StringIO, *, terminal: bool) -> Console:
    known = {"TERM": "xterm"}
    return Console(
        file=out, width=200, force_terminal=terminal, highlight=False, no_color=True, _environ=known
    )


def shown(*, terminal: bool) -> str:
    out = StringIO()
    screen = console(out, terminal=terminal)
    with study_progress(screen, (ONE, TWO), finished=3) as tell:
        for event in EVENTS[:5]:
            tell(event)
        for event in EVENTS[5:]:
            tell(event)
    return out.getvalue()


def test_a_study_has_one_line_for_each_run_that_ends() -> None:
    assert shown(terminal=False).splitlines() == [
        "a, widths=[1.0]/seed-0: finished, accuracy 50.0 % (4 of 5)",
        "b/seed-0: died: its process was ended by SIGKILL (4 of 5)",
    ]


def test_a_study_has_one_line_for_all_and_one_for_each_run_under_way() -> None:
    live = shown(terminal=True)
    assert "all runs" in live
    assert "4/5" in live
    assert "b/seed-0: died: its process was ended by SIGKILL" in live


def test_a_run_has_one_live_line() -> None:
    out = StringIO()
    screen = console(out, terminal=True)
    record = RoundRecord(0, 1.0, 0, 0, 0, 0, 1, 0, 0.5, math.nan, {"accuracy": 0.25})
    with progress(screen, "mine", 4) as tell:
        tell(record)
    live = out.getvalue()
    assert "mine" in live
    assert "1/4" in live
    assert "accuracy 25.0 %" in live
    assert "a round" in live
    assert "left" in live


def narrow(*, columns: int = 80) -> tuple[Console, StringIO]:
    out = StringIO()
    known = {"TERM": "xterm"}
    made = {"width": columns, "force_terminal": True, "highlight": False, "no_color": True}
    return Console(file=out, _environ=known, **made), out  # type: ignore[arg-type]


def test_a_run_tells_its_round_and_last_score_on_a_terminal_of_80_columns() -> None:
    screen, out = narrow()
    first = RoundRecord(0, 1.0, 0, 0, 0, 0, 1, 0, 0.5, math.nan, {"accuracy": 0.25})
    records = [first, *(replace(first, round_index=n, scores={}) for n in range(1, 8))]
    with progress(screen, "a-file-of-a-long-name", 30) as tell:
        for record in records:
            tell(record)
    line = [each for each in out.getvalue().splitlines() if "8/30" in each][-1]
    assert "accuracy 25.0 % (round 1), 1.0 s simulated" in line


def test_a_study_keeps_the_last_score_of_a_run() -> None:
    screen, out = narrow(columns=100)
    run = PlannedRun("fedavg, lr=0.1", 0, 300, Path("a"))
    with study_progress(screen, (run,), finished=0) as tell:
        tell(Begun(run, 0))
        tell(Advanced(run, 1, "accuracy", math.nan, 1.5, 2.0))
        before = out.getvalue()
        tell(Advanced(run, 2, "accuracy", 0.5, 1.5, 2.0))
        tell(Advanced(run, 3, "accuracy", math.nan, 1.5, 2.0))
    assert "accuracy –" not in before
    assert "accuracy 50.0 % (round 2)" in out.getvalue()
    assert "3/300" in out.getvalue()


def test_progress_does_not_stand_among_the_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "small.toml").write_text(RUN_FILE)
    monkeypatch.chdir(tmp_path)
    result = anyfleet_command("run", "small.toml")
    assert result.exit_code == 0, result.output
    assert "round 1/2" not in result.stdout
    lines = result.stderr.splitlines()
    starts = [f"small: round {number}/2, accuracy " for number in (1, 2)]
    assert [line[: len(start)] for line, start in zip(lines, starts, strict=True)] == starts
    assert all(" s a round, " in line for line in lines)
    assert lines[-1].endswith(", 0 s left")


def test_the_time_left_is_that_of_the_rounds_seen() -> None:
    assert Pace().told(5) == ""
    assert Pace(4, 10.0).told(30) == "2.5 s a round, 1 min 15 s left"
    told = {0.4: "0 s", 59.4: "59 s", 59.6: "1 min 00 s", 3725.0: "1 h 02 min"}
    assert {value: duration(value) for value in told} == told


def test_events_are_lines_of_json() -> None:
    out = StringIO()
    for event in EVENTS:
        put_event(out, event)
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert lines[0] == {
        "event": "begun",
        "run": "a, widths=[1.0]",
        "seed": 0,
        "rounds": 2,
        "planned": 4,
    }
    assert (lines[3]["round"], lines[3]["score"], lines[4]["score"]) == (3, None, 0.5)
    assert lines[6] == {"event": "note", "text": "something"}
    assert lines[7]["ended"] == "died"


def test_a_run_and_its_resumption_can_be_told_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "small.toml").write_text(RUN_FILE)
    monkeypatch.chdir(tmp_path)
    for words, rounds in (
        (("run", "small.toml", "--out", "run"), [1, 2]),
        (("resume", "run", "--rounds", "3"), [3]),
        (("resume", "run"), []),
    ):
        result = anyfleet_command(*words, "--json")
        assert result.exit_code == 0, result.output
        lines = [json.loads(line) for line in result.stdout.splitlines()]
        assert [line["round"] for line in lines if line["event"] == "round"] == rounds
        assert lines[-1]["event"] == "result"
        counts = (lines[-1]["folder"], lines[-1]["finished"], lines[-1]["planned"])
        assert counts == ("run", 1, 1)
        if rounds:
            done, planned = rounds[0] - 1, rounds[-1]
            name = lines[0]["run"]
            start = {"event": "begun", "run": name, "seed": 0, "rounds": done, "planned": planned}
            assert lines[0] == {**start, "folder": "run"}
            assert lines[1].keys() == {
                *("event", "run", "seed", "round", "planned"),
                *("metric", "score", "time", "seconds"),
            }
            ended = {"event": "run", "run": name, "seed": 0, "ended": "finished", "told": ""}
            assert lines[-2] == ended
        assert lines[-1]["results"]["rounds"] == (rounds[-1] if rounds else 3)


def test_a_sweep_tries_every_combination(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "small.toml").write_text(RUN_FILE)
    monkeypatch.chdir(tmp_path)
    words = ("sweep", "small.toml", "method.lr=[0.1, 0.2]", "widths=[[1.0], [1.0, 0.5]]")
    told = succeeds(*words, "rounds=1", "seed=[4]")
    runs = sorted(str(each.parent) for each in Path("runs/sweep").glob("*/seed-4"))
    assert runs == [
        f"runs/sweep/small_lr={lr}_widths={w}" for lr in (0.1, 0.2) for w in ("1.0", "1.0_0.5")
    ]
    assert "small, lr=0.2, widths=[1.0, 0.5]" in told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("sweep", "small.toml", "seed=[1]", "--seeds", "2"), "keep one of them"),
        (("sweep", "small.toml", "seed=[1.5]"), "takes whole numbers"),
        (("sweep", "small.toml", "method.lr=[]"), "no values to try"),
        (("sweep", "small.toml", "method.lr=[0.1,", "0.2]"), "quote it: 'method.lr=[0.1, 0.2]'"),
        (("compare", "small.toml", "widths=[1,", "0.5,", "0.2]", "rounds=1"), "[1, 0.5, 0.2]'"),
        (("sweep", "no.toml", "method.lr=[0.1]"), "  no.toml: cannot be read"),
        (("compare", "no.toml"), "  no.toml: cannot be read"),
        (("compare", "small.toml", "--jobs", "none"), '"auto" or a number'),
        (("compare", "small.toml", "--jobs", "0"), '"auto" or a number'),
        (("resume", "study", "--rounds", "3"), "holds a study"),
    ],
)
def test_what_a_study_cannot_be_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], told: str
) -> None:
    (tmp_path / "small.toml").write_text(RUN_FILE)
    monkeypatch.chdir(tmp_path)
    if words[0] == "resume":
        succeeds("compare", "small.toml", "rounds=1", "--seeds", "1", "--out", "study")
    result = anyfleet_command(*words)
    assert result.exit_code in (1, 2)
    assert told in result.output
    assert not (tmp_path / "runs").exists()
