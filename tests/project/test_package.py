"""The package as a whole: its wheel, its layers, its public names, its papers."""

import ast
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

import anyfleet
from anyfleet.cli.app import app

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
    ("analysis experiment hardware store",),
    ("methods",),
    ("parts", "world runtime wire", "tasks"),
    ("measure",),
    ("core",),
    ("elastic rng names errors config arrays formulas papers arguments tracebacks",),
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


# --- papers -----------------------------------------------------------------------------------


def test_the_version_is_the_same_everywhere() -> None:
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {anyfleet.__version__}\n" in citation
    assert f"\n## {anyfleet.__version__} " in (ROOT / "CHANGELOG.md").read_text()


def test_every_dependency_is_pinned_for_make() -> None:
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.partition("==")[0].lower() for line in pins if "==" in line}
    assert all("==" in line for line in pins if line and not line.startswith("#"))
    extras = [each for extra in PROJECT["optional-dependencies"].values() for each in extra]
    declared = {
        re.split(r"[<>=~!\[; ]", each)[0].lower() for each in PROJECT["dependencies"] + extras
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
    shell([*pip, "install", "-q", "--no-deps", "--no-index", wheel], folder.parent)
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
QUICK = {"demo": ("--rounds", "1"), "run": FEW, "compare": FEW}


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
    else:
        assert program == "anyfleet", f"the test does not know how to check {program}"
        # Here and not in a process of its own, whose imports would take longer than all the rest.
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", [*sys.path])
        done = CliRunner().invoke(app, [*words, *QUICK.get(words[0], ())])
        assert done.exit_code == 0, f"{command}\n{done.output}\n{done.exception!r}"
