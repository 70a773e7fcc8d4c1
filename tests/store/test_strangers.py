"""Run folders of strangers: they lead nowhere else, and hold nothing but a state of their run."""

import hashlib
import json
import os
import shutil
import sys
import zlib
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest

from anyfleet.errors import StoreError
from anyfleet.store import Terms, checkpoint, finished, reopen
from tests.cli.test_commands import anyfleet_command
from tests.helpers import runs

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has other links")


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that died after two steps; not to be changed."""
    return runs.written(tmp_path_factory.mktemp("killed") / "run", runs.results()[:2])


@pytest.fixture
def folder(killed: Path, tmp_path: Path) -> Path:
    return shutil.copytree(killed, tmp_path / "run")


def contents(folder: Path) -> dict[str, bytes]:
    """Of all files but the lock, which is ours."""
    files = [file for file in folder.rglob("*") if file.is_file() and file.name != "lock"]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


# --- links ------------------------------------------------------------------------------------

NAMES = (
    "config.toml",
    "environment.json",
    "papers.bib",
    "rounds.jsonl",
    "ledger.jsonl",
    "lock",
    "model.safetensors",
    "summary.json",
    "curves.png",
    ".summary.json.part",
    ".model.safetensors.part",
    "checkpoints",
    "checkpoints/000002",
    "checkpoints/000002/manifest.json",
    "checkpoints/000002/state.json",
    "checkpoints/000001/tensors.safetensors",
    "checkpoints/.000003.part",
)


@pytest.mark.parametrize("name", NAMES)
def test_a_link_is_refused_and_what_it_leads_to_is_left_alone(folder: Path, name: str) -> None:
    mine = folder.parent / "mine"
    place = folder / name
    if place.exists():
        place.rename(mine)  # so that all is well but for the link
    else:
        mine.write_bytes(b"precious")
    place.symlink_to(mine)
    before = contents(folder.parent)
    for look in (lambda: finished(folder, Terms()), lambda: reopen(folder, Terms())):
        with pytest.raises(StoreError, match=f"{place} is a symbolic link"):
            look()
    shown = anyfleet_command("resume", str(folder))
    assert shown.exit_code == 1
    assert "is a symbolic link" in shown.output
    assert contents(folder.parent) == before


WRITTEN = (
    "rounds.jsonl",
    "ledger.jsonl",
    "lock",
    ".summary.json.part",
    ".model.safetensors.part",
    ".config.toml.part",
    ".curves.png.part",
)


@pytest.mark.parametrize("name", WRITTEN)
def test_a_file_with_a_second_name_is_not_written(folder: Path, name: str) -> None:
    mine = folder.parent / "mine"
    (folder / name).touch()
    os.link(folder / name, mine)
    before = mine.read_bytes()
    with pytest.raises(StoreError, match=f"{name} has a second name elsewhere"):
        reopen(folder, Terms())
    assert mine.read_bytes() == before


def test_a_second_name_of_a_file_that_is_replaced_stays_as_it_was(folder: Path) -> None:
    """Also of the picture, which is drawn again at the end."""
    mine = folder.parent / "mine"
    mine.write_bytes(b"precious")
    for name in ("curves.png", "summary.json", "model.safetensors"):
        (folder / name).unlink(missing_ok=True)
        os.link(mine, folder / name)
    shown = anyfleet_command("resume", str(folder))
    assert shown.exit_code == 0, shown.output
    assert mine.read_bytes() == b"precious"
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_second_name_that_appears_while_a_run_goes_on_is_not_written(folder: Path) -> None:
    opened = reopen(folder, Terms())
    mine = folder.parent / "mine"
    mine.write_bytes(b"precious")
    for name in (".summary.json.part", ".model.safetensors.part"):
        os.link(mine, folder / name)
    runs.go_on(folder, opened)
    assert mine.read_bytes() == b"precious"


def test_a_pipe_is_not_waited_for(folder: Path) -> None:
    (folder / "config.toml").unlink()
    os.mkfifo(folder / "config.toml")
    with pytest.raises(StoreError, match=r"config\.toml is not a plain file"):
        reopen(folder, Terms())


def test_the_folder_itself_may_be_a_link(folder: Path, tmp_path: Path) -> None:
    (folder.parent / "link").symlink_to(folder)
    runs.finished(folder.parent / "link")
    assert runs.contents(folder) == runs.whole(tmp_path / "whole")


def test_a_link_that_appears_while_a_run_goes_on_is_not_followed(folder: Path) -> None:
    opened = reopen(folder, Terms())
    mine = folder.parent / "mine"
    mine.write_bytes(b"precious")
    (folder / ".summary.json.part").symlink_to(mine)
    (folder / "rounds.jsonl").unlink()
    (folder / "rounds.jsonl").symlink_to(mine)
    with pytest.raises(StoreError, match="it is a symbolic link"):
        runs.go_on(folder, opened)
    assert mine.read_bytes() == b"precious"


# --- what a checkpoint holds ------------------------------------------------------------------


def forged(folder: Path, change: Callable[[Any], Any]) -> None:
    """Change the state in all checkpoints, with right checksums."""
    for path in checkpoint.found(folder):
        state = path / checkpoint.STATE
        text = json.dumps(change(json.loads(state.read_text()))).encode()
        state.write_bytes(text)
        manifest = json.loads((path / checkpoint.MANIFEST).read_text())
        digest = hashlib.sha256(text).hexdigest()
        manifest["files"][checkpoint.STATE] = {"bytes": len(text), "sha256": digest}
        (path / checkpoint.MANIFEST).write_text(json.dumps(manifest))


def with_field(place: str, node: Any) -> Callable[[Any], Any]:
    """A state in which one field, at a path of fields, is another value."""
    *above, last = place.split(".")

    def change(root: Any) -> Any:
        part = root
        for name in above:
            part = part["fields"][name]
        assert last in part["fields"]  # or nothing is forged but a field that nobody knows
        part["fields"][last] = node
        return root

    return change


def with_table(change: Callable[[Any], None]) -> Callable[[Any], Any]:
    """A state in which the table of the orders under way differs."""

    def changed(root: Any) -> Any:
        change(root["fields"]["fleet"]["fields"]["under_way"]["fields"])
        return root

    return changed


def with_events(name: str, *values: float) -> Callable[[Any], Any]:
    """A state whose clock has other events: these values come again and again."""

    def change(table: Any) -> None:
        column = table["events"]["fields"][name]
        count = column["shape"][0]
        column["values"] = list(islice(cycle(values), count))

    return with_table(change)


def with_values(name: str, change: Callable[[int], int]) -> Callable[[Any], Any]:
    """A state in which the numbers of a column of the table differ."""

    def changed(table: Any) -> None:
        table[name]["values"] = [change(value) for value in table[name]["values"]]

    return with_table(changed)


def with_order(change: Callable[[Any], None]) -> Callable[[Any], Any]:
    """A state in which the fields of the orders under way, as the server has them, differ."""

    def changed(root: Any) -> Any:
        change(root["fields"]["snapshot"]["fields"]["under_way"]["fields"])
        return root

    return changed


def with_phase(name: str, node: Any) -> Callable[[Any], Any]:
    """A state in which the orders under way go on otherwise."""
    return with_table(lambda table: table["download"]["fields"].update({name: node}))


def with_rows(change: Callable[[dict[str, Any]], None]) -> Callable[[Any], Any]:
    """A state in which the tables of what devices have left to send, by name, differ."""

    def changed(root: Any) -> Any:
        tables = root["fields"]["fleet"]["fields"]["states"]["fields"]["tables"]
        change(tables["dict"]["residual"]["dict"])
        return root

    return changed


NONE = {"array": "int64", "shape": [0], "values": []}


def factory(use: str) -> dict[str, Any]:
    options = {"frozen": {"command": "touch PWNED"}}
    return {"part": "anyfleet.names:Factory", "fields": {"use": use, "options": options}}


FORGED: dict[str, Callable[[Any], Any]] = {
    "a number": lambda _: 7,
    "nothing": lambda _: None,
    "a list": lambda _: {"list": []},
    "a mapping": lambda _: {"dict": {}},
    "no kind of node": lambda _: {"nonsense": 1},
    "an empty node": lambda _: {},
    "a reference to nothing": lambda _: {"ref": 3},
    "the record alone": lambda root: root["fields"]["record"],
    "another dataclass": lambda _: {"part": "anyfleet.measure:Fisher", "fields": {}},
    "a state without a snapshot": with_field("snapshot", None),
    "a state without a record": with_field("record", None),
    "a state without a fleet": with_field("fleet", None),
    "a fleet of another kind": with_field("fleet", {"dict": {}}),
    "a fleet without a clock": with_field("fleet.clock", None),
    "states without tables": with_field("fleet.states.tables", {"list": []}),
    "a table that is none": with_rows(lambda tables: tables.update({"1.bias": 3})),
    "a table of no tensor": with_rows(lambda tables: tables.update(x=tables.pop("3.bias"))),
    "rows without blocks": with_rows(
        lambda tables: tables["1.bias"]["fields"].update(blocks={"tuple": []})
    ),
    "rows of another tensor": with_rows(
        lambda tables: tables["1.bias"]["fields"].update(
            blocks=tables["3.bias"]["fields"]["blocks"]
        )
    ),
    "rows that lie elsewhere": with_rows(
        lambda tables: tables["1.weight"]["fields"]["index"]["fields"]["start"].update(
            values=[97, 98, 99]
        )
    ),
    "orders that nobody sent": with_field("fleet.states.last_sent_order.device", NONE),
    "orders of text": with_field("fleet.states.last_sent_order", {"dict": {}}),
    "a fleet of a few": with_field("fleet.losses", {"list": [1.0]}),
    "batteries of others": with_field(
        "fleet.batteries", {"tuple": [NONE, {**NONE, "shape": [0, 1]}]}
    ),
    "a clock without an event": with_table(lambda table: table["events"]["fields"].pop("ends")),
    "a clock with text": with_table(lambda table: table["events"]["fields"].update(ends="soon")),
    "a clock with two at once": with_events("sequence", 1),
    "a clock that goes back": with_events("trained", -1.0),
    "a clock with events to come": with_events("sequence", *range(900, 999)),
    "an order of no cohort": with_values("row", lambda row: row + 99),
    "a cohort that was never submitted": with_values("cohort", lambda number: number + 99),
    "orders of another number": with_values("id", lambda number: number + 1),
    "a device that does not exist": with_values("device", lambda number: number + 99),
    "a failure without a reason": with_values("reason", lambda number: number + 99),
    "a reply of no stack": with_table(
        lambda table: table["replies"]["fields"].update(stacks={"tuple": []})
    ),
    "a column that is too short": with_order(lambda order: order.update(choice=NONE)),
    "a column that is a number": with_order(lambda order: order["width"].update(shape=[])),
    "slices that are not there": with_order(
        lambda order: order["slice_index"].update(values=[9] * len(order["slice_index"]["values"]))
    ),
    "a phase without its points": with_phase("changes", {**NONE, "shape": [4], "values": [3] * 4}),
    "a phase of text": with_phase("seconds", {"list": ["x"]}),
    "a round of another kind": with_field("snapshot.round_index", "three"),
    "another round": with_field("record.round_index", 7),
    "a model of another kind": with_field("snapshot.params", {"list": []}),
    "a model without layers": with_field("snapshot.params", {"dict": {}}),
    "layers that are no tensors": with_field("snapshot.params", {"dict": {"0.weight": 3}}),
    "visits of nobody": with_field(
        "snapshot.visits", {"array": "int64", "shape": [0], "values": []}
    ),
    "orders that are none": with_field("snapshot.under_way", {"dict": [[0, "order"]]}),
    "a command": with_field(
        "snapshot.diagnostics", {"dict": {"a": {"code": "anyfleet.cli.app:main"}}}
    ),
    "a function that makes folders": with_field(
        "snapshot.diagnostics", {"dict": {"a": {"code": "anyfleet.store.run_folder:fresh"}}}
    ),
    "a function that loads files": with_field(
        "snapshot.diagnostics", {"dict": {"a": {"code": "anyfleet.experiment:load"}}}
    ),
    "a call of the system": with_field(
        "snapshot.diagnostics", {"dict": {"a": factory("os:system")}}
    ),
    "a call of ours": with_field(
        "snapshot.diagnostics", {"dict": {"a": factory("anyfleet.experiment:load")}}
    ),
    "depth": with_field("snapshot.diagnostics", json.loads('{"list": [' * 400 + "0" + "]}" * 400)),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_checkpoint_that_holds_something_else_is_refused(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    forged(folder, FORGED[name])
    before = contents(folder)
    with pytest.raises(StoreError):
        reopen(folder, Terms())
    shown = anyfleet_command("resume", str(folder))
    assert (shown.exit_code, type(shown.exception)) == (1, SystemExit), repr(shown.exception)
    assert contents(folder) == before
    assert [each.name for each in folder.parent.iterdir()] == ["run"]


@pytest.mark.parametrize("name", ["plan", "select"])
def test_a_state_that_fails_in_its_first_step_is_told_as_that(folder: Path, name: str) -> None:
    def change(root: Any) -> Any:
        del root["fields"]["snapshot"]["fields"]["states"]["dict"][name]
        return root

    forged(folder, change)
    shown = anyfleet_command("resume", str(folder))
    assert (shown.exit_code, type(shown.exception)) == (1, SystemExit), repr(shown.exception)
    assert "the checkpoint does not fit its run" in shown.output
    assert name in shown.output


def test_a_state_that_is_only_rewritten_is_used(folder: Path) -> None:
    """The forger's tool itself does no harm."""
    forged(folder, lambda root: root)
    reopen(folder, Terms()).past.lock.release()


