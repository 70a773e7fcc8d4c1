"""The decision records: numbered without gaps, listed in the index, and linked to what exists."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "decisions"
INDEX = FOLDER / "README.md"
PAGES = sorted(FOLDER.glob("*.md"))
RECORDS = [page for page in PAGES if page != INDEX]
LEADS = ("**Question.**", "**Decision.**", "**Why.**", "**What it costs.**")
LONGEST = 30  # lines of a record

_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def title(record: Path) -> str:
    """Return the heading of a record, which begins with its number."""
    return record.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")


def links(text: str) -> list[tuple[str, str]]:
    """Return text and target of every link outside of blocks of code."""
    found = _LINK.findall(_FENCE.sub("", text))
    return [(" ".join(words.split()), target) for words, target in found]


def gaps(numbers: list[int]) -> list[str]:
    """Return what is wrong with numbers that should count from 1; empty if nothing is."""
    due = range(1, len(numbers) + 1)
    twice = sorted({number for number in numbers if numbers.count(number) > 1})
    missing = sorted(set(due) - set(numbers))
    return [*(f"{n:03} twice" for n in twice), *(f"{n:03} missing" for n in missing)]


def unlisted(records: dict[str, str], index: str) -> list[str]:
    """Return how an index differs from the records, given as file name to title."""
    listed = [(target, words) for words, target in links(index) if re.match(r"\d{3}-", target)]
    problems = [f"{name} is not in the index" for name in records if name not in dict(listed)]
    problems += [f"{target} is no record" for target, _ in listed if target not in records]
    problems += [
        f"{target} is called {words!r}, not {records[target]!r}"
        for target, words in listed
        if target in records and words != records[target]
    ]
    return problems + (["the index is not in order"] if listed != sorted(listed) else [])


def broken(page: Path) -> Iterator[str]:
    """Yield the relative links of a page that lead to no file, or to no heading of it."""
    for _, target in links(page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            yield f"{page.name}: {target} does not exist"
        elif anchor and anchor not in anchors(file):
            yield f"{page.name}: {target} has no such heading"


def anchors(page: Path) -> set[str]:
    """Return the names under which the headings of a page can be linked."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_there_are_records() -> None:
    assert len(RECORDS) > 10


def test_numbers_are_unique_and_without_gaps() -> None:
    assert not gaps([int(record.name[:3]) for record in RECORDS])


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.stem)
def test_a_record_is_short_and_has_its_four_answers(record: Path) -> None:
    text = record.read_text(encoding="utf-8")
    assert re.fullmatch(r"\d{3}-[a-z0-9-]+", record.stem)
    assert re.match(rf"# {record.name[:3]}\. [A-Z]", text), "the title begins with the number"
    assert tuple(re.findall(r"^\*\*[^*]+\*\*", text, re.MULTILINE)) == LEADS
    assert len(text.splitlines()) <= LONGEST


def test_the_index_lists_every_record_by_its_title() -> None:
    records = {record.name: title(record) for record in RECORDS}
    assert not unlisted(records, INDEX.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    assert not list(broken(page))


def test_these_checks_can_fail(tmp_path: Path) -> None:
    assert gaps([1, 3, 3]) == ["003 twice", "002 missing"]
    records = {"001-a.md": "001. A", "002-b.md": "002. B"}
    index = "- [001. Old\n  name](001-a.md)\n- [003. C](003-c.md)"
    assert unlisted(records, index) == [
        "002-b.md is not in the index",
        "003-c.md is no record",
        "001-a.md is called '001. Old name', not '001. A'",
    ]
    backwards = "[002. B](002-b.md) [001. A](001-a.md)"
    assert unlisted(records, backwards) == ["the index is not in order"]
    page = tmp_path / "page.md"
    page.write_text("# A heading\n[x](#a-heading) [y](#none) [z](gone.md) [w](https://a.example)")
    assert list(broken(page)) == [
        "page.md: #none has no such heading",
        "page.md: gone.md does not exist",
    ]
