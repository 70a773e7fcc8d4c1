"""Examples and recipes: what we show to people works."""

import doctest
import re
import runpy
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import anyfleet
from anyfleet import config
from anyfleet.cli.app import app
from anyfleet.evidence.library import Library
from anyfleet.experiment import Experiment, build, load, play, populate
from anyfleet.methods import fedavg
from anyfleet.names import public_names
from anyfleet.parts.aggregate import Mean
from anyfleet.parts.plan import WidthByLevel
from anyfleet.parts.select import Uniform
from anyfleet.store import describe, read_rounds
from anyfleet.tasks import Embedded
from anyfleet.world import levels
from tests.helpers import small
from tests.helpers.vectors import PLACE, step, vectors

ROOT = Path(__file__).resolve().parents[2]
ITEMS = {ROOT / "recipes" / f"{name}.toml" for name in Library(ROOT).names()}  # tests/evidence
RECIPES = sorted(set((ROOT / "recipes").rglob("*.toml")) - ITEMS)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which commands run in this process: another would import everything first."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def anyfleet_command(*words: str) -> str:
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, f"{done.output}\n{done.exception!r}"
    return done.output


def test_own_model_is_short_and_learns(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example = ROOT / "examples/own_model.py"
    assert len(example.read_text().splitlines()) <= 20
    with torch.random.fork_rng():
        runpy.run_path(str(example), run_name="__main__")
    shown = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in shown] == ["ring", "half"]
    assert all(float(line.split()[2]) > 0.8 for line in shown)
    ring, half = (load_file(here / f"{name}.safetensors") for name in ("ring", "half"))
    assert ring["0.weight"].equal(half["0.weight"]), "the frozen layer moved"
    assert not ring["2.weight"].equal(half["2.weight"])


def test_a_run_file_names_a_part_that_lies_beside_it(here: Path) -> None:
    file = ROOT / "examples/own_part/run.toml"
    quick = ["rounds=1", "task.limit=300", "task.server=0", "--out", "run"]
    command = f"# anyfleet run {file.relative_to(ROOT)} --allow own_selection"
    assert file.read_text().splitlines()[0] == command
    anyfleet_command("run", str(file), *quick, "--allow", "own_selection")
    assert len(read_rounds(here / "run")) == 1
    written = (here / "run/config.toml").read_text()
    assert 'use = "own_selection:Fastest"' in written
    assert 'packages = ["own_selection"]' in written


def test_a_method_of_ones_own_is_short_and_runs_from_its_file(here: Path) -> None:
    assert len((ROOT / "examples/own_method.py").read_text().splitlines()) <= 40
    file = ROOT / "examples/own_method.toml"
    command = "# anyfleet run examples/own_method.toml --allow own_method"
    assert file.read_text().splitlines()[0] == command
    quick = ["rounds=2", "task.limit=300", "task.server=0", "--out", "run"]
    anyfleet_command("run", str(file), *quick, "--allow", "own_method")
    assert len(read_rounds(here / "run")) == 2
    assert 'use = "own_method:Median"' in (here / "run/config.toml").read_text()
    assert "diao2021" in anyfleet_command("cite", "run")


def test_data_and_hardware_of_one_owner_go_together(here: Path) -> None:
    file = ROOT / "examples/bound/run.toml"
    command = "# anyfleet run examples/bound/run.toml --allow walks"
    assert file.read_text().splitlines()[0] == command
    words = ("run", str(file), "--allow", "walks", "rounds=1", "--out", "run")
    anyfleet_command(*words)
    (point,) = read_rounds(here / "run")
    assert point.details[0].groups.keys() == {"watch", "phone"}


def test_the_median_of_ones_own_method_does_what_it_says() -> None:
    method = load(ROOT / "examples/own_method.toml", allow=["own_method"]).method
    task, fleet = small.task(norm=False), levels(speeds=(1e9, 1e8))
    alone = replace(method, select=Uniform(1))
    plain = replace(alone, aggregate=Mean("equal"))
    one, two = (small.steps(each, task, 2, fleet=fleet)[-1].params for each in (alone, plain))
    assert small.distance(one, two) < 1e-6  # the median of one is its mean
    three = vectors([(1.0, 5.0), (2.0, 4.0), (9e9, 6.0)])
    assert step(method.aggregate, three).model[PLACE].tolist() == [2.0, 5.0]
    half = replace(method, plan=WidthByLevel((0.5,)))
    last = small.steps(half, task, 1)[0].params["0.weight"]
    assert torch.equal(last[3:], task.params["0.weight"][3:])  # nobody trained these
    assert not torch.equal(last[:3], task.params["0.weight"][:3])


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: "/".join(file.parts[-2:]))
def test_a_recipe_starts_with_its_command_and_runs(file: Path, tmp_path: Path) -> None:
    assert file.read_text().splitlines()[0] == f"# anyfleet run {file.relative_to(ROOT)}"
    full = load(file)
    table = "task.inner" if "[task.inner]" in file.read_text() else "task"
    small = load(file, ["rounds=1", f"{table}.limit=300", f"{table}.server=20"])
    (result,) = play(small)
    assert result.record.accuracy >= 0
    (tmp_path / "config.toml").write_text(describe(full))
    assert config.read(tmp_path / "config.toml").load(Experiment) == full


