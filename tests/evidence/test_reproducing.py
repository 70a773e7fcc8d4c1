from pathlib import Path

import pytest
from typer.testing import CliRunner

from anyfleet.cli.app import app
from anyfleet.errors import ConfigError, StoreError
from anyfleet.evidence.library import Library
from anyfleet.evidence.measured import found
from anyfleet.evidence.pages import evidence_page, item_page, standing_of
from anyfleet.evidence.reproducing import Extent, reproduction
from anyfleet.evidence.results import read_results
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
    assert f"evidence/{NAME}.md" in evidence_page([standing_of(item, results)])
    assert NAME in command("--list")


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
    with pytest.raises(ConfigError, match="there is no such item here; there are thesis/table_9"):
        library.item("thesis/table_8")
    with pytest.raises(ConfigError, match="there is no 'odd'; there are even; skewed"):
        reproduction(library.item(NAME), Extent(1, ("odd",)))
    result = CliRunner().invoke(app, ["reproduce"])
    assert result.exit_code == 2
    file = library.result_file(NAME)
    file.parent.mkdir(parents=True)
    file.write_bytes(b"no")
    with pytest.raises(StoreError, match="is damaged"):
        read_results(file)
