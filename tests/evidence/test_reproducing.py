import json
import shutil
from pathlib import Path

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from anyfleet.cli.app import app
from anyfleet.errors import ConfigError, StoreError
from anyfleet.evidence.collection import evidence_page
from anyfleet.evidence.library import Library
from anyfleet.evidence.measured import found
from anyfleet.evidence.pages import item_page, standing_of
from anyfleet.evidence.reproducing import Extent, reproduction
from anyfleet.evidence.results import CellResult, Results, Series, read_results, write_results
from tests.evidence.test_items import ITEM

NAME = "thesis/table_9"


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Library:
    file = tmp_path / "recipes" / f"{NAME}.toml"
    file.parent.mkdir(parents=True)
    file.write_text(ITEM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ANYFLEET_COMMIT", "abc1234")
    return Library()


def command(*words: str) -> str:
    result = CliRunner().invoke(app, ["reproduce", *words])
    assert result.exit_code == 0, result.output
    return result.output


def test_an_item_is_played_written_and_told(library: Library) -> None:
    options = ("--jobs", "1", "--engine", "Sequential")
    told = command(NAME, "--seeds", "2", "--case", "even", *options)
    assert "not run" in told
    first = library.results(NAME)
    assert first is not None
    assert [cell.case for cell in first.cells.values()] == ["even"]
    command(NAME, *options)
    results, item = library.results(NAME), library.item(NAME)
    assert results is not None
    there = found(item, results)
    assert set(there.cells) == {(case.name, column.name) for case, column in item.pairs()}
    cell = there.cells["skewed", "FedProx"]
    assert (cell.rounds, cell.devices, cell.commit) == (3, 4, "abc1234")
    assert {seed: run.rounds for seed, run in cell.runs.items()} == {0: (1, 2, 3), 1: (1, 2, 3)}
    page = item_page(standing_of(item, results))
    assert "not reached / " not in page  # FedProx was not compared on even data
    assert "| FedProx is faster. | FedAvg |" in page
    assert "abc1234" in page
    assert f"`anyfleet reproduce {NAME} --engine Sequential`" in page
    assert f"evidence/{NAME}.md" in evidence_page([standing_of(item, results)])
    assert NAME in command("--list")


def test_a_method_can_be_played_alone(library: Library) -> None:
    options = ("--seeds", "1", "--jobs", "1", "--engine", "Sequential")
    command(NAME, "--method", "FedAvg", "--case", "even", *options)
    results = library.results(NAME)
    assert results is not None
    assert [(cell.case, cell.method) for cell in results.cells.values()] == [("even", "FedAvg")]
    told = f"anyfleet reproduce {NAME} --seeds 1 --case even --method FedAvg --engine Sequential"
    assert [cell.command for cell in results.cells.values()] == [told]


def test_results_of_a_study_that_goes_on_are_those_of_the_recipe(library: Library) -> None:
    """On disk the width 1 of HeteroFL is 1.0."""
    file = Path(f"recipes/{NAME}.toml")
    file.write_text(ITEM.replace('"fedavg", lr = 0.1', '"heterofl", lr = 0.1'))
    words = (NAME, "--case", "even", "--seeds", "1", "--jobs", "1", "--engine", "Sequential")
    command(*words)
    first = library.results(NAME)
    library.result_file(NAME).unlink()
    assert "Going on in" in command(*words)
    again = library.results(NAME)
    assert first is not None
    assert again is not None
    assert [*again.cells] == [*first.cells]
    assert not found(library.item(NAME), again).stale


def test_only_what_is_missing_may_be_played(library: Library) -> None:
    options = ("--case", "even", "--jobs", "1", "--engine", "Sequential")
    command(NAME, "--seeds", "1", *options)
    before = library.results(NAME)
    told = command(NAME, "--seeds", "3", "--missing", "--json", *options)
    lines = [json.loads(line) for line in told.splitlines() if line.startswith("{")]
    assert {line["seed"] for line in lines if "seed" in line} == {1, 2}
    after = library.results(NAME)
    assert before is not None
    assert after is not None
    ((digest, cell),) = after.cells.items()
    assert [*cell.runs] == [0, 1, 2]
    assert cell.runs[0] == before.cells[digest].runs[0]
    again = command(NAME, "--seeds", "3", "--missing", *options)
    assert "Not played again: all results are there of 1 of 1 cells." in again
    assert library.results(NAME) == after
    # One that was stopped goes on: what it has is in the result file, and in its folder.
    partial = replace(cell, runs={seed: cell.runs[seed] for seed in (0, 1)})
    write_results(library.result_file(NAME), Results(NAME, cells={digest: partial}))
    (study,) = Path("runs").glob("*_missing_*")
    (last,) = study.glob("*/seed-2")
    shutil.rmtree(last)
    told = command(NAME, "--seeds", "3", "--missing", *options)
    assert f"Going on in {study}" in told
    assert "1 of 2 runs are finished already" in told  # seed 0 was known before
    found_again = library.results(NAME)
    assert found_again is not None
    assert found_again.cells[digest].runs == cell.runs
    both = CliRunner().invoke(app, ["reproduce", NAME, "--missing", "--quick"])
    assert (both.exit_code, "leave --missing out" in both.output) == (2, True)


def test_a_recipe_that_changes_makes_its_results_stale(library: Library) -> None:
    command(NAME, "--seeds", "1", "--case", "even", "--jobs", "1", "--engine", "Sequential")
    file = Path(f"recipes/{NAME}.toml")
    file.write_text(ITEM.replace('"fedavg", lr = 0.1', '"fedavg", lr = 0.2'))
    there = found(library.item(NAME), library.results(NAME))
    assert there.stale == (("even", "FedAvg"),)
    assert "stale" in item_page(standing_of(library.item(NAME), library.results(NAME)))


def test_a_quick_look_writes_no_result_file(library: Library) -> None:
    told = command(NAME, "--quick", "--seeds", "1", "--jobs", "1", "--engine", "Sequential")
    assert "1 rounds of 3" in " ".join(told.split())
    assert not library.result_file(NAME).exists()


def test_equal_experiments_are_played_once(library: Library) -> None:
    text = ITEM.replace(
        'run = { task = { partition = { use = "Dirichlet", alpha = 0.3 } } }', "run = {}"
    )
    Path(f"recipes/{NAME}.toml").write_text(text)
    asked = reproduction(library.item(NAME), Extent(1))
    assert list(asked.study.cells) == ["even, FedAvg", "skewed, FedProx"]
    assert asked.names["skewed", "FedAvg"] == "even, FedAvg"


def test_unknown_items_and_cases_are_told(library: Library) -> None:
    with pytest.raises(ConfigError, match='is no item here, did you mean "thesis/table_9"'):
        library.item("thesis/table_8")
    with pytest.raises(ConfigError, match="there is no 'odd'; there are even; skewed") as caught:
        reproduction(library.item(NAME), Extent(1, ("odd",), ("SCAFFOLD",)))
    assert "--method: there is no 'SCAFFOLD'; there are FedAvg; FedProx" in str(caught.value)
    result = CliRunner().invoke(app, ["reproduce"])
    assert result.exit_code == 2
    file = library.result_file(NAME)
    file.parent.mkdir(parents=True)
    file.write_bytes(b"no")
    with pytest.raises(StoreError, match="is damaged"):
        read_results(file)


# --- results that are joined ----------------------------------------------------------------------


def test_fewer_seeds_take_nothing_away(library: Library) -> None:
    options = ("--jobs", "1", "--engine", "Sequential")
    command(NAME, "--seeds", "2", *options)
    before = library.result_file(NAME).read_bytes()
    command(NAME, "--seeds", "1", *options)
    assert library.result_file(NAME).read_bytes() == before
    told = command(NAME, "--seeds", "2", *options, "--json")  # finished: nothing is played
    assert library.result_file(NAME).read_bytes() == before
    (last,) = [json.loads(line) for line in told.splitlines() if '"result"' in line]
    assert [verdict["than"] for verdict in last["results"]] == ["FedAvg"]


def cell(runs: dict[int, float], minutes: float = 1.0, commit: str = "abc") -> CellResult:
    series = {
        seed: Series((1,), {"": (score,)}, (1.0,), (1.0,), (1.0,), (1.0,))
        for seed, score in runs.items()
    }
    place = ("x", "even", "FedAvg", 3, 4, "a machine", "2026-11-18", commit, minutes)
    return CellResult(*place, series, command="anyfleet reproduce")


def test_runs_of_two_commands_are_joined() -> None:
    first = cell({0: 0.1, 1: 0.2}, 2.0)
    assert first.joined(cell({1: 0.2}, 0.0, "def")) == first  # repeated
    on = first.joined(cell({0: 0.1, 1: 0.2, 2: 0.3}, 3.0, "def"))
    assert (list(on.runs), on.minutes, on.commit) == ([0, 1, 2], 3.0, "abc; def")
    other = first.joined(cell({0: 0.4, 1: 0.5}, 5.0, "def"))
    assert (other.runs[0].scores[""], other.minutes, other.commit) == ((0.4,), 5.0, "def")
    half = first.joined(cell({1: 0.5}, 5.0, "def"))
    assert (half.minutes, half.commit) == (6.0, "abc; def")


@pytest.mark.parametrize("value", [0.1, 0.2], ids=["repeated", "other runs"])
def test_runs_of_other_cases_keep_the_cases_that_a_result_serves(value: float) -> None:
    first = replace(cell({0: 0.1}), case="odd", also=(("even", "FedAvg"),))
    later = replace(cell({0: value}), case="odd, late", also=(("even, late", "FedAvg"),))
    served = [case for case, _ in first.joined(later).places()]
    assert served == ["odd", "even", "odd, late", "even, late"]


def test_a_repeated_command_may_add_diagnostics() -> None:
    first = cell({0: 0.1, 1: 0.2}, 2.0)
    more = {seed: replace(run, diagnostics={"loss": (0.5,)}) for seed, run in first.runs.items()}
    found = first.joined(replace(cell({}, 0.0, "def"), runs={1: more[1]}))
    assert (found.commit, found.minutes, found.runs) == ("abc", 2.0, {0: first.runs[0], 1: more[1]})


def test_a_result_keeps_the_cases_that_no_later_one_takes() -> None:
    """A recipe changes one of two cases that shared an experiment."""
    before = replace(cell({0: 0.5}), also=(("skewed", "FedAvg"),))
    later = replace(cell({0: 0.6}), digest="other", case="skewed")
    joined = Results(NAME, cells={before.digest: before}).joined(
        Results(NAME, cells={"other": later})
    )
    assert {key: each.places() for key, each in joined.cells.items()} == {
        before.digest: (("even", "FedAvg"),),
        "other": (("skewed", "FedAvg"),),
    }


def test_a_later_configuration_replaces_an_earlier_one() -> None:
    first = Results("thesis/table_9", cells={"x": cell({0: 0.1})})
    later = Results("thesis/table_9", cells={"y": cell({0: 0.2})})
    assert list(first.joined(later).cells) == ["y"]
    shared = replace(cell({0: 0.1}), case="odd", also=(("even", "FedAvg"),))
    assert list(first.joined(Results("thesis/table_9", cells={"z": shared})).cells) == ["z"]


def test_stale_results_are_known_by_every_case_that_they_serve(library: Library) -> None:
    text = ITEM.replace(
        'run = { task = { partition = { use = "Dirichlet", alpha = 0.3 } } }', "run = {}"
    )
    file = Path(f"recipes/{NAME}.toml")
    file.write_text(text)
    command(NAME, "--seeds", "1", "--jobs", "1", "--engine", "Sequential")
    file.write_text(text.replace('"fedavg", lr = 0.1', '"fedavg", lr = 0.2'))
    there = found(library.item(NAME), library.results(NAME))
    assert there.stale == (("even", "FedAvg"), ("skewed", "FedAvg"))


def test_the_list_may_be_of_some_items_and_in_json(library: Library) -> None:
    (line,) = command("--list", "thesis", "--json").splitlines()
    told = json.loads(line)
    assert (told["event"], told["item"], told["stands"]) == ("item", NAME, "not run")
    assert told["runs"] > 0
    assert NAME in command(NAME, "--list")
    result = CliRunner().invoke(app, ["reproduce", "--list", "thesis/tabel_9"])
    assert result.exit_code == 1
    assert 'did you mean "thesis/table_9"?' in " ".join(result.output.split())


def test_calculated_numbers_may_be_lines_of_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    *numbers, last = map(json.loads, command("fedpmt/table_2", "--json").splitlines())
    assert last["stands"] == f"reproduced exactly: {len(numbers)} numbers"
    assert all(each["ours"] == each["printed"] for each in numbers)
    result = CliRunner().invoke(app, ["reproduce", "fedpmt/table_2", "--case", "nope"])
    assert result.exit_code == 1
    assert "there is no 'nope'" in result.output


def test_a_single_case_once_more_keeps_the_order_of_a_result_file(library: Library) -> None:
    options = ("--jobs", "1", "--engine", "Sequential", "--seeds", "1")
    command(NAME, *options)
    before = library.results(NAME)
    command(NAME, *options, "--case", "skewed")
    after = library.results(NAME)
    assert before is not None
    assert after is not None
    assert list(after.cells) == list(before.cells)


def test_experiments_that_items_share_are_played_once(library: Library) -> None:
    """A second item has the same methods on the skewed data, and another one of its own."""
    options = ("--jobs", "1", "--engine", "Sequential", "--seeds", "2")
    command(NAME, *options)
    other = library.root / "recipes/thesis/table_10.toml"
    other.write_text(ITEM.replace("lr = 0.1", "lr = 0.2", 1))
    before = standing_of(library.item("thesis/table_10"), None, elsewhere=library.cells()).there
    assert before.shared
    assert before.missing
    assert set(before.shared.values()) == {NAME}
    told = command("thesis/table_10", *options)
    assert f"{len(before.shared)} cells are results of {NAME}" in told
    own = library.results("thesis/table_10")
    assert own is not None
    assert len(own.cells) == len({before.digests[key] for key in before.missing})
    after = standing_of(library.item("thesis/table_10"), own, elsewhere=library.cells())
    assert not after.there.missing
    page = item_page(after)
    assert f"are those of [{NAME}](table_9.md)." in page
    assert "not run" not in page
    whole = command(NAME, *options)  # those of its own are its own
    assert "cells are results of" not in whole


def test_results_without_the_diagnostics_of_an_item_do_not_serve_it(library: Library) -> None:
    command(NAME, "--jobs", "1", "--engine", "Sequential", "--seeds", "2")
    other = library.root / "recipes/thesis/table_10.toml"
    other.write_text(f'diagnostics = ["loss"]\n{ITEM}')
    item, known = library.item("thesis/table_10"), library.cells()
    assert not standing_of(item, None, elsewhere=known).there.shared
    other.write_text(ITEM)
    item = library.item("thesis/table_10")
    assert not standing_of(item, None, elsewhere=known).there.missing
    assert reproduction(item, Extent(2), elsewhere=known).names == {}
    assert reproduction(item, Extent(3), elsewhere=known).shared == {}  # a seed more
    assert "are those of" in command("thesis/table_10", "--seeds", "2")
    result = CliRunner().invoke(app, ["reproduce", "thesis/table_10", "--seeds", "2", "--json"])
    told = json.loads(result.stdout)
    assert (told["event"], told["item"]) == ("result", "thesis/table_10")
    assert told["results"][0]["verdict"] != "not run"
