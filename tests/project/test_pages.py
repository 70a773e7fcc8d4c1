"""The generated pages are current, and the code on pages runs."""

import doctest
import re
import sys
import types
from functools import cache
from pathlib import Path

import pytest
from tools import pages

ROOT = Path(__file__).resolve().parents[2]
WITH_EXAMPLES = ("docs/glossary.md",)


@cache
def page_of_keys() -> str:
    return pages.page()


def test_the_page_of_keys_is_what_the_generator_writes() -> None:
    assert pages.PAGE.read_text(encoding="utf-8") == page_of_keys(), "run `make pages`"


def test_the_classes_of_the_glossary_are_what_the_generator_writes() -> None:
    assert pages.GLOSSARY.read_text(encoding="utf-8") == pages.glossary(), "run `make pages`"


def test_the_pages_about_evidence_follow_from_recipes_and_results() -> None:
    docs = ROOT / "docs"
    files = [docs / "evidence.md", docs / "comparison.md", *(docs / "evidence").rglob("*.md")]
    written = {file: file.read_text(encoding="utf-8") for file in files}
    assert written == pages.evidence_pages(), "run `make pages`"


@pytest.mark.parametrize("key", ["rounds", "evaluate_every", "sent_fraction", "availability"])
def test_the_page_of_keys_has_keys_of_every_depth(key: str) -> None:
    assert f"| `{key}` |" in page_of_keys()


def keys_of(part: str) -> dict[str, list[str]]:
    """Return the table of a part: the other cells of every row, by its key."""
    section = page_of_keys().partition(f"### {part}\n")[2].partition("\n##")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", section, re.MULTILINE)
    return {key: cells.split(" | ") for key, cells in rows}


@pytest.mark.parametrize(
    ("part", "key", "word"),
    [
        ("Group", "mortality", "dies"),  # beside a field
        ("Embedded", "server", "server"),  # beside the field of a class that it derives from
        ("heterofl", "widths", "level"),  # beside a parameter
        ("whale", "lr", "learning rate"),  # beside a field of `**parts: Unpack[Parts]`
        ("stc", "count", "devices"),  # beside the parameter of `fedavg`
    ],
)
def test_the_meaning_of_a_key_is_the_comment_beside_it(part: str, key: str, word: str) -> None:
    assert word in keys_of(part)[key][-1]


def test_keys_that_a_method_hands_on_have_the_default_of_that_method() -> None:
    assert [keys_of(name)["momentum"][1] for name in ("fedavg", "fjord")] == ["0", "0.9"]
    assert [keys_of(name)["masked"][1] for name in ("feddrop", "whale")] == ["false", "true"]


def test_the_page_of_keys_has_whole_docstrings_without_their_examples() -> None:
    text = page_of_keys()
    assert "they reach 799 m, beyond the cell" in text  # a second paragraph
    assert ">>>" not in text


def test_no_default_of_the_page_of_keys_is_long() -> None:
    cells = re.findall(r"^\| `\w+` \| [^|]* \| ([^|]*) \|", page_of_keys(), re.MULTILINE)
    assert cells
    assert [cell for cell in cells if len(cell) > 60] == []


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_the_examples_of_a_page_run(name: str) -> None:
    found = doctest.testfile(str(ROOT / name), module_relative=False)
    assert found.attempted > 0
    assert not found.failed


def pages_with_links() -> list[Path]:
    folders = (ROOT, ROOT / "docs", ROOT / "docs" / "methods", ROOT / "docs" / "tutorials")
    return sorted(page for folder in folders for page in folder.glob("*.md"))


@pytest.mark.parametrize("page", pages_with_links(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    local = [link for link in links if "://" not in link and not link.startswith("mailto:")]
    assert [link for link in local if not (page.parent / link).exists()] == []


CODE = (
    "README.md",
    "docs/budgets.md",
    "docs/codecs.md",
    "docs/methods/README.md",
    "docs/refused_networks.md",
    "docs/tutorials/engineer.md",
    "docs/tutorials/researcher.md",
)


@pytest.mark.parametrize("name", CODE)
def test_the_code_of_a_page_runs_in_order(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert blocks
    monkeypatch.chdir(tmp_path)
    # A module of its own, since dataclasses look their annotations up in one.
    page = types.ModuleType("page_of_the_documentation")
    monkeypatch.setitem(sys.modules, page.__name__, page)
    for block in blocks:
        exec(compile(block, name, "exec"), vars(page))


PRINTED = ("docs/budgets.md", "docs/refused_networks.md")


@pytest.mark.parametrize("name", PRINTED)
def test_a_page_shows_what_its_code_prints(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    pairs = re.findall(
        r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL
    )
    assert pairs
    page: dict[str, object] = {}
    for block, shown in pairs:
        exec(compile(block, "net.py", "exec"), page)
        printed = capsys.readouterr().out
        # A traceback shows lines of a file, which a block of a page is not.
        assert [line for line in shown.splitlines() if not line.startswith("    ")] == [
            line for line in printed.splitlines() if line.strip()
        ]


def test_result_files_stay_small() -> None:
    files = [file for file in (ROOT / "evidence").rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 20e6
