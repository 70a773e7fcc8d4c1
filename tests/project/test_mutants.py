"""The list of known mistakes does not rot, and who judges them is honest."""

import ast
from collections import Counter
from functools import cache, lru_cache
from pathlib import Path

import pytest
from tools.mutants import BROKEN, MISPLACED, RED, ROOT, SURVIVED, Fault, judge, main, read

FAULTS = read()


def test_there_are_many_and_each_has_a_name_of_its_own() -> None:
    assert len(FAULTS) >= 35
    assert max(Counter(fault.name for fault in FAULTS).values()) == 1
    assert max(Counter((fault.file, fault.edits) for fault in FAULTS).values()) == 1


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_has_its_place_and_its_tests(fault: Fault) -> None:
    text = (ROOT / fault.file).read_text(encoding="utf-8")
    assert differ(statements(text), statements(fault.planted(text)))
    for test in fault.tests:
        file, _, name = test.partition("::")
        assert not name or name.partition("[")[0] in functions(file), f"{file} has no {name}"


@lru_cache(maxsize=4)
def statements(text: str) -> list[tuple[str, ast.stmt]]:
    """The statements at the top of a program, each with its text, decorators and comments too."""
    lines, body = text.splitlines(), ast.parse(text).body
    cuts = [0, *(each.end_lineno for each in body)]
    return [("\n".join(lines[a:b]), each) for a, b, each in zip(cuts, cuts[1:], body, strict=False)]


def differ(one: list[tuple[str, ast.stmt]], two: list[tuple[str, ast.stmt]]) -> bool:
    """Whether two programs mean different things; equal texts are not compared any further."""
    pairs = zip(one, two, strict=True) if len(one) == len(two) else ()
    return len(one) != len(two) or any(
        ast.dump(a) != ast.dump(b) for (left, a), (right, b) in pairs if left != right
    )


def test_a_program_differs_by_what_it_means() -> None:
    text = "import os\n\n\n@cache\ndef double(number):\n    return 2 * number  # twice\n"
    assert not differ(statements(text), statements(text.replace("# twice", "# two times")))
    assert not differ(statements(text), statements(f"# a head\n{text}# an end\n"))
    for old, new in (("2 *", "3 *"), ("cache", "memo"), ("os", "re"), ("@", "print()\n@")):
        assert differ(statements(text), statements(text.replace(old, new)))


@cache
def functions(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


# --- who judges, on a project of two files ----------------------------------------------------

CODE = """
def double(number: int) -> int:
    return 2 * number  # twice
"""
TESTS = """
from half import double

def test_double() -> None:
    assert double(3) == 6

def test_nothing() -> None:
    assert double
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in (("src/half.py", CODE), ("tests/test_half.py", TESTS)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def fault(old: str, new: str, test: str = "test_double", name: str = "fault") -> Fault:
    return Fault(name, "src/half.py", ((old, new),), (f"tests/test_half.py::{test}",))


MISTAKES = [
    (fault("2 * number", "3 * number"), RED),
    (fault("# twice", "# two times"), SURVIVED),
    (fault("2 * number", "3 * number", "test_nothing"), SURVIVED),
    (fault("2 * number", "2 * (number"), BROKEN),  # is not Python: no test has noticed anything
    (fault("number", "figure"), MISPLACED),
    (fault("nowhere", "here"), MISPLACED),
]


def test_what_survives_is_told(project: Path) -> None:
    before = (project / "src/half.py").read_bytes()
    verdicts = list(judge([mistake for mistake, _ in MISTAKES], project, jobs=1))
    assert [verdict.result for verdict in verdicts] == [result for _, result in MISTAKES]
    assert (project / "src/half.py").read_bytes() == before


def test_tests_that_are_red_anyway_prove_nothing(project: Path) -> None:
    (project / "src/half.py").write_text(CODE.replace("2 *", "4 *"))
    (verdict,) = judge([fault("4 * number", "3 * number")], project, jobs=1)
    assert verdict.result == BROKEN
    assert "test_double" in verdict.said


def test_the_table_is_printed_and_the_exit_code_tells(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = [
        fault("2 * number", "3 * number", name="three times"),
        fault("# twice", "# two times", name="a comment"),
    ]
    assert main(["three"], faults, project) == 0
    assert "1 of 1 faults turned a test red" in capsys.readouterr().out
    assert main([], faults, project) == 1
    shown = capsys.readouterr().out
    assert "SURVIVED: a comment" in shown
    assert "1 of 2 faults" in shown
    assert main(["unheard of"], faults, project) == 1