@pytest.mark.parametrize("name", ["rounds.jsonl", "ledger.jsonl"])
@pytest.mark.parametrize("line", ["7", "{}", '{"scores": 3}', "nonsense", '{"a": ' * 2000])
def test_a_log_that_holds_something_else_is_refused(folder: Path, name: str, line: str) -> None:
    text = f"{line}\n".encode()
    (folder / name).write_bytes(text)
    for path in checkpoint.found(folder):
        manifest = json.loads((path / checkpoint.MANIFEST).read_text())
        manifest["logs"][name] = {"bytes": len(text), "crc32": zlib.crc32(text)}
        (path / checkpoint.MANIFEST).write_text(json.dumps(manifest))
    before = contents(folder)
    with pytest.raises(StoreError, match=rf"{name}(, line 1,)? (is damaged)"):
        reopen(folder, Terms())
    assert contents(folder) == before


@pytest.mark.parametrize("name", ["environment.json", "summary.json"])
def test_json_without_a_bottom_is_damage(folder: Path, name: str) -> None:
    (folder / name).write_text('{"ended": ' + "[" * 100_000)
    if name == "summary.json":
        assert not finished(folder, Terms())
    else:
        with pytest.raises(StoreError, match=r"environment\.json is damaged"):
            reopen(folder, Terms())
