"""Papers as values, their BibTeX, and which of them a method stems from."""

import importlib
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import pytest

import anyfleet.methods
from anyfleet import methods, names, papers
from anyfleet.experiment import load
from anyfleet.methods import fedavg, fedprox, heterofl
from anyfleet.papers import (
    ANYCOST,
    AT_SCALE,
    FEDADAM,
    FEDADP,
    FEDAT,
    FEDAVG,
    FEDBN,
    FEDBUFF,
    FEDDROP,
    FEDPNS,
    FEDPROX,
    FEDRESCUE,
    FJORD,
    HETEROFL,
    SLIMMABLE,
    STC,
    THESIS,
    Paper,
    bibliography,
    papers_of,
)
from anyfleet.parts.aggregate import ServerAdam, ServerOptimised, Subset
from anyfleet.parts.norm import OnDevice, PerWidth, Static
from anyfleet.parts.plan import LocalStepsWithin, WidthByLevel
from anyfleet.parts.schedule import Buffered, Overselected, Surveyed, Synchronous, Tiers
from anyfleet.parts.select import Learned
from anyfleet.parts.train import Fjord, Gradient

WORKS = {name: work for name in papers.__all__ if isinstance(work := getattr(papers, name), Paper)}
FOLDER = Path(anyfleet.methods.__file__).parent
MODULES = [
    importlib.import_module(f"anyfleet.methods.{file.stem}")
    for file in sorted(FOLDER.glob("*.py"))
    if file.stem not in ("__init__", "references")
]
ENTRY = re.compile(r"@(?P<kind>\w+)\{(?P<key>[\w-]+),\n(?P<rows>(?:  \w+ = \{.*\},\n)+)\}")


def rows(entry: str) -> dict[str, str]:
    """The fields of one entry, whose form is checked on the way."""
    match = ENTRY.fullmatch(entry)
    assert match, entry
    found = re.findall(r"  (\w+) = \{(.*)\},\n", match["rows"])
    assert len({name for name, _ in found}) == len(found)
    return dict(found)


# --- BibTeX -------------------------------------------------------------------------------------


def test_an_entry_has_what_is_known_and_nothing_else() -> None:
    paper = Paper("a2020", ("Doe, Jane", "Roe, Max"), "On Things", "Some Journal", 2020, "article")
    assert paper.bibtex() == (
        "@article{a2020,\n"
        "  author = {Doe, Jane and Roe, Max},\n"
        "  title = {On Things},\n"
        "  journal = {Some Journal},\n"
        "  year = {2020},\n"
        "}"
    )
    bare = rows(Paper("b", ("Doe, Jane",), "On Things", "", kind="misc").bibtex())
    assert set(bare) == {"author", "title"}
    full = rows(replace(paper, doi="10.1/a_b", url="https://a.b/c_d").bibtex())
    assert full["doi"] == "10.1/a_b"
    assert full["url"] == "https://a.b/c_d"


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("article", "journal"),
        ("inproceedings", "booktitle"),
        ("phdthesis", "school"),
        ("misc", "howpublished"),
    ],
)
def test_the_venue_has_the_name_of_its_kind(kind: papers.paper.Kind, name: str) -> None:
    assert rows(Paper("a", ("Doe, Jane",), "T", "There", 2020, kind).bibtex())[name] == "There"


def test_special_letters_and_accents_are_commands() -> None:
    paper = Paper("a", ("Konečný, Jakub", "Gündüz, Deniz"), "50% of a_b & {c}—d", "R\\&D ~ #1 ^ $")
    found = rows(paper.bibtex())
    assert found["author"] == r"Kone{\v{c}}n{\'{y}}, Jakub and G{\"{u}}nd{\"{u}}z, Deniz"
    assert found["title"] == r"50\% of a\_b \& \{c\}---d"
    assert found["booktitle"] == r"R\textbackslash{}\&D \textasciitilde{} \#1 \textasciicircum{} \$"


def test_capitals_inside_words_are_kept_and_others_left_to_the_style() -> None:
    paper = Paper("a", ("Doe, Jane",), "HeteroFL: Learning on Non-IID Data with B SGD", "There")
    assert rows(paper.bibtex())["title"] == "{HeteroFL}: Learning on Non-{IID} Data with B {SGD}"


def test_a_group_of_authors_is_one_name() -> None:
    paper = Paper("a", ("The Anyfleet authors", "Doe, Jane"), "T", "There")
    assert rows(paper.bibtex())["author"] == "{The Anyfleet authors} and Doe, Jane"
    assert paper.cite().startswith("The Anyfleet authors and Doe, ")


def test_a_citation_is_one_short_line() -> None:
    assert FEDAVG.cite() == "McMahan et al. 2017, AISTATS"
    assert papers.FEDPNS.cite() == (
        "Wu and Wang 2022, IEEE Transactions on Network Science and Engineering"
    )
    assert papers.THESIS.cite() == "Wu 2023, York University"
    assert papers.WHALE.cite() == "Li et al., earlier version: arXiv:2405.00885"


