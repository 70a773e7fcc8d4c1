"""Docstrings can be understood alone: a function's opens with a verb, nothing leads nowhere."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "src").rglob("*.py"))

# Imperatives that open the docstrings of functions. A new one may join; "Whether", "What" and
# "Returns" may not.
VERBS = set(
    """
    Add Aggregate Append Ask Begin Build Call Cancel Check Close Compare Complete Compute Copy
    Count Cut Divide Do Draw Drop End Enter Find Fix Forget Freeze Give Go Hash Hold Import Insert
    Issue Judge Keep Let List Look Make Mark Match Measure Move Name Normalise Note Notice Open
    Pass Plan Play Pool Practise Print Pull Push Put Raise Read Record Reduce Refuse Release
    Remove Reorder Replace Resume Return Revoke Run Save Say Send Serve Set Show Silence Spread
    Start Take Tell Trace Train Turn Visit Wait Watch Write Yield
    """.split()  # noqa: SIM905 - a word a line would be a long page
)


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    """Yield every function that is no property: a property is named by the noun it is."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            marks = {ast.unparse(mark).rpartition(".")[2] for mark in node.decorator_list}
            if not marks & {"property", "cached_property", "callback"}:
                yield node


def openings() -> Iterator[tuple[str, str]]:
    """Yield the place of every function's docstring, and its first word."""
    for file in FILES:
        for node in functions(ast.parse(file.read_text(encoding="utf-8"))):
            text = ast.get_docstring(node)
            if text:
                word = re.match(r"\W*(\w+)", text)
                place = f"{file.relative_to(ROOT)}:{node.lineno} {node.name}"
                yield place, word.group(1) if word else text[:20]


def test_docstrings_of_functions_open_with_a_verb() -> None:
    wrong = [f"{place}: {word}" for place, word in openings() if word not in VERBS]
    assert wrong == []


def test_the_list_of_verbs_is_used_up() -> None:
    assert {word for _, word in openings()} == VERBS


def test_pages_that_errors_and_docstrings_name_exist() -> None:
    missing = [
        f"{file.relative_to(ROOT)}: {page}"
        for file in FILES
        for page in re.findall(r"\bdocs/[\w/]+\.md\b", file.read_text(encoding="utf-8"))
        if not (ROOT / page).exists()
    ]
    assert missing == []
