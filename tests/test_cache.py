"""The user's cache: what is kept, what is never trusted, and that it changes no result."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from anyfleet import cache
from anyfleet.cli.app import app

KEY = {"of": "a test", "number": 1}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ANYFLEET_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def kept(key: object = KEY) -> bytes | None:
    found = cache.read("prices", key)
    return None if found is None else bytes(found)


def only(folder: Path) -> Path:
    (file,) = folder.iterdir()
    return file


# --- one entry ------------------------------------------------------------------------------------


def test_what_is_written_is_read_under_its_key_alone(home: Path) -> None:
    assert kept() is None
    cache.write("prices", KEY, b"content")
    assert kept() == b"content"
    assert kept({**KEY, "number": 2}) is None
    assert cache.read("networks", KEY) is None
    cache.write("prices", KEY, b"")
    assert kept() == b""


def test_the_order_of_a_key_does_not_count(home: Path) -> None:
    cache.write("prices", KEY, b"content")
    assert kept(dict(reversed(KEY.items()))) == b"content"


@pytest.mark.parametrize("position", [0, 20, 48, -1])
def test_a_damaged_entry_is_removed(home: Path, position: int) -> None:
    cache.write("prices", KEY, b"content")
    file = only(home / "prices")
    whole = bytearray(file.read_bytes())
    whole[position] ^= 1
    file.write_bytes(whole)
    assert kept() is None
    assert not file.exists()


@pytest.mark.parametrize("length", [0, 10, 47, 48, 54])
def test_a_truncated_entry_is_removed(home: Path, length: int) -> None:
    cache.write("prices", KEY, b"content")
    file = only(home / "prices")
    file.write_bytes(file.read_bytes()[:length])
    assert kept() is None
    assert not file.exists()


def test_an_entry_in_the_place_of_another_is_not_used(home: Path) -> None:
    cache.write("prices", KEY, b"content")
    forged = only(home / "prices").read_bytes()
    other = {**KEY, "number": 2}
    cache.write("prices", other, b"other")
    (home / "prices" / cache.key_digest(other).hex()).write_bytes(forged)
    assert kept(other) is None
    cache.write("networks", KEY, b"network")
    only(home / "networks").write_bytes(forged)
    assert cache.read("networks", KEY) is None


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such permissions")
def test_entries_are_private_and_folders_of_others_are_not_used(home: Path, tmp_path: Path) -> None:
    cache.write("prices", KEY, b"content")
    folder = home / "prices"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert only(folder).stat().st_mode & 0o777 == 0o600
    folder.chmod(0o770)  # anybody in the group may have written the entry
    assert kept() is None
    cache.write("prices", {"of": "another"}, b"content")
    assert len(list(folder.iterdir())) == 1
    folder.chmod(0o700)
    assert kept() == b"content"


@pytest.mark.skipif(sys.platform == "win32", reason="links need rights there")
def test_links_are_not_followed(home: Path, tmp_path: Path) -> None:
    cache.write("prices", KEY, b"content")
    file = only(home / "prices")
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert kept() is None
    (home / "prices").rename(tmp_path / "prices")
    (home / "prices").symlink_to(tmp_path / "prices")
    cache.write("prices", {"of": "another"}, b"content")
    assert len(list((tmp_path / "prices").iterdir())) == 1


@pytest.mark.parametrize("value", ["", "off", "OFF"])
def test_the_variable_turns_the_cache_off(
    home: Path, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.write("prices", KEY, b"content")
    monkeypatch.setenv("ANYFLEET_CACHE", value)
    assert kept() is None
    cache.write("prices", {"of": "another"}, b"content")
    cache.clear()
    assert cache.holdings() == []
    assert len(list((home / "prices").iterdir())) == 1


def test_without_a_place_for_it_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ANYFLEET_CACHE", str(tmp_path / "file"))
    cache.write("prices", KEY, b"content")
    assert kept() is None


def test_the_code_that_computed_it_is_known() -> None:
    found = cache.computed_by(torch="2")
    assert found is not None
    assert found["torch"] == "2"
    assert found["anyfleet"] == cache.code_digest()


def test_another_line_of_source_is_other_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "module.py").write_text("one = 1")
    monkeypatch.setattr(cache, "__file__", str(tmp_path / "cache.py"))
    digest = cache.code_digest.__wrapped__
    before = digest()
    assert digest() == before
    (tmp_path / "inner" / "module.py").write_text("one = 2")
    assert digest() != before


# --- several processes ----------------------------------------------------------------------------

WRITER = """
import sys
from anyfleet import cache
for turn in range(60):
    for number in range(4):
        content = bytes([number]) * (10_000 + number)
        found = cache.read("prices", number)
        assert found is None or bytes(found) == content
        cache.write("prices", number, content)
        if turn % 7 == int(sys.argv[1]):
            cache.clear("prices")
