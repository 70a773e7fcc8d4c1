"""`anyfleet methods` and `anyfleet cite`, as people use them."""

import ast
import importlib
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import anyfleet
from anyfleet import methods, papers
from anyfleet.arrays import Floats
from anyfleet.cli import methods as listing
from anyfleet.cli.app import app
from anyfleet.cli.cite import ANYFLEET
from anyfleet.experiment import Experiment
from anyfleet.names import public_names
from anyfleet.store import describe
from anyfleet.tasks import Embedded
from tests.cli.test_commands import RUN_FILE

SOURCE = Path(anyfleet.__file__).parent
ROOT = SOURCE.parents[1]
NAMES = public_names("anyfleet.methods")


def anyfleet_command(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


def succeeds(*words: str) -> str:
    result = anyfleet_command(*words)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return str(result.stdout)


def refused(*words: str) -> str:
    result = anyfleet_command(*words)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "Traceback" not in result.output
    return str(result.stderr)


# --- methods ------------------------------------------------------------------------------------


def test_all_methods_are_listed_with_line_and_paper() -> None:
    shown = succeeds("methods")
    rows = {line.split()[0]: line for line in shown.splitlines() if line and line[0] != " "}
    assert set(NAMES) <= set(rows)
    assert "A random cohort trains the whole model" in rows["fedavg"]
    assert "McMahan et al. 2017, AISTATS" in rows["fedavg"]
    assert "Training without sharing: every device" in rows["local"]
    assert rows["local"].rstrip().endswith("–")


@pytest.mark.parametrize("name", NAMES)
def test_every_method_has_a_line_of_its_own(name: str) -> None:
    lines = {known: each.line for known, each in listing.known_methods().items()}
    assert len(lines[name]) > 10
    assert list(lines.values()).count(lines[name]) == 1


@pytest.mark.parametrize("name", NAMES)
def test_every_method_is_shown_with_knobs_and_parts(name: str) -> None:
    shown = succeeds("methods", name)
    assert f'use = "{name}"' in shown
    assert f"\n{getattr(methods, name)()}\n" in shown
    assert re.search(r"^  lr +float = [\d.]+$", shown, re.MULTILINE)
    assert re.search(r"^  epochs +int = \d+$", shown, re.MULTILINE)


def test_a_method_tells_its_words_and_defaults() -> None:
    shown = succeeds("methods", "fedprox")
    assert shown.startswith("FedProx: FedAvg with a pull to the received model")
    assert "Federated optimization in heterogeneous networks" in shown
    assert "\n  mu            float = 0.01\n" in shown
    assert "\n  seconds       float | None = None\n" in shown
    assert "\n  lr            float = 0.01\n" in shown
    assert "\n  decay         float = 1.0\n" in shown
    assert "\n  momentum      float = 0.0\n" in shown


def test_a_page_is_mentioned_if_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "PAGES", tmp_path)
    assert "docs/methods" not in succeeds("methods", "fedavg")
    (tmp_path / "docs/methods").mkdir(parents=True)
    (tmp_path / "docs/methods/fedavg.md").touch()
    assert "docs/methods/fedavg.md" in succeeds("methods", "fedavg")


def test_an_unknown_method_is_refused_with_its_neighbours() -> None:
    told = refused("methods", "hetrofl")
    assert "hetrofl: is not one of the methods (" in told
    assert 'did you mean "heterofl"' in told


def test_one_method_or_all_formulas() -> None:
    result = anyfleet_command("methods", "fedavg", "--formulas")
    assert result.exit_code == 2
    assert "leave NAME out" in result.stderr


# --- formulas -----------------------------------------------------------------------------------


def written_formulas() -> set[tuple[str, str]]:
    """Module and name of every formula, read off the source alone."""
    found = set()
    for file in (SOURCE / "formulas").rglob("*.py"):
        module = ".".join(["anyfleet", *file.relative_to(SOURCE).with_suffix("").parts])
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            text = ast.get_docstring(node) or "" if isinstance(node, ast.FunctionDef) else ""
            named = re.search(r"specification\b.*§(0|1|2|3|F)\b", text, re.DOTALL)
            if named and isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                found.add((module.removesuffix(".__init__"), node.name))
    return found


def test_every_formula_of_the_source_is_listed_and_can_be_imported() -> None:
    lines = succeeds("methods", "--formulas").splitlines()
    assert len(lines) % 2 == 0
    listed, order = set(), []
    for head, where in zip(lines[::2], lines[1::2], strict=True):
        sections, name = re.fullmatch(r"((?:§[\w.]+(?:, )?)+) +(\w+)\(.*", head).groups()  # type: ignore[union-attr]
        home, again = re.fullmatch(r" +from (\S+) import (\w+)", where).groups()  # type: ignore[union-attr]
        assert name == again
        function = getattr(importlib.import_module(home), name)
        listed.add((function.__module__, name))
        kind, *numbers = re.findall(r"\w+", sections.partition(",")[0])
        order.append((kind, [int(number) for number in numbers], name))
    assert listed == written_formulas()
    assert order == sorted(order)