def readme_programs() -> list[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("program", readme_programs(), ids=lambda text: text.splitlines()[-1])
def test_a_program_of_the_readme_works(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = program.replace("rounds=3", "rounds=1").replace("Embedded(", "Embedded(limit=900, ")
    file = tmp_path / "program.py"
    file.write_text(quick)
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(file), run_name="__main__")


def toml_blocks() -> list[tuple[str, str]]:
    """The TOML of the pages, by page."""
    pages = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    return [
        (str(page.relative_to(ROOT)), block)
        for page in pages
        for block in re.findall(
            r"^```toml\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
        )
    ]


def complete_run_files() -> list[tuple[str, str]]:
    """Run files that need nothing else; that of docs/deploy.md has a module of its own beside it.

    `tools.run_deploy_page` plays that one.
    """
    own = [each for each in toml_blocks() if each[0] != "docs/deploy.md"]
    return [each for each in own if {"task", "method"} <= tomllib.loads(each[1]).keys()]


@pytest.mark.parametrize(("page", "text"), complete_run_files(), ids=lambda each: each[:40])
def test_a_run_file_of_a_page_works(page: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(text)
    changes = [] if page.startswith("docs/methods/") else ["rounds=1", "task.limit=600"]
    experiment = load(tmp_path / "run.toml", changes)
    if changes:  # those of the methods run with the tests of their pages
        (result,) = play(experiment)
        assert result.record.replies > 0


def test_pages_have_run_files_and_pieces_of_them_that_work(tmp_path: Path) -> None:
    pages = {page for page, _ in complete_run_files()}
    assert "docs/run_files.md" in pages
    assert len(pages) > len(public_names("anyfleet.methods")) / 2
    (tmp_path / "run.toml").write_text('[task]\nuse = "Embedded"\n[method]\nuse = "fedavg"\n')
    limits = [text for _, text in toml_blocks() if tomllib.loads(text).keys() == {"limits"}]
    assert limits
    for piece in limits:
        whole = (tmp_path / "run.toml").read_text() + piece
        (tmp_path / "limits.toml").write_text(whole)
        assert load(tmp_path / "limits.toml").limits.norm == 100.0
    ((_, uplink),) = (each for each in toml_blocks() if each[0] == "docs/codecs.md")
    (tmp_path / "bytes.toml").write_text('[task]\nuse = "Embedded"\n' + uplink)
    (result,) = play(load(tmp_path / "bytes.toml", ["rounds=1", "task.limit=600"]))
    assert result.record.up < result.record.down / 50


def test_the_fleets_of_the_page_about_fleets_work(tmp_path: Path) -> None:
    text = (ROOT / "docs/fleets.md").read_text(encoding="utf-8")
    named, table, groups = re.findall(r"^```toml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (rows,) = re.findall(r"^```text\n(owner,.*?)^```", text, re.MULTILINE | re.DOTALL)
    task = '[task]\nuse = "Embedded"\ndevices = 10\nlimit = 200\nserver = 0\n'
    rest = f'{task}[method]\nuse = "fedavg"\n'
    (tmp_path / "named.toml").write_text(rest + named)
    experiment = load(tmp_path / "named.toml")
    world = populate(experiment, build(experiment))
    assert (world.group == 0).nonzero()[0].tolist() == [0, 3, 7]
    (tmp_path / "fleet.csv").write_text(rows)
    for number, fleet in enumerate((table, table + groups)):
        (tmp_path / f"{number}.toml").write_text(rest + fleet)
        assert load(tmp_path / f"{number}.toml").fleet.size == 2


def test_the_codec_of_the_page_about_codecs_works(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "codecs.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "one_bit.py").write_text("\n".join(blocks))
    found = runpy.run_path(str(tmp_path / "one_bit.py"))
    assert {name: value.shape for name, value in found["tried"].restored.items()} == {
        "w": (3, 4),
        "b": (3,),
    }
    codec = found["OneBit"]()
    method = replace(fedavg(count=3, lr=0.05), uplink=codec)
    (result,) = play(Experiment(Embedded(devices=4, limit=600), method, rounds=1))
    assert result.record.replies == 3
    assert 0 < result.record.up < result.record.down / 4


def test_the_docstring_of_the_package_works() -> None:
    failed, tried = doctest.testmod(anyfleet)
    assert tried
    assert not failed


def test_there_is_a_recipe_for_every_method() -> None:
    names = {file.stem for file in RECIPES}
    assert set(public_names("anyfleet.methods")) <= names
    assert {"asynchronous", "deadline"} <= names
