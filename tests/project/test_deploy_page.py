"""docs/deploy.md: its commands exist and its files are whole; `make deploy-page` runs it."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tools.run_deploy_page import ADDRESS, METRICS, PAGE, Block, Machine, _run, blocks, commands

from tests.helpers.commands import unknown_in

yaml: Any = pytest.importorskip("yaml")
ROOT = Path(__file__).resolve().parents[2]
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = list(blocks(TEXT))
EXAMPLE = ROOT / "examples" / "real_fleet"


def test_every_block_says_where_it_belongs() -> None:
    kinds = re.findall(r"^```(\w+)$", TEXT, re.MULTILINE)
    assert len(BLOCKS) == sum(kind != "text" for kind in kinds) > 15
    assert {each.machine for each in BLOCKS} == {"server", "Pi"}
    assert all(each.file or each.kind == "console" for each in BLOCKS)
    assert ADDRESS in TEXT
    assert METRICS in TEXT
    with pytest.raises(ValueError, match="where it belongs"):
        list(blocks("```console\n# at home\nls\n```\n"))


def test_the_commands_exist() -> None:
    lines = [line for each in BLOCKS if each.kind == "console" for line in commands(each)]
    ours = [line.partition(" > ")[0] for line in lines if line.startswith("anyfleet ")]
    inline = re.findall(r"`(anyfleet [^`]+?)`", TEXT.replace("\n", " "))
    assert len(ours) > 10
    assert {line: unknown_in(line) for line in (*ours, *inline) if unknown_in(line)} == {}
    assert unknown_in("anyfleet fleet sreve fleet") == ["fleet", "sreve"]
    assert unknown_in("anyfleet fleet serve fleet run.toml --alow rings") == ["--alow"]
    assert unknown_in("anyfleet fleet serve fleet") == ["too few arguments"]


def test_files_are_whole_and_those_of_the_example() -> None:
    for each in BLOCKS:
        if each.kind == "python":
            compile(each.text, each.file, "exec")
        elif each.kind == "toml":
            tomllib.loads(each.text)
        elif each.kind == "yaml":
            assert yaml.safe_load(each.text)
    written = {each.file: each.text for each in BLOCKS if each.file}
    for file in EXAMPLE.iterdir():
        if file.is_file():
            assert written[file.name] == file.read_text(encoding="utf-8")


def test_blocks_are_run_as_they_say(tmp_path: Path) -> None:
    machine = Machine(tmp_path, {"PATH": "/usr/bin:/bin"})

    def run(script: str, manner: str = "") -> bool:
        block = Block("server", manner, "", "console", script)
        return _run(block, machine, script, tmp_path / "log.txt")

    assert run("echo good")
    assert not run("false\necho never")  # the first failure ends a block
    assert not run("false | cat")
    assert "never" not in (tmp_path / "log.txt").read_text()
    assert run("sleep 0.3; touch there", "leave it running")
    assert run("ls there", "in a second shell")
    assert run("ls there", "when the run has ended")
    assert run("false", "leave it running")
    assert not run("ls there", "when the run has ended")
    assert not run("ls nowhere", "in a second shell")  # what it waits for is dead
    machine.end()
