"""`anyfleet parts`: the table of all parts, and the page that is made of it."""

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from anyfleet.cli.app import app
from anyfleet.cli.parts import listed_parts, parts_page
from anyfleet.names import HOMES, public_names

DOCS = Path(__file__).resolve().parents[2] / "docs"


def anyfleet_command(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


def test_every_part_of_every_slot_is_listed_once() -> None:
    listed = [(part.slot, part.name) for part in listed_parts()]
    assert len(set(listed)) == len(listed)
    names = {name for _, name in listed}
    for slot in ("select", "schedule", "plan", "choose", "extract", "norm", "uplink"):
        home = importlib.import_module(HOMES[slot])
        exported = {name: getattr(home, name) for name in public_names(HOMES[slot])}
        whole = {name for name, part in exported.items() if not inspect.isabstract(part)}
        assert whole <= names
    assert {"Embedded", "resnet18", "levels", "Stacked"} <= names
    # Values and abstract classes cannot be used in a run file.
    assert not {"Task", "TaskSpec", "Data", "World", "accuracy", "Quantiser"} & names


def test_a_part_inside_another_has_its_slot_in_brackets() -> None:
    slots = {part.name: part.shown_slot for part in listed_parts()}
    assert (slots["Gradient"], slots["AdamW"]) == ("train", "(train)")
    assert slots["Stc"] == "uplink, downlink"


def test_every_part_says_what_it_does() -> None:
    lines = {part.name: part.line for part in listed_parts()}
    assert [name for name, line in lines.items() if len(line) < 10] == []
    # A function is told by what it returns.
    assert lines["perceptron"].startswith("A fully connected network")
    assert [name for name, line in lines.items() if line.startswith("Return ")] == []


def test_the_page_of_a_part_exists_and_is_that_of_its_paper() -> None:
    pages = {part.name: part.page for part in listed_parts()}
    assert pages["Learned"] == "methods/fedpns.md"
    assert pages["AngleWeighted"] == "methods/fedadp.md"
    assert pages["TrimmedMean"] == "robustness.md"
    assert pages["Raw"] == "codecs.md"
    assert pages["Everyone"] == ""
    for page in filter(None, pages.values()):
        assert (DOCS / page).is_file(), page


def test_the_page_of_all_parts_is_current() -> None:
    written = (DOCS / "parts.md").read_text(encoding="utf-8")
    assert written == parts_page(), "run: anyfleet parts --markdown > docs/parts.md"


def test_the_command_prints_the_table_one_slot_or_the_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = anyfleet_command("parts")
    assert shown.exit_code == 0
    assert {"Everyone", "Embedded"} <= set(shown.stdout.split())
    assert "[6, 128]" in shown.stdout  # brackets of a docstring are no markup
    assert shown.stdout.endswith("\nOne slot: anyfleet parts SLOT\n")
    one = anyfleet_command("parts", "downlink").stdout
    assert "One slot" not in one
    assert "Stc" in one
    assert "Everyone" not in one
    assert anyfleet_command("parts", "--markdown").stdout == parts_page()


@pytest.mark.parametrize(
    ("columns", "wide"), [("70", 70), ("150", 150), ("", 120), ("0", 120), ("wide", 120)]
)
def test_a_table_in_a_pipe_is_as_wide_as_columns_says(
    columns: str, wide: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    lines = anyfleet_command("parts").stdout.splitlines()
    assert wide - 20 < max(map(len, lines)) <= wide
    assert all(line == line.rstrip() for line in lines)


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("slect",), 1, r'slect: is not a slot \(select, .*did you mean "select"'),
        (("select", "--markdown"), 2, "leave SLOT out"),
    ],
)
def test_what_cannot_be_listed_says_why(words: tuple[str, ...], code: int, told: str) -> None:
    found = anyfleet_command("parts", *words)
    assert found.exit_code == code
    assert re.search(told, found.stderr)
