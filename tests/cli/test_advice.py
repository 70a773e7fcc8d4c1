"""`anyfleet methods --advise`, as people use it."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from anyfleet.cli import advice
from anyfleet.cli.app import app
from tests.evidence.test_advice import RUN, comparison


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "known_rows", comparison)


@pytest.mark.usefixtures("rows")
def test_candidates_are_told_with_their_rows(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(RUN.replace("mortality = 0.25", "").replace("error = 0.1", ""))
    result = CliRunner().invoke(app, ["methods", "--advise", str(file)])
    assert result.exit_code == 0, result.output
    told = " ".join(result.stdout.split())
    assert "Cases of the comparison most like it: stable" in told
    assert "stc: +5.0 points over fedavg" in told
    assert "8.0 (+8.0; +7.0 to +9.0)" in told
    assert "first guess" not in told


@pytest.mark.usefixtures("rows")
def test_a_fleet_unlike_all_cases_is_told_so(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(RUN.replace("mortality = 0.25", "mortality = 0.9"))
    result = CliRunner().invoke(app, ["methods", "--advise", str(file)])
    assert "take the answer for a first guess" in result.stdout


@pytest.mark.usefixtures("rows")
def test_bad_files_and_words_are_refused(tmp_path: Path) -> None:
    missing = CliRunner().invoke(app, ["methods", "--advise", str(tmp_path / "none.toml")])
    assert missing.exit_code == 1
    assert "cannot be read" in missing.stderr
    file = tmp_path / "run.toml"
    file.write_text("rounds = 3\n")
    empty = CliRunner().invoke(app, ["methods", "--advise", str(file)])
    assert empty.exit_code == 1
    assert "has no table [fleet]" in empty.stderr
    both = CliRunner().invoke(app, ["methods", "fedavg", "--advise", str(file)])
    assert both.exit_code == 2
