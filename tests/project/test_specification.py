"""The specification page: its table of contents, its links, and every citation of its sections."""

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "specification.md"
FOLDERS = ("src", "tests", "docs", "benchmarks", "tools", "examples", "recipes")
ENDINGS = (".md", ".py", ".toml", ".txt")
# Cited on purpose, by the test of the listing of formulas: a section that does not exist.
PLANTED = "10"


class Heading(NamedTuple):
    depth: int
    title: str

    @property
    def section(self) -> str | None:
        """The number that citations use, "1.12.3" or "F"; None if it has none."""
        numbered = re.match(r"([0-9A-G](?:\.\d+)*)\.? ", self.title)
        return numbered[1] if numbered else None

    @property
    def anchor(self) -> str:
        """The target of links to this heading, by GitHub's rule."""
        return re.sub(r"[^\w\- ]", "", self.title.lower()).replace(" ", "-")


class Citation(NamedTuple):
    line: int
    section: str


def prose(text: str) -> str:
    """Return the page without fenced blocks, whose lines may look like headings."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


TEXT = prose(PAGE.read_text(encoding="utf-8"))
HEADINGS = [
    Heading(len(marks), title)
    for marks, title in re.findall(r"^(#+) (.+)$", TEXT, flags=re.MULTILINE)
]
SECTIONS = [each.section for each in HEADINGS if each.section]
ANCHORS = [each.anchor for each in HEADINGS]


# --- citations --------------------------------------------------------------------------------

WORD = r"(?:METHODS|[Ss]pecification)"
SECTION = r"(?:§[0-9A-Z]+(?:\.[0-9]+)*|\b[A-G]\.[0-9]+)"
# Between two sections: the letter of an item, a comma or a word, the break of a line.
BETWEEN = r"(?: \(?[a-d]\)?(?!\w))?,?(?: and| or| to|–|-)?[\s#]*"
# What may stand before a list of sections: a word, whoever's they are, or none; after a link, too.
BEFORE = rf"(?:(?P<owner>(?!{SECTION})[\w./]+)(?:`|\]\([^)]*\))?[,:]?[\s#\"'`*]+)?"
CITED = re.compile(
    rf"{BEFORE}(?P<sections>{SECTION}(?:{BETWEEN}{SECTION})*)"
    rf"(?P<after>[\s#]+of[\s#]+(?:the[\s#]+)?[\[`]?{WORD})?"
)


def cited(text: str) -> Iterator[Citation]:
    """Yield the sections of the specification that a text cites.

    They follow the word ("specification §1.7, §1.8", "specification C.12"), precede it ("§1.7 of
    the specification"), or stand alone, as in "(§1.10)". Sections after another word are its own:
    "S4 §4.4" is one of the thesis.
    """
    if not re.search(SECTION, text):  # most files, which takes a fifth of the time to tell
        return
    for found in CITED.finditer(text):
        owner = (found["owner"] or "").removesuffix(".md").rpartition("/")[2]
        alone = not owner or owner.endswith(".") or text[found.end("owner")] in ",:"
        alone = alone and not re.fullmatch(r"S\d", owner)
        named = re.fullmatch(WORD, owner) or found["after"]
        for each in re.finditer(SECTION, found["sections"]):
            # Alone, "C.3" may be anything.
            if named or (alone and each[0].startswith("§")):
                line = text.count("\n", 0, found.start("sections") + each.start()) + 1
                yield Citation(line, each[0].removeprefix("§"))


def files() -> list[Path]:
    found = (file for folder in FOLDERS for file in (ROOT / folder).rglob("*"))
    return sorted(file for file in found if file.suffix in ENDINGS and file.is_file())


@pytest.mark.parametrize("word", ["METHODS", "specification", "Specification"])
@pytest.mark.parametrize(
    ("text", "sections"),
    [
        ("(WORD $9.9)", ["9.9"]),
        ("WORD $1.7, $9.8.7.", ["1.7", "9.8.7"]),
        ("WORD $A.1 and $3", ["A.1", "3"]),
        ("WORD $1.13–$1.15", ["1.13", "1.15"]),
        ("WORD $1.5 (d), $1.7", ["1.5", "1.7"]),
        ("own prediction (WORD\n    # $1.10). More", ["1.10"]),
        ("WORD C.1-C.8, C.10 and the net of C.12", ["C.1", "C.8", "C.10"]),
        ("[the WORD](../WORD.md) $F", ["F"]),
        ("`docs/WORD.md`, $B", ["B"]),
        ('"use another (WORD "\n    "$E)"', ["E"]),
        ("$1.7 to $1.9 of the WORD", ["1.7", "1.9"]),
        ("2022. $1.4 of\nthe WORD. More", ["1.4"]),
        ("in round 0 ($1.10)", ["1.10"]),
        ("(FedDrop, $1.4)", ["1.4"]),
        ("# $1.5 HeteroFL", ["1.5"]),
        ("C.1, C.2 and C.3 of WORD.", ["C.1", "C.2", "C.3"]),
        ("the WORD of S4 $4.4, $4.5", []),
        ("S4, $4.4", []),
        ("RFC 1951 $3.2 and C.3", []),
    ],
)
def test_sections_are_found_whatever_the_page_is_called(
    text: str, sections: list[str], word: str
) -> None:
    written = text.replace("WORD", word).replace("$", "§")
    assert [each.section for each in cited(written)] == sections


def test_a_citation_knows_its_line() -> None:
    assert list(cited("one\ntwo (METHODS\n§1.1,\n§1.2)")) == [(3, "1.1"), (4, "1.2")]


def test_every_citation_names_a_section() -> None:
    citations = [
        (file.relative_to(ROOT), citation)
        for file in files()
        for citation in cited(file.read_text(encoding="utf-8"))
    ]
    known = {*SECTIONS}
    dangling = [
        f"{file}:{citation.line}: §{citation.section}"
        for file, citation in citations
        if citation.section not in known
        and not (file.parts[0] == "tests" and citation.section == PLANTED)
    ]
    assert not dangling, "No such section in docs/specification.md:\n" + "\n".join(dangling)
    # The package cites it by the hundred: if few are found, they are no longer read.
    assert sum(file.parts[0] == "src" for file, _ in citations) > 100


# --- the page ---------------------------------------------------------------------------------


def test_the_table_of_contents_lists_every_section() -> None:
    titles = [each.title for each in HEADINGS]
    start = titles.index("Contents")
    assert titles[:start] == ["Specification"]
    contents = TEXT.partition("\n## Contents\n")[2].partition("\n## ")[0]
    listed = re.findall(r"^( *)- \[(.+)\]\(#(.+)\)$", contents, flags=re.MULTILINE)
    assert [(len(indent) // 2 + 2, title, anchor) for indent, title, anchor in listed] == [
        (each.depth, each.title, each.anchor) for each in HEADINGS[start + 1 :]
    ]


def test_sections_are_unique_and_lie_in_their_parents() -> None:
    assert len({*SECTIONS}) == len(SECTIONS)
    assert len({*ANCHORS}) == len(ANCHORS)
    for above, each in pairwise(HEADINGS):
        assert each.depth <= above.depth + 1, each.title
    depths = {each.section: each.depth for each in HEADINGS if each.section}
    for section, depth in depths.items():
        assert depth == 2 + section.count("."), section
        parent = section.rpartition(".")[0]
        assert not parent or parent in depths, section


def test_links_within_the_page_lead_to_their_sections() -> None:
    sections = {each.section: each.anchor for each in HEADINGS if each.section}
    defined = dict(re.findall(r"^\[§(.+)\]: #(.+)$", TEXT, flags=re.MULTILINE))
    assert {name: sections.get(name) for name in defined} == defined
    assert {*re.findall(r"\[§([^\]]+)\](?!:)", TEXT)} == {*defined}
    assert {*re.findall(r"\]\(#([^)]+)\)", TEXT)} <= {*ANCHORS}


def test_links_from_other_pages_lead_to_a_section() -> None:
    dangling = [
        f"{page.relative_to(ROOT)}: {anchor}"
        for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
        for anchor in re.findall(r"\bspecification\.md#([\w-]+)", page.read_text(encoding="utf-8"))
        if anchor not in ANCHORS
    ]
    assert not dangling, "No such heading in docs/specification.md:\n" + "\n".join(dangling)
