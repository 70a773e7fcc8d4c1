import math
from pathlib import Path

import pytest
from msgspec.structs import replace
from tools import comparison as tool
from typer.testing import CliRunner

from anyfleet import methods
from anyfleet.analysis.intervals import t_quantile
from anyfleet.cli.app import app
from anyfleet.errors import StoreError
from anyfleet.evidence.comparison import NAME, Comparison, compare, encode, known_rows
from anyfleet.evidence.comparison_page import page
from anyfleet.evidence.items import Item, digest
from anyfleet.evidence.library import Library
from anyfleet.evidence.results import Results
from anyfleet.evidence.tuning import chosen, tuned
from tests.evidence.test_tuning import ITEM, cell, made, series, tried

ROOT = Path(__file__).resolve().parents[2]


def results_of(item: Item, *, without: str = "") -> Results:
    """Return results in which stc is a tenth ahead for equal joules, and behind otherwise."""
    trials = [
        cell(case, f"{method}, lr={lr} (trial)", {100: series(0.1)})
        for case, method in (("even", "fedavg"), ("even", "stc"), ("lost", "fedavg"))
        for lr in ("0.01", "0.1")
        if method != without
    ]
    cells = {each.digest: each for each in trials}
    for (case, name), experiment in tuned(item, chosen(item, tried(*trials))).experiments().items():
        if name.startswith("stc"):
            runs = {0: series(0.2, 0.3, 0.5, joules=1.0), 1: series(0.2, 0.5, 0.6, joules=1.0)}
        else:
            runs = {0: series(0.3, 0.4, 0.5), 1: series(0.4, 0.5, 0.6)}
        key = digest(experiment)
        cells[key] = cell(case, name, runs, key)
    return Results(NAME, cells=cells)


def test_the_page_says_how_small_it_is_and_how_many_values_lie_at_the_edge(tmp_path: Path) -> None:
    item = made(tmp_path)
    told = page(item, compare(item, results_of(item)))
    assert "It is small: 4 devices, a budget of 3 rounds of fedavg" in told
    assert "- In 0 of 3 cells the largest value won, in 3 the smallest: there" in told


def test_the_page_says_where_the_reference_ended_below_its_trials(tmp_path: Path) -> None:
    item = made(tmp_path)
    results = results_of(item)
    assert "below its worst trial" not in page(item, compare(item, results))
    lucky = {
        key: replace(each, runs={100: series(0.9)})
        if each.case == "lost" and 100 in each.runs
        else each
        for key, each in results.cells.items()
    }
    told = page(item, compare(item, replace(results, cells=lucky)))
    assert "- In lost, fedavg ended 35 points below its worst trial with the same value:" in told
    assert "In even, fedavg ended" not in told


def test_rows_are_read_off_at_equal_budgets(tmp_path: Path) -> None:
    item = made(tmp_path)
    found = compare(item, results_of(item))
    # Half of what fedavg spends in three rounds: 1.5 s, 3 J, 4.5 B, so one of its rounds.
    assert found.cases["even"].budgets == {"seconds": 1.5, "joules": 3.0, "bytes": 4.5}
    assert (found.seeds, found.rounds, found.reference) == (2, 3, "fedavg")
    row = found.of("even")["stc"]
    assert {name: over.mean for name, over in row.scores.items()} == {
        "seconds": 0.2,
        "joules": 0.55,
        "bytes": 0.2,
    }
    gain = row.gains["seconds"]  # -0.1 and -0.2 of the two seeds
    assert gain.mean == pytest.approx(-0.15)
    margin = t_quantile(1) * math.sqrt(0.005) / math.sqrt(2)
    assert gain.low == pytest.approx(-0.15 - margin, rel=1e-3)
    assert row.gains["joules"].mean == pytest.approx(0.2)
    assert (row.trials, row.value, row.final and row.final.mean) == (2, 0.01, 0.55)
    assert row.ended == ()
    assert found.best("even", "joules") is row
    assert found.best("even", "bytes") is not row
    assert found.of("even")["fedavg"].gains["bytes"].mean == 0.0
    assert row.minutes == pytest.approx(1.5)  # two trials and the runs