"""


def test_several_processes_write_and_clear_at_once(home: Path) -> None:
    each = [subprocess.Popen([sys.executable, "-c", WRITER, str(n)]) for n in range(3)]
    assert [process.wait(120) for process in each] == [0, 0, 0]
    for number in range(4):
        cache.write("prices", number, b"whole")
        assert kept(number) == b"whole"
    assert not list((home / "prices").glob(".*.part"))


# --- room -----------------------------------------------------------------------------------------


def used(home: Path, number: int, seconds: int) -> None:
    """Pretend that an entry was last used at a time."""
    os.utime(home / "prices" / cache.key_digest(number).hex(), (seconds, seconds))


def test_what_was_not_used_for_longest_makes_room(home: Path) -> None:
    for number in range(4):
        cache.write("prices", number, bytes(1000))
        used(home, number, 1000 + number)
    assert kept(0) is not None  # used now
    cache.trim(2 * 1048)
    assert [kept(number) is not None for number in range(4)] == [True, False, False, True]


def test_a_full_cache_makes_room_when_it_is_written(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache.trim, "__defaults__", (3000,))
    for number in range(5):
        cache.write("prices", number, bytes(1000))
        used(home, number, 1000 + number)
    assert [kept(number) is not None for number in range(5)] == [False, False, False, True, True]


def test_measurements_of_engines_do_not_make_room(home: Path) -> None:
    (home / "engines").mkdir(parents=True)
    measured = home / "engines" / ("0" * 64 + ".json")
    measured.write_text("{}")
    cache.trim(0)
    assert measured.exists()


# --- the command ----------------------------------------------------------------------------------


def invoked(*words: str) -> str:
    done = CliRunner().invoke(app, ["cache", *words])
    assert done.exit_code == 0, done.output
    return done.output


def test_the_command_shows_and_clears(home: Path) -> None:
    cache.write("prices", KEY, bytes(1000))
    cache.write("images", KEY, bytes(2_000_000))
    shown = invoked()
    assert str(home) in shown
    assert "2 MB" in shown
    content = json.loads(invoked("--json"))
    assert content["folder"] == str(home)
    found = {each["kind"]: (each["entries"], each["size"]) for each in content["kinds"]}
    assert found == {
        "engines": (0, 0),
        "images": (1, 2_000_048),
        "networks": (0, 0),
        "prices": (1, 1048),
    }
    assert "Removed entries: 1, 2 MB." in invoked("clear", "images")
    assert kept() is not None
    assert "Removed entries: 1, 1.05 kB." in invoked("clear")
    assert kept() is None


def test_clearing_leaves_other_files_alone(home: Path) -> None:
    data = home / "data" / ("0" * 64)
    data.parent.mkdir(parents=True)
    data.touch()
    cache.write("prices", KEY, b"content")
    (home / "prices" / "notes.txt").touch()
    invoked("clear")
    assert data.exists()
    assert only(home / "prices").name == "notes.txt"


def test_an_unknown_kind_is_refused(home: Path) -> None:
    done = CliRunner().invoke(app, ["cache", "clear", "image"])
    assert done.exit_code == 1
    assert 'did you mean "images"' in done.output


def test_the_command_says_that_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYFLEET_CACHE", "off")
    assert "There is no cache" in invoked()
    assert json.loads(invoked("--json")) == {"folder": None, "kinds": []}
