"""Papers as values that become BibTeX, and how to find those of a method."""

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

Kind = Literal["article", "inproceedings", "misc", "phdthesis"]

_VENUE = {
    "article": "journal",
    "inproceedings": "booktitle",
    "misc": "howpublished",
    "phdthesis": "school",
}
_SPECIAL = {letter: f"\\{letter}" for letter in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "–": "--",
    "—": "---",
}
_ACCENTS = {
    "\N{COMBINING GRAVE ACCENT}": "`",
    "\N{COMBINING ACUTE ACCENT}": "'",
    "\N{COMBINING CIRCUMFLEX ACCENT}": "^",
    "\N{COMBINING TILDE}": "~",
    "\N{COMBINING DIAERESIS}": '"',
    "\N{COMBINING CARON}": "v",
    "\N{COMBINING CEDILLA}": "c",
}
_WORDS = re.compile(r"(\w+)")
_ABBREVIATION = re.compile(r"\(([^()]+)\)$")


@dataclass(frozen=True)
class Paper:
    """What it takes to cite a work; what is not known is left out.

    Authors are written "Family, Given"; a name without a comma is that of a group. A venue may end
    with its abbreviation in brackets.
    """

    key: str
    authors: tuple[str, ...]
    title: str
    venue: str
    year: int | None = None
    kind: Kind = "inproceedings"
    doi: str = ""
    url: str = ""

    def bibtex(self) -> str:
        """Return a BibTeX entry in plain ASCII that keeps capitals inside words in every style."""
        values = {
            "author": " and ".join(map(_name, self.authors)),
            "title": "".join(map(_protected, _WORDS.split(self.title))),
            _VENUE[self.kind]: _escaped(self.venue),
            "year": str(self.year or ""),
            "doi": self.doi,
            "url": self.url,
        }
        rows = (f"  {name} = {{{value}}},\n" for name, value in values.items() if value)
        return f"@{self.kind}{{{self.key},\n{''.join(rows)}}}"

    def cite(self) -> str:
        """Return one short line: "Wu and Wang 2021, IEEE Transactions …"."""
        family = [name.partition(",")[0] for name in self.authors]
        who = " and ".join(family) if len(family) < 3 else f"{family[0]} et al."
        when = f" {self.year}" if self.year else ""
        short = _ABBREVIATION.search(self.venue)
        return f"{who}{when}, {short[1] if short else self.venue}"


def papers_of(value: Any) -> tuple[Paper, ...]:
    """Return the papers of a method or part and of all parts inside it, each once.

    They come in the order of the fields, and those of a part before those of the parts inside.
    """
    return tuple(dict.fromkeys(_found(value)))


def bibliography(papers: Iterable[Paper]) -> str:
    """Return all entries as the text of a `.bib` file."""
    return "\n\n".join(paper.bibtex() for paper in papers) + "\n"


def _found(value: Any) -> Iterator[Paper]:
    if is_dataclass(value) and not isinstance(value, type):
        yield from getattr(value, "papers", ())
        inner: Iterable[Any] = (getattr(value, each.name) for each in fields(value))
    elif isinstance(value, Mapping):
        inner = value.values()
    else:
        inner = value if isinstance(value, tuple | list) else ()
    for each in inner:
        yield from _found(each)


def _escaped(text: str) -> str:
    return "".join(_SPECIAL.get(letter) or _accented(letter) for letter in text)


def _accented(letter: str) -> str:
    """Return a letter with an accent as a command that every BibTeX understands."""
    plain, *marks = list(unicodedata.normalize("NFD", letter))
    known = len(marks) == 1 and marks[0] in _ACCENTS
    return f"{{\\{_ACCENTS[marks[0]]}{{{plain}}}}}" if known else letter


def _name(author: str) -> str:
    """Return an author's name; braces keep the name of a group in one piece."""
    return _escaped(author) if "," in author else f"{{{_escaped(author)}}}"


def _protected(word: str) -> str:
    """Return a word of a title; braces keep the capitals of HeteroFL and IID in every style."""
    capitals = any(letter.isupper() for letter in word[1:])
    return f"{{{_escaped(word)}}}" if capitals else _escaped(word)