def test_a_method_that_cannot_run_says_why_in_its_row(tmp_path: Path) -> None:
    item = made(tmp_path)
    found = compare(item, results_of(item))
    row = found.of("lost")["stc"]
    assert "links of this fleet lose columns" in row.refused
    assert row.scores == {}
    told = page(item, found)
    assert "Cannot run: stc. The library says: links of this fleet lose columns" in told
    assert "| stc | 20.0 (-15.0; " in told
    assert "In all 6 trials." in told


def test_a_run_that_ends_early_is_marked(tmp_path: Path) -> None:
    item = made(tmp_path)
    results = results_of(item)
    key = next(k for k, each in results.cells.items() if each.method == "stc, lr=0.01")
    short = {0: series(0.2, 0.3, joules=1.0), 1: series(0.2, 0.5, joules=1.0)}
    results.cells[key] = cell("even", "stc, lr=0.01", short, key)
    found = compare(item, results)
    assert found.of("even")["stc"].ended == ("joules",)
    assert "40.0† (" in page(item, found)


def test_results_of_another_recipe_do_not_count(tmp_path: Path) -> None:
    item = made(tmp_path)
    results = results_of(item)
    changed = made(tmp_path, ITEM.replace('"stc"', '"qsgd"'))
    assert compare(changed, results).of("even")["stc"].refused == "not run"


def test_budgets_need_the_reference(tmp_path: Path) -> None:
    item = made(tmp_path)
    with pytest.raises(StoreError, match="even: fedavg was not run"):
        compare(item, results_of(item, without="fedavg"))


def test_a_tuned_item_is_played_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    item = made(tmp_path)
    monkeypatch.chdir(tmp_path)
    words = ["reproduce", NAME, "--jobs", "1", "--case", "even"]
    quick = CliRunner().invoke(app, [*words, "--quick", "--seeds", "1"])
    assert quick.exit_code == 0, quick.output
    assert not (tmp_path / "evidence").exists()
    alone = CliRunner().invoke(app, [*words, "--method", "stc"])
    assert alone.exit_code == 2
    assert "budgets" in alone.output
    result = CliRunner().invoke(app, [*words, "--seeds", "1"])
    assert result.exit_code == 0, result.output
    assert "best for equal time" in " ".join(result.output.split())
    results = Library(tmp_path).results(NAME)
    assert results is not None
    found = compare(item, results)
    assert {(row.case, row.method): row.trials for row in found.rows} == {
        ("even", "fedavg"): 2,
        ("even", "stc"): 2,
    }
    again = CliRunner().invoke(
        app, [*words, "--seeds", "1"]
    )  # everything is there: nothing is played
    assert again.exit_code == 0, again.output
    assert Library(tmp_path).results(NAME).cells.keys() == results.cells.keys()  # type: ignore[union-attr]


# --- the comparison of this project ---------------------------------------------------------------


def test_the_comparison_has_every_method_and_at_least_eight_cases() -> None:
    item = Library(ROOT).item(NAME)
    names = {str(column.run["method"]["use"]) for column in item.methods.values()}
    references = {"centralised", "local"}
    assert names == set(methods.__all__) - references
    assert names == set(item.methods)
    assert item.seeds >= 3
    assert len(item.cases) >= 8
    refused = {each.name: each.cases for each in item.methods.values() if each.cases is not None}
    assert all(
        case.endswith("lost columns")
        for cases in refused.values()
        for case in set(item.cases) - set(cases)
    )


def test_the_rows_of_the_package_follow_from_the_result_file() -> None:
    library = Library(ROOT)
    results = library.results(NAME)
    if results is None:
        assert not tool.DATA.exists()
        with pytest.raises(StoreError, match="has no rows of the comparison"):
            known_rows()
        return
    found = compare(library.item(NAME), results)
    assert tool.DATA.read_bytes() == encode(found), "run python -m tools.comparison"
    assert isinstance(known_rows(), Comparison)


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    item = made(tmp_path)
    tool.draw(compare(item, results_of(item)), tmp_path / "docs" / "picture.png")
    assert (tmp_path / "docs" / "picture.png").stat().st_size > 1000
