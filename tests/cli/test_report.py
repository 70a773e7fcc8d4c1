"""The report of a study: tables, files, and what a study that is not finished says."""

import re
from io import StringIO
from pathlib import Path

import pytest
import typer
from rich.console import Console

from anyfleet.analysis.comparison import Goal
from anyfleet.analysis.summaries import Runs
from anyfleet.cli.latex import escaped, latex_table
from anyfleet.cli.report import axes, need_metric, need_reference, report
from anyfleet.cli.tables import Sheet
from tests.analysis.test_comparison import RUNS, run

WIDE = 200


def reported(folder: Path, runs: Runs, goal: Goal, planned: int | None = None) -> str:
    screen = Console(width=WIDE, file=StringIO(), highlight=False)
    report(folder, runs, goal, screen, planned=planned)
    shown: str = screen.file.getvalue()  # type: ignore[attr-defined]
    return shown.partition("Picture: ")[0]  # its path has the name of the test


def rows(shown: str, start: str) -> list[str]:
    return [" ".join(line.split()) for line in shown.splitlines() if line.startswith(start)]


def test_tables_have_means_intervals_and_differences(tmp_path: Path) -> None:
    shown = reported(tmp_path, RUNS, Goal(target=0.65, equal=("time",)))
    end, narrow, cost, lesson = rows(shown, "mine − fedavg")
    # 0.10, 0.05 and 0.07 in per cent; 2, 3 and 4 s more.
    assert end.startswith("mine − fedavg +7.3 ±6.3 +7.3 ±6.3 +3.0 ±2.5 2 of 3: +3.5 +6.0 ±5.0 ")
    assert narrow == "mine − fedavg +3.7 ±3.1"
    assert cost.startswith("mine − fedavg 2 of 3 +3.5 +7.0 ")
    assert lesson.startswith("mine − fedavg 1 of 3 ")  # else mine was first evaluated too late
    assert "fedavg: 3 of 3 ended" not in shown
    assert "“… − fedavg” are mean differences" in shown
    assert "partial" not in shown
    made = {"results.csv", "results.json", "results.tex", "comparison.png"}
    assert {file.name for file in tmp_path.iterdir()} == made


def test_equal_records_make_equal_reports(tmp_path: Path) -> None:
    shown = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        goal = Goal(equal=("energy",), over=("rounds",))
        shown.append(reported(tmp_path / name, RUNS, goal))
    assert shown[0] == shown[1]
    for file in ("results.csv", "results.json", "results.tex", "comparison.png"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_runs_come_in_the_order_in_which_they_are_given(tmp_path: Path) -> None:
    shown = reported(tmp_path, dict(reversed(RUNS.items())), Goal())
    names = [line.split()[0] for line in shown.splitlines() if line.startswith(("mine", "fedavg"))]
    assert names[:3] == ["mine", "fedavg", "fedavg"]
    assert "fedavg − mine" in shown


def test_a_partial_study_says_so(tmp_path: Path) -> None:
    runs = {"fedavg": RUNS["fedavg"], "mine": {1: RUNS["mine"][1]}, "late": {}}
    shown = reported(tmp_path, runs, Goal(), planned=9)
    assert shown.startswith("Partial: 4 of 9 runs.\n")
    heads = shown.splitlines()[1].split()
    assert heads[0] == "seeds"
    assert [row.split()[1] for row in rows(shown, "mine")[:1]] == ["1"]
    assert rows(shown, "late")[0].startswith("late 0 – –")
    assert "−" not in shown.replace("“… −", "")  # one common seed makes no difference
    assert "Partial: 4 of 9 runs." in (tmp_path / "results.tex").read_text()
    finished = reported(tmp_path, RUNS, Goal(), planned=6)
    assert "partial" not in finished


def test_a_study_without_a_finished_run_is_told_in_one_line(tmp_path: Path) -> None:
    shown = reported(tmp_path, {"fedavg": {}, "mine": {}}, Goal(), planned=6)
    assert shown.splitlines() == [
        "Partial: 0 of 6 runs.",
        "No run is finished: there is nothing to compare yet.",
    ]
    assert not list(tmp_path.iterdir())


def test_one_seed_has_no_intervals(tmp_path: Path) -> None:
    shown = reported(tmp_path, {"a": {0: run(0.5)}, "b": {0: run(0.6)}}, Goal())
    assert "±" not in shown
    assert "−" not in shown
    assert "One seed a run: no intervals, and no differences." in shown


def test_latex_tables_are_whole_and_names_are_escaped(tmp_path: Path) -> None:
    runs = {"fed_avg 50 % & more": RUNS["fedavg"], r"a\b{c}#$~^": RUNS["mine"]}
    reported(tmp_path, runs, Goal(target=0.65))
    text = (tmp_path / "results.tex").read_text()
    assert r"fed\_avg 50 \% \& more & " in text
    assert r"a\textbackslash{}b\{c\}\#\$\textasciitilde{}\textasciicircum{} & " in text
    for environment in ("table", "tabular"):
        begun = text.count(rf"\begin{{{environment}}}")
        assert begun == text.count(rf"\end{{{environment}}}") == 3
    bare = re.sub(r"\\[\\{}&%$#_]", "", text)
    assert bare.count("{") == bare.count("}")
    assert bare.count("$") % 2 == 0
    assert bare.isascii()
    for block in bare.split(r"\begin{tabular}")[1:]:
        columns = len(block.partition("}")[0].strip("{"))
        lines = block.partition(r"\toprule")[2].partition(r"\bottomrule")[0].splitlines()
        counts = {line.count("&") + 1 for line in lines if "&" in line}
        assert counts == {columns}


def test_latex_leaves_out_what_nobody_knows() -> None:
    sheet = Sheet(("x", "y"), {"a": ["–", "-1.0 ±0.5"], "b": ["–", "≥ 2"]})
    text = latex_table(sheet, "two\nlines")
    assert r"a & $-$1.0 $\pm$ 0.5 \\" in text
    assert r"b & $\geq$ 2 \\" in text
    assert r"\caption{two lines}" in text
    assert escaped("5–6 µs") == r"5--6 $\mu$s"


def test_goals_that_runs_cannot_have_are_refused() -> None:
    known = {"a": ("accuracy", "loss"), "b": ("loss",)}
    need_metric(Goal(metric="loss"), known)
    need_metric(Goal(), known)
    with pytest.raises(typer.BadParameter, match="got 'accuracy', but b has loss"):
        need_metric(Goal(metric="accuracy"), known)
    need_reference(Goal(reference="b"), ["a", "b"])
    with pytest.raises(typer.BadParameter, match="must be one of a, b; got 'c'"):
        need_reference(Goal(reference="c"), ["a", "b"])
    assert axes(["time", "rounds", "time"]) == ("time", "rounds")
    with pytest.raises(typer.BadParameter, match="may be rounds, time, energy, bytes, flops; got"):
        axes(["joules"])