def test_a_bibliography_is_entries_between_empty_lines() -> None:
    text = bibliography([FEDAVG, HETEROFL])
    assert text.split("\n\n") == [FEDAVG.bibtex(), HETEROFL.bibtex() + "\n"]


# --- the works ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WORKS)
def test_every_work_is_a_whole_entry_in_ascii(name: str) -> None:
    work = WORKS[name]
    entry = work.bibtex()
    assert entry.isascii()
    assert entry.count("{") == entry.count("}")
    found = rows(entry)
    assert all("," in author for author in work.authors)
    assert found["author"].count(" and ") == len(work.authors) - 1
    assert "year" in found or "url" in found


def test_keys_are_unique() -> None:
    assert len({work.key for work in WORKS.values()}) == len(WORKS)


# --- who stems from which -----------------------------------------------------------------------


@dataclass(frozen=True)
class Leaf:
    papers: ClassVar[tuple[Paper, ...]] = (FEDBN,)


@dataclass(frozen=True)
class Plain:
    inner: tuple[Leaf | Paper, ...] = (Leaf(), Leaf())


@dataclass(frozen=True)
class Branch:
    table: dict[str, Plain] = field(default_factory=lambda: {"a": Plain()})
    leaf: Leaf = field(default_factory=Leaf)
    papers: ClassVar[tuple[Paper, ...]] = (FEDAT, FEDAVG)


def test_papers_are_found_at_every_depth_and_once() -> None:
    assert papers_of(Branch()) == (FEDAT, FEDAVG, FEDBN)
    assert papers_of(Plain(())) == ()
    assert papers_of(Branch) == ()  # a class is no part


def test_the_first_methods_have_their_papers() -> None:
    assert papers_of(fedavg()) == (FEDAVG,)
    assert set(papers_of(fedprox(mu=0.1))) == {FEDAVG, FEDPROX}
    assert set(papers_of(heterofl())) == {FEDAVG, HETEROFL}
    assert papers_of(methods.local()) == (FEDAVG,)


def test_what_is_switched_off_is_not_cited() -> None:
    assert FEDPROX not in papers_of(fedprox(mu=0.0))
    assert FEDPROX in papers_of(fedprox(mu=0.0, seconds=1.0))  # partial work is FedProx's too
    assert papers_of(Gradient()) == ()
    options = {"masked": HETEROFL, "label_rows": HETEROFL, "scaler": HETEROFL, "inverted": FEDDROP}
    for option, paper in options.items():
        assert papers_of(Gradient(**{option: True})) == (paper,)  # type: ignore[arg-type]


def test_quartet_is_of_four_papers() -> None:
    file = Path(__file__).resolve().parents[2] / "recipes" / "quartet" / "quartet.toml"
    assert {ANYCOST, STC, HETEROFL, FEDADP} <= set(papers_of(load(file).method))


def test_parts_bring_their_papers() -> None:
    method = fedavg()
    assert FEDBUFF in papers_of(replace(method, schedule=Buffered(2, 2)))
    assert FEDAT in papers_of(replace(method, schedule=Tiers()))
    assert AT_SCALE in papers_of(replace(method, schedule=Overselected(2)))
    assert AT_SCALE in papers_of(replace(method, schedule=Surveyed(Overselected(2))))
    assert papers_of(Synchronous()) == ()
    assert papers_of(ServerOptimised(optimiser=ServerAdam())) == (FEDAVG, FEDADAM)
    assert FEDBN in papers_of(replace(method, norm=OnDevice()))
    assert SLIMMABLE in papers_of(replace(method, norm=PerWidth()))
    assert HETEROFL in papers_of(replace(method, norm=Static()))
    assert papers_of(LocalStepsWithin(1.0, WidthByLevel())) == (FEDPROX, HETEROFL)
    # As another paper compares with it, and as the thesis words it.
    assert papers_of(Fjord()) == (FJORD, FEDRESCUE)
    assert set(papers_of(Learned(5))) == {FEDPNS, THESIS}
    assert {FEDPNS, THESIS} <= set(papers_of(Subset()))


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_a_method_names_its_paper_in_words_and_as_a_value(module: ModuleType) -> None:
    first = module.PAPER.authors[0].partition(",")[0]
    assert first in str(module.__doc__)


@pytest.mark.parametrize("name", names.public_names("anyfleet.methods"))
def test_the_parts_of_a_method_lead_to_its_paper(name: str) -> None:
    """A run folder knows only the parts."""
    function = getattr(methods, name)
    module = importlib.import_module(function.__module__)
    if module in MODULES:
        assert module.PAPER in papers_of(function())
