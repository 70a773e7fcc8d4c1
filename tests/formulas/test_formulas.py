"""The formulas: each names its section, none draws, reads or uses tensors; who calls which."""

import ast
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

from anyfleet import formulas
from anyfleet.formulas import reference

FOLDER = Path(formulas.__file__).parent
SOURCE = FOLDER.parent
FILES = sorted(FOLDER.rglob("*.py"))
FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: value
    for module in (formulas, reference)
    for name, value in vars(module).items()
    if name in module.__all__ and isinstance(value, FunctionType)
}
SECTION = re.compile(r"specification §([0-9A-Z]+(?:\.[0-9]+)?)")
FOREIGN = {"torch", "random", "os", "io", "pathlib"}


def sections(function: Callable[..., Any]) -> list[str]:
    return SECTION.findall(inspect.getdoc(function) or "")


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_a_formula_names_its_one_section(name: str) -> None:
    assert len(sections(FUNCTIONS[name])) == 1


def test_every_section_with_a_formula_is_there() -> None:
    found = {section for function in FUNCTIONS.values() for section in sections(function)}
    wanted = {f"1.{number}" for number in range(1, 21)} | {f"F.{number}" for number in range(1, 8)}
    assert found == wanted | {"0.1", "0.2", "2", "3"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_formulas_are_numpy_alone(file: Path) -> None:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    modules = [n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module]
    names = [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
    assert not {each.partition(".")[0] for each in (*modules, *names)} & FOREIGN
    own = {each for each in modules if each.startswith("anyfleet")}
    assert all(each == "anyfleet.arrays" or each.startswith("anyfleet.formulas") for each in own)
    assert "np.random" not in file.read_text(encoding="utf-8")


@pytest.mark.parametrize("package", [formulas, reference], ids=["formulas", "reference"])
def test_every_public_name_of_a_module_is_shown(package: ModuleType) -> None:
    named: set[str] = set()
    for file in Path(str(package.__file__)).parent.glob("*.py"):
        body = ast.parse(file.read_text(encoding="utf-8")).body
        named |= {n.name for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    assert {name for name in named if not name.startswith("_")} == set(package.__all__)


def called() -> set[str]:
    """Names that the rest of the source imports from the formulas, with those that they use."""
    found: set[str] = set()
    uses: dict[str, set[str]] = {}
    for file in SOURCE.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        if FOLDER not in file.parents and "anyfleet.formulas" not in text:
            continue  # most files, and parsing takes longer than all the rest
        tree = ast.parse(text)
        if FOLDER not in file.parents:
            imports = (n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom))
            own = (n for n in imports if (n.module or "").startswith("anyfleet.formulas"))
            found |= {alias.name for node in own for alias in node.names}
            continue
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                uses[node.name] = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    while more := {name for each in found for name in uses.get(each, ())} - found:
        found |= more
    return found


def test_parts_call_every_formula_and_none_of_the_reference() -> None:
    assert set(formulas.__all__) - called() == set()
    assert set(reference.__all__) & called() == set()
