"""The package as a whole: its wheel, its layers, its public names, its papers."""

import ast
import importlib
import os
import pydoc
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import get_args, get_type_hints

import pytest
from typer.testing import CliRunner

import anyfleet
from anyfleet import parts
from anyfleet.cli.app import app
from anyfleet.core.method import SLOTS
from tests.helpers.commands import unknown_in

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "anyfleet"
FILES = sorted(SOURCE.rglob("*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def module_of(file: Path) -> str:
    parts = file.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = [module_of(file) for file in FILES]

# --- layers -----------------------------------------------------------------------------------

# From the top; docs/architecture.md, section 1. A layer is made of rooms. A module may import from
# its own room and from every layer below, not from the other rooms of its layer.
LAYERS = (
    ("cli",),
    ("evidence",),
    ("study", "deployment"),
    ("device",),
    ("analysis experiment hardware store together",),
    ("methods",),
    ("parts", "world runtime wire", "tasks"),
    ("measure",),
    ("core",),
    ("elastic rng names errors config arrays formulas papers arguments tracebacks cache stopping",),
)
ROOMS = {
    name: (depth, room)
    for depth, layer in enumerate(LAYERS)
    for room, names in enumerate(layer)
    for name in names.split()
}
# A runtime turns messages into bytes, so it knows the codec that changes nothing.
EXCEPTIONS = {("runtime", "parts"), ("wire", "parts")}
UNSAFE = {"pickle", "shelve", "marshal", "random"}  # code in data; numbers without an address


def imports(file: Path) -> Iterator[str]:
    """Every module that a file imports, whether at its top, in a function or for types only."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file.name}:{node.lineno} imports relatively"
            names = (alias.name for alias in node.names)
            yield from (
                (f"anyfleet.{name}" for name in names)
                if node.module == "anyfleet"
                else (str(node.module),)
            )


def may_import(importer: str, imported: str) -> bool:
    depth, room = ROOMS[importer]
    other_depth, other_room = ROOMS[imported]
    same_room = (other_depth, other_room) == (depth, room)
    return other_depth > depth or same_room or (importer, imported) in EXCEPTIONS


def test_every_module_has_a_layer() -> None:
    assert {name.split(".")[1] for name in MODULES if "." in name} <= set(ROOMS)


@pytest.mark.parametrize("file", FILES, ids=module_of)
def test_imports_go_downward(file: Path) -> None:
    names = set(imports(file))
    assert not {name.partition(".")[0] for name in names} & UNSAFE
    if file.parent == SOURCE and file.name == "__init__.py":
        return  # the package's front door shows names from every layer
    own = {name for name in names if name.startswith("anyfleet.") and name.split(".")[1] in ROOMS}
    upward = [
        name for name in own if not may_import(module_of(file).split(".")[1], name.split(".")[1])
    ]
    assert not upward


def test_the_layer_test_can_fail() -> None:
    assert may_import("methods", "parts")
    assert not may_import("parts", "world")
    assert not may_import("elastic", "core")


# --- the inside of the core, and cycles -----------------------------------------------------------

# The modules of `core`, from the lowest to the highest: each may import only those before it, also
# for types only. Whoever adds a module gives it a place.
CORE = tuple(
    name
    for line in (
        # values, and what an author sees
        "messages limits objectives once_per_task index_sets layout arriving stacks ordered_stacks",
        "updates training_work time_and_energy plans signals padding check_in view slots",
        # methods and their orders
        "return_checks codec_calls local_training evaluation method orders calibration",
        "message_size device_state events device_tables device_states",
        # the device
        "residuals reports choosing delivery client",
        # the server
        "screening replies ledger planning seam server loop",
    )
    for name in line.split()
)
Graph = Mapping[str, Collection[str]]


def imported(source: str, modules: Collection[str]) -> set[str]:
    """The modules that a text imports; `from package import name` may name one of them."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in modules else str(node.module))
    return found & set(modules)


@cache
def import_graph() -> Mapping[str, Collection[str]]:
    """By module: the modules of this package that it imports.

    Without the front door, which shows names from every layer and imports none before it is used.
    """
    known = set(MODULES) - {"anyfleet"}
    texts = {module_of(file): file.read_text(encoding="utf-8") for file in FILES}
    return {name: imported(texts[name], known) - {name} for name in known}


def upward(graph: Graph, order: Sequence[str]) -> list[str]:
    """Imports of modules that do not come before the importer, as "importer imports module"."""
    rank = {name: place for place, name in enumerate(order)}
    return [
        f"{name} imports {other}"
        for name in order
        for other in sorted(graph[name])
        if rank.get(other, -1) >= rank[name]
    ]


def cyclic(graph: Graph) -> list[str]:
    """The modules that lie on a cycle, or between two: what is left when ends are taken away."""
    left = {name: set(others) for name, others in graph.items()}
    while left:
        inner = set().union(*left.values())
        ends = {name for name, others in left.items() if not others or name not in inner}
        if not ends:
            break
        left = {name: others - ends for name, others in left.items() if name not in ends}
    return sorted(left)


def test_the_core_imports_only_downward_within_itself() -> None:
    names = [f"anyfleet.core.{name}" for name in CORE]
    there = [name for name in MODULES if name.startswith("anyfleet.core.")]
    assert sorted(names) == sorted(there), "give every module of core its place in CORE"
    assert not upward(import_graph(), names)


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert not cyclic(import_graph())


def test_the_tests_of_order_and_of_cycles_can_fail() -> None:
    known = ["a", "a.b", "a.c", "d"]
    text = """
        from typing import TYPE_CHECKING
        if TYPE_CHECKING:
            from a import b
        def late():
            from a.c import name
            import os, d
    """
    assert imported(textwrap.dedent(text), known) == {"a.b", "a.c", "d"}
    assert imported("from a import name", known) == {"a"}
    low, high = {"a": (), "b": ("a",)}, {"a": ("b",), "b": ()}
    assert upward(low, ["a", "b"]) == []
    assert upward(high, ["a", "b"]) == ["a imports b"]
    assert upward({"a": ("a",)}, ["a"]) == ["a imports a"]
    assert cyclic(low) == cyclic(high) == []
    circle = {"a": ("b",), "b": ("c",), "c": ("a", "d"), "d": (), "e": ("a",)}
    assert cyclic(circle) == ["a", "b", "c"]
    assert cyclic({**circle, "c": ("d",)}) == []
    assert "anyfleet.core.server" in import_graph()["anyfleet.core.loop"]


# --- public names -----------------------------------------------------------------------------


def alphabet(name: str) -> tuple[int, list[str | int]]:
    """The order that ruff keeps: CONSTANTS, Classes, functions; numbers by their size."""
    rank = 0 if name.isupper() and len(name) > 1 else 1 if name[0].isupper() else 2
    return rank, [int(piece) if piece.isdecimal() else piece for piece in re.split(r"(\d+)", name)]


@pytest.mark.parametrize("name", [module_of(f) for f in FILES if f.name == "__init__.py"])
def test_a_package_shows_its_public_names_sorted(name: str) -> None:
    package = importlib.import_module(name)
    shown = list(package.__all__)
    assert shown == sorted(set(shown), key=alphabet)
    assert all(getattr(package, each, None) is not None for each in shown)
    visible = {
        each
        for each, value in vars(package).items()
        if not each.startswith("_") and not isinstance(value, ModuleType)
    }
    modules = {each for each in shown if isinstance(getattr(package, each), ModuleType)}
    assert visible == {each for each in shown if not each.startswith("_")} - modules


# --- the front door ---------------------------------------------------------------------------

# Modules for authors of the package itself; every other module and package at the top is public.
INTERNAL = {"arguments", "arrays", "cache", "stopping", "tracebacks"}
HEAVY = ("torch", "numpy", "matplotlib")


def test_the_front_door_shows_every_package() -> None:
    at_top = {name.split(".")[1] for name in MODULES if "." in name}
    assert at_top - INTERNAL == {each for each in anyfleet.__all__ if each in at_top}
    assert set(anyfleet.__all__) <= set(dir(anyfleet))
    assert len([file for file in SOURCE.glob("*.py") if file.name != "__init__.py"]) <= 10


def in_a_new_process(program: str) -> str:
    """What a program prints that begins with a plain `import anyfleet`."""
    source = {"PYTHONPATH": str(SOURCE.parent), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-c", f"import sys, anyfleet\n{program}"]
    done = subprocess.run(
        words, capture_output=True, text=True, env=os.environ | source, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


LIGHT = f"print([name for name in {HEAVY} if name in sys.modules])"


VERSION = """
from anyfleet.cli import main
sys.argv = ["anyfleet", "--version"]
try:
    main()
except SystemExit:
    pass
"""


def test_what_must_be_instant_imports_nothing_heavy() -> None:
    steps = "dir(anyfleet)", VERSION, "anyfleet.parts"
    optional = "print([name for name in ('constriction', 'flwr') if name in sys.modules])"
    program = "\n".join(f"{step}\n{LIGHT}" for step in steps)
    told = in_a_new_process(f"{program}\n{optional}").splitlines()
    assert [told[0], told[2]] == ["[]", "[]"]
    assert "'torch'" in told[3]  # the test can fail
    assert told[4] == "[]"  # some machines do not have these


def test_after_a_plain_import_everything_is_an_attribute() -> None:
    program = """
import rlcompleter
assert anyfleet.parts.aggregate.Mean().weights == "samples"
assert anyfleet.core.updates.Updates and anyfleet.elastic.trace
shell = rlcompleter.Completer({"anyfleet": anyfleet})
for text in ("par", "parts.aggr", "parts.aggregate.Me", "core.u"):
    print(shell.complete(f"anyfleet.{text}", 0))
"""
    assert in_a_new_process(program).splitlines() == [
        "anyfleet.parts",
        "anyfleet.parts.aggregate",
        "anyfleet.parts.aggregate.Mean(",
        "anyfleet.core.updates",
    ]


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'anyfleet' has no attribute 'part'"):
        anyfleet.part  # noqa: B018 - that is the test
    with pytest.raises(AttributeError, match=r"'anyfleet\.core' has no attribute 'part'"):
        anyfleet.core.part  # noqa: B018


def test_help_shows_the_front_door() -> None:
    shown = pydoc.plain(pydoc.render_doc(anyfleet))
    assert "class Experiment" in shown
    assert "play(experiment" in shown
    assert all(f"    {each} (package)" in shown for each in ("parts", "methods", "tasks", "world"))


# --- what authors of parts import -------------------------------------------------------------


def mentioned(kind: object) -> Iterator[type]:
    """The classes of this package in an annotation."""
    if isinstance(kind, type) and kind.__module__.startswith("anyfleet."):
        yield kind
    for each in get_args(kind):
        yield from mentioned(each)


def signatures(slot: type) -> Iterator[type]:
    """The classes of this package in the signatures of a slot, its inherited ones too."""
    for base in slot.__mro__:
        if not base.__module__.startswith("anyfleet.core"):
            continue
        for member in vars(base).values():
            function = member.fget if isinstance(member, property) else member
            if isinstance(function, FunctionType):
                for kind in get_type_hints(function).values():
                    yield from mentioned(kind)


def test_authors_import_from_one_package() -> None:
    shown = {name: getattr(parts, name) for name in parts.__all__}
    for slot in SLOTS.values():
        assert slot in shown.values(), slot
        missing = {kind for kind in signatures(slot) if kind not in shown.values()}
        assert not missing, f"anyfleet.parts lacks {missing}, which {slot.__name__} mentions"
    for folder in (SOURCE / "parts").iterdir():
        if (folder / "__init__.py").is_file():
            package = importlib.import_module(f"anyfleet.parts.{folder.name}")
            assert shown[folder.name] is package
            lost = [n for n in package.__all__ if shown.get(n) is not getattr(package, n)]
            assert not lost, f"anyfleet.parts does not show {lost} of {package.__name__}"


# --- papers -----------------------------------------------------------------------------------


def test_the_version_is_the_same_everywhere() -> None:
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {anyfleet.__version__}\n" in citation
    assert f"\n## {anyfleet.__version__} " in (ROOT / "CHANGELOG.md").read_text()


def test_every_dependency_is_pinned_for_make() -> None:
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in pins if "==" in line}
    assert all("==" in line for line in pins if line and not line.startswith("#"))
    extras = [each for extra in PROJECT["optional-dependencies"].values() for each in extra]
    declared = {
        re.split(r"[<>=~!\[; ]", each)[0].lower().replace("_", "-")
        for each in PROJECT["dependencies"] + extras
    }
    assert declared <= pinned


# --- the wheel --------------------------------------------------------------------------------


def shell(command: Sequence[str | Path], folder: Path) -> str:
    """Run a command that must succeed, away from this source tree, and return what it printed."""
    outside = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "COV_"))}
    done = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env=outside,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{shlex.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build_wheel(folder: Path) -> Path:
    """Build from a copy, so that nothing stale gets in and nothing is left behind."""
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, folder)
    unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", folder / "src", ignore=unwanted)
    shell([sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", "dist", "."], folder)
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


def clean_environment(folder: Path, wheel: Path) -> Path:
    """A new environment with the wheel; only its dependencies are borrowed from this one."""
    shell([sys.executable, "-m", "venv", "--without-pip", folder], folder.parent)
    python = folder / "bin" / "python"
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", python]
    shell([*pip, "install", "-q", "--no-compile", "--no-deps", "--no-index", wheel], folder.parent)
    (packages,) = folder.glob("lib/python3*/site-packages")
    # A path that a .pth file adds gets no .pth processing itself: the editable anyfleet stays out.
    (packages / "borrowed.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return python


def test_the_wheel_runs_in_a_clean_environment(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    python = clean_environment(tmp_path / "env", build_wheel(tmp_path / "tree"))
    question = "import anyfleet; print(anyfleet.__file__); print(anyfleet.__version__)"
    where, version = shell([python, "-c", question], tmp_path).split()
    package = Path(where).parent
    assert package.is_relative_to(tmp_path / "env")
    assert version == anyfleet.__version__
    missing = [
        file.relative_to(SOURCE)
        for file in SOURCE.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
        if not (package / file.relative_to(SOURCE)).is_file()
    ]
    assert not missing
    command = python.with_name("anyfleet")
    assert anyfleet.__version__ in shell([command, "--version"], tmp_path)
    assert "HeteroFL" in shell([command, "demo", *QUICK["demo"]], tmp_path)


# --- the commands of the README ---------------------------------------------------------------

# What makes a command of the README quick; the rest of it runs as written.
FEW = ("rounds=1", "task.limit=600", "task.server=20")
HERE = ("--jobs", "1")
QUICK = {
    "demo": ("--rounds", "1", *HERE),
    "run": FEW,
    "compare": (*FEW, *HERE),
    "sweep": (*FEW, *HERE),
}


def readme_commands() -> list[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(?:console|bash|sh)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    commands = [line.removeprefix("$ ").partition(" #")[0].strip() for line in lines]
    return [command for command in commands if command and not command.startswith("#")]


def test_the_readme_starts_with_the_two_commands() -> None:
    assert readme_commands()[:2] == ["make demo", "make test"]


@pytest.mark.parametrize("command", readme_commands())
def test_a_command_of_the_readme_works(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, *words = shlex.split(command)
    for folder in ("examples", "recipes"):
        if (ROOT / folder).is_dir():
            shutil.copytree(ROOT / folder, tmp_path / folder)
    if program == "make":
        makefile = (ROOT / "Makefile").read_text()
        assert all(re.search(rf"^{word}:", makefile, re.MULTILINE) for word in words)
    elif program == "pip":
        extras = re.findall(r"\[([\w,]+)\]", command)
        named = {extra for group in extras for extra in group.split(",")}
        assert named <= PROJECT["optional-dependencies"].keys()
    elif program in ("python", "python3"):
        shell([sys.executable, *words], tmp_path)
    elif words[:2] == ["fleet", "practise"]:  # tests/deployment has a real fleet
        assert not unknown_in(command)
    else:
        assert program == "anyfleet", f"the test does not know how to check {program}"
        # Here and not in a process of its own, whose imports would take longer than all the rest.
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", [*sys.path])
        done = CliRunner().invoke(app, [*words, *QUICK.get(words[0], ())])
        assert done.exit_code == 0, f"{command}\n{done.output}\n{done.exception!r}"
