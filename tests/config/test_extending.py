"""Run files that build on others."""

import os
from pathlib import Path

import pytest

from anyfleet import load
from anyfleet.config import read
from anyfleet.errors import ConfigError
from anyfleet.experiment import Experiment
from anyfleet.store import describe

BASE = """
rounds = 7

[task]
use = "Embedded"
devices = 4
limit = 200
model = { use = "perceptron", hidden = [8, 6] }

[method]
use = "heterofl"
widths = [1.0, 0.5]
lr = 0.1
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "base.toml").write_text(BASE)
    return tmp_path


def write(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def refused(file: Path, *overrides: str) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        read(file, overrides).load(Experiment)
    return {problem.path: problem.message for problem in caught.value.problems}


def test_tables_are_joined_key_by_key(folder: Path) -> None:
    mine = write(folder / "mine.toml", 'extends = "base.toml"\nseed = 3\n[method]\nlr = 0.2\n')
    whole = BASE.replace("lr = 0.1", "lr = 0.2").replace("rounds", "seed = 3\nrounds")
    assert load(mine) == load(write(folder / "whole.toml", whole))


def test_another_use_replaces_the_whole_table(folder: Path) -> None:
    """FedAvg has no widths: the keys of HeteroFL mean nothing to it."""
    text = 'extends = "base.toml"\n[method]\nuse = "fedavg"\n[task.model]\nhidden = [5]\n'
    data = read(write(folder / "mine.toml", text)).data
    assert data["method"] == {"use": "fedavg"}
    assert data["task"]["model"] == {"use": "perceptron", "hidden": [5]}  # lists are not joined
    same = 'extends = "base.toml"\n[method]\nuse = "heterofl"\nlr = 0.3\n'
    kept = read(write(folder / "same.toml", same)).data["method"]
    assert kept == {"use": "heterofl", "widths": [1.0, 0.5], "lr": 0.3}


def test_chains_and_lists_have_an_order(folder: Path) -> None:
    """The last file of a list wins over those before it, and the file itself over all."""
    write(folder / "long.toml", 'extends = "base.toml"\nrounds = 50\nseed = 1\n')
    write(folder / "slow.toml", 'extends = "base.toml"\nseed = 2\n[method]\nlr = 0.01\n')
    mine = write(
        folder / "deep/mine.toml", 'extends = ["../long.toml", "../slow.toml"]\nseed = 9\n'
    )
    found = load(mine)
    # slow.toml brings all of base.toml with it.
    assert (found.rounds, found.seed) == (7, 9)
    data = read(mine).data
    assert data["method"]["lr"] == 0.01
    assert load(mine, ["rounds=2"]).rounds == 2


def test_a_run_records_what_the_files_come_to(folder: Path) -> None:
    mine = load(write(folder / "mine.toml", 'extends = "base.toml"\nseed = 3\n'))
    text = describe(mine)
    assert "extends" not in text
    assert load(write(folder / "elsewhere/config.toml", text)) == mine


def test_relative_paths_refer_to_the_file_in_which_they_stand(folder: Path) -> None:
    mine = write(folder / "deep/mine.toml", 'extends = "../base.toml"\n')
    table = '[fleet]\nuse = "Table"\nfile = "fleet.csv"\n'
    columns = "speed\n" + "1e9\n" * 4
    write(folder / "fleet.csv", columns)
    write(folder / "base.toml", BASE + table)
    assert Path(load(mine).fleet.file) == folder.resolve() / "fleet.csv"  # type: ignore[attr-defined]
    write(folder / "deep/own.csv", columns)
    write(mine, 'extends = "../base.toml"\n[fleet]\nfile = "own.csv"\n')
    assert Path(load(mine).fleet.file) == folder.resolve() / "deep/own.csv"  # type: ignore[attr-defined]
    # An override is written by whoever names the run file.
    write(mine, 'extends = "../base.toml"\n')
    found = load(mine, ["fleet.file=own.csv"])
    assert Path(found.fleet.file) == folder.resolve() / "deep/own.csv"  # type: ignore[attr-defined]


def test_errors_name_the_file_in_which_the_key_stands(folder: Path) -> None:
    base = write(folder / "base.toml", BASE.replace("devices", "devics") + "count = 0\n")
    mine = write(folder / "mine.toml", 'extends = "base.toml"\nrouns = 3\n[method]\nlr = "fast"\n')
    found = refused(mine)
    assert set(found) == {
        f"task.devics (in {base})",
        "rouns",
        "method.lr",
        f"method.count (in {base})",
    }
    again = refused(mine, "task.devics=4")
    assert "task.devics" in again


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('extends = "none.toml"', "none.toml does not exist"),
        ("extends = 3", 'expected "base.toml", or a list'),
        ("extends = [1]", 'expected "base.toml", or a list'),
        ('extends = "/etc/passwd"', "its name must end in .toml"),
        ('extends = "folder.toml"', "folder.toml is not a plain file"),
        ('extends = "pipe.toml"', "pipe.toml is not a plain file"),
        ('extends = "link.toml"', "its name must end in .toml"),
        ('extends = "loop.toml"', "loop.toml"),
        ('extends = "a\\u0000.toml"', "cannot be read"),
        ('extends = "mine.toml"', "extend each other in a ring"),
    ],
)
def test_what_cannot_be_extended_is_refused(folder: Path, text: str, told: str) -> None:
    (folder / "folder.toml").mkdir()
    os.mkfifo(folder / "pipe.toml")
    (folder / "link.toml").symlink_to("/etc/passwd")
    (folder / "loop.toml").symlink_to("loop.toml")
    found = refused(write(folder / "mine.toml", text))
    assert list(found) == ["extends"]
    assert told in found["extends"]


def test_a_ring_of_files_is_told_with_all_of_them(folder: Path) -> None:
    a, b, c = (folder / f"{name}.toml" for name in "abc")
    for file, other in ((a, "b"), (b, "c"), (c, "b")):
        write(file, f'extends = "{other}.toml"\n')
    assert refused(a) == {
        f"extends (in {c})": "files extend each other in a ring: "
        f"{b} extends {c} extends {b}. Take one of them out."
    }


def test_long_chains_are_refused_and_wide_ones_are_read_once(folder: Path) -> None:
    """Every file extends both files of the next pair: 2 to the 18 ways to the last."""
    for k in range(18):
        for side in "lr":
            write(folder / f"{side}{k}.toml", f'extends = ["l{k + 1}.toml", "r{k + 1}.toml"]\n')
    write(folder / "l18.toml", BASE)
    write(folder / "r18.toml", "seed = 4\n")
    assert load(folder / "l0.toml").seed == 4
    write(folder / "r18.toml", "seed = [\n")
    (problem,) = refused(folder / "l0.toml")
    assert problem == str(folder / "r18.toml")
    for k in range(25):
        write(folder / f"c{k}.toml", f'extends = "c{k + 1}.toml"\n')
    write(folder / "c25.toml", BASE)
    assert "more than 20 files" in next(iter(refused(folder / "c0.toml").values()))


def test_problems_of_several_files_come_at_once(folder: Path) -> None:
    write(folder / "one.toml", "rounds = [")
    write(folder / "two.toml", 'extends = "missing.toml"')
    found = refused(write(folder / "mine.toml", 'extends = ["one.toml", "two.toml"]'))
    assert list(found) == [str(folder / "one.toml"), f"extends (in {folder / 'two.toml'})"]


def test_a_base_file_is_granted_nothing(folder: Path) -> None:
    """It may ask for code, and only the caller allows it; code beside it is not found."""
    code = "raise SystemExit('this must not run')\n"
    write(folder / "evil_parts.py", code)
    asked = BASE + '[method.select]\nuse = "evil_parts:Own"\n[allow]\npackages = ["evil_parts"]\n'
    base = write(folder / "base.toml", asked)
    mine = write(folder / "deep/mine.toml", 'extends = "../base.toml"\n')
    found = refused(mine)
    assert "the file asks for the code of" in found["allow.packages"]
    assert f"method.select.use (in {deep(base, mine)})" in found
    with pytest.raises(ConfigError, match="evil_parts"):
        read(mine, allow=["evil_parts"]).load(Experiment)  # it lies beside the base file only
    assert read(mine).asked == ("evil_parts",)
    wrong = write(folder / "base.toml", BASE + "[allow]\npackages = 3\n")
    assert list(refused(mine)) == [f"allow (in {deep(wrong, mine)})"]


def deep(base: Path, mine: Path) -> Path:
    """The path of the base file as the other one names it."""
    return mine.parent / ".." / base.name


def test_extends_is_no_override(folder: Path) -> None:
    found = refused(folder / "base.toml", 'extends="other.toml"')
    assert "cannot be an override" in found["extends"]


def test_files_without_extends_are_as_before(folder: Path) -> None:
    assert read(folder / "base.toml").files == {}