def weigh(sizes: Floats | int, *, sharpness: float = 5.0) -> dict[str, Path]:
    """Something (specification §1.17, §F.2, §B, §10, §1.17)."""
    raise NotImplementedError


def test_a_formula_tells_its_sections_and_a_readable_signature(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = importlib.import_module(__name__)
    monkeypatch.setattr(listing, "_modules", lambda: iter([here]))
    (formula,) = listing.formulas()
    assert formula.sections == ("1.17", "F.2")
    assert (
        formula.signature == "(sizes: Floats | int, *, sharpness: float = 5.0) -> dict[str, Path]"
    )
    assert formula.order < listing.Formula(formula.function, ("1.18",)).order
    assert formula.order > listing.Formula(formula.function, ("1.2",)).order
    assert formula.order < listing.Formula(formula.function, ("F",)).order


# --- cite ---------------------------------------------------------------------------------------


def keys(shown: str) -> list[str]:
    entries = shown.removesuffix("\n").split("\n\n")
    assert all(re.fullmatch(r"@\w+\{[\w-]+,\n.*\n\}", each, re.DOTALL) for each in entries)
    return [re.findall(r"\{([\w-]+),", each)[0] for each in entries]


def test_a_method_is_cited_with_its_parts_and_anyfleet() -> None:
    shown = succeeds("cite", "fedprox")
    assert keys(shown) == ["li2020", "mcmahan2017", "anyfleet"]
    assert shown.startswith(papers.FEDPROX.bibtex() + "\n\n")


def test_a_reference_row_has_no_paper_of_its_own() -> None:
    assert keys(succeeds("cite", "local")) == ["mcmahan2017", "anyfleet"]


def test_several_things_are_cited_together_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.toml").write_text(RUN_FILE + '[method.schedule]\nuse = "Tiers"\n')
    experiment = Experiment(Embedded(devices=2), methods.fedprox())
    Path("runs/mine").mkdir(parents=True)
    Path("runs/mine/config.toml").write_text(describe(experiment))
    assert set(keys(succeeds("cite", "small.toml"))) == {
        "diao2021",
        "chai2021",
        "mcmahan2017",
        "anyfleet",
    }
    assert set(keys(succeeds("cite", "runs/mine"))) == {"li2020", "mcmahan2017", "anyfleet"}
    together = keys(succeeds("cite", "small.toml", "runs/mine", "heterofl"))
    assert sorted(together) == ["anyfleet", "chai2021", "diao2021", "li2020", "mcmahan2017"]
    assert together[-1] == "anyfleet"


def test_own_parts_may_bring_papers_when_they_are_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("parts_with_a_paper.py").write_text(
        "from dataclasses import dataclass\n"
        "from anyfleet.papers import Paper\n"
        "from anyfleet.parts.plan import WholeModel\n\n"
        "@dataclass(frozen=True)\n"
        "class Mine(WholeModel):\n"
        '    papers = (Paper("me2030", ("Doe, Jane",), "Mine", "Here", 2030),)\n'
    )
    part = '[method.plan]\nuse = "parts_with_a_paper:Mine"\n'
    Path("mine.toml").write_text(RUN_FILE + part)
    assert "--allow parts_with_a_paper" in refused("cite", "mine.toml")
    assert "me2030" in keys(succeeds("cite", "mine.toml", "--allow", "parts_with_a_paper"))


def test_a_run_is_cited_without_the_code_that_it_used(tmp_path: Path) -> None:
    mine = papers.Paper("me2030", ("Doe, Jane",), "Mine", "Here", 2030)
    (tmp_path / "config.toml").write_text(RUN_FILE + '[method.plan]\nuse = "gone:Mine"\n')
    assert "gone" in refused("cite", str(tmp_path), "--allow", "gone")
    (tmp_path / "papers.bib").write_text(papers.bibliography([mine, papers.FEDAVG]))
    assert keys(succeeds("cite", str(tmp_path))) == ["me2030", "mcmahan2017", "anyfleet"]
    assert keys(succeeds("cite", str(tmp_path), "fedavg")) == ["me2030", "mcmahan2017", "anyfleet"]
    # Nothing to cite is no entry, not an empty one.
    (tmp_path / "papers.bib").write_text(papers.bibliography(()))
    assert keys(succeeds("cite", str(tmp_path))) == ["anyfleet"]


def test_what_cannot_be_cited_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert 'did you mean "fedprox"' in refused("cite", "fedavg", "fedprx")
    assert "there.toml: cannot be read" in refused("cite", "there.toml")
    Path("several").mkdir()
    assert "has no config.toml; name the folder of a single run" in refused("cite", "several")
    Path("bad.toml").write_text(RUN_FILE + "seeed = 1\n")
    assert "seeed" in refused("cite", "bad.toml")


def test_anyfleet_is_cited_as_it_asks_for() -> None:
    facts = (ROOT / "CITATION.cff").read_text()
    assert f'\ntitle: "{ANYFLEET.title}"\n' in facts
    assert [f'  - name: "{author}"' for author in ANYFLEET.authors] == re.findall(
        r"^  - name: .*", facts, re.MULTILINE
    )
    assert anyfleet.__version__ in ANYFLEET.venue
