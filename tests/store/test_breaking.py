"""Errors while a run is written: what is there afterwards is whole, and what is said is true."""

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from anyfleet.errors import AnyfleetWarning, BadReturn, StoreError
from anyfleet.experiment import RoundResult
from anyfleet.store import Recording, Terms, finished, read_ledger, read_rounds, reopen
from anyfleet.store.disk import DiskError, Log
from anyfleet.tracebacks import note
from tests.helpers import runs
from tests.store.test_disk import room


def append(recording: Recording, steps: int) -> None:
    for result in runs.results()[:steps]:
        recording.append(result)


def test_a_folder_in_use_is_not_touched(tmp_path: Path) -> None:
    with Recording(tmp_path, runs.EXPERIMENT, every=1) as recording:
        recording.append(runs.results()[0])
        with pytest.raises(StoreError, match=f"in use by process {os.getpid()}"):
            reopen(tmp_path, Terms())
        recording.append(runs.results()[1])
    assert len(read_rounds(tmp_path)) == 2


def test_a_folder_that_has_a_run_is_not_written_over(tmp_path: Path) -> None:
    folder = runs.written(tmp_path / "run", runs.results()[:1])
    with pytest.raises(StoreError, match="already has a run"):
        Recording(folder, runs.EXPERIMENT)
    assert len(read_rounds(folder)) == 1
    reopen(folder, Terms()).past.lock.release()


@pytest.mark.parametrize("size", [1_000, 3_000, 8_000, 40_000])
def test_a_full_disk_loses_nothing(tmp_path: Path, size: int) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    recording = Recording(folder, runs.EXPERIMENT, every=1)
    told = r"no room left. Make room, then go on with"
    with pytest.raises(DiskError, match=told) as caught, room(size), recording:
        append(recording, 5)
    assert f"anyfleet resume {folder}" in str(caught.value)
    assert not list(folder.rglob("*.part"))
    assert runs.contents(runs.finished(folder)) == runs.whole(tmp_path / "whole")


def test_a_folder_that_vanishes_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    recording = Recording(folder, runs.EXPERIMENT, every=1)
    recording.append(runs.results()[0])
    folder.rename(tmp_path / "elsewhere")
    with pytest.raises(DiskError, match="Restore it, then go on with"), recording:
        recording.append(runs.results()[1])
    assert not folder.exists()
    (tmp_path / "elsewhere").rename(folder)
    assert runs.contents(runs.finished(folder)) == runs.whole(tmp_path / "whole")


@pytest.mark.parametrize("error", [DiskError("full"), TypeError("odd")], ids=["disk", "other"])
@pytest.mark.parametrize("log", ["ledger.jsonl", "rounds.jsonl"])
def test_a_step_is_in_all_logs_or_in_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: str, error: Exception
) -> None:
    write = Log.append

    def failing(to: Log, rows: Iterable[object]) -> None:
        if to.file.name == log and len(read_rounds(tmp_path)) == 2:
            raise error
        write(to, rows)

    monkeypatch.setattr(Log, "append", failing)
    recording = Recording(tmp_path, runs.EXPERIMENT, every=10)
    with pytest.raises(type(error)) as caught, recording:
        append(recording, 3)
    orders = sum(len(result.round.ledger) for result in runs.results()[:2])
    assert (len(read_rounds(tmp_path)), len(read_ledger(tmp_path))) == (2, orders)
    # The end of the block has made them safe; the error says what came of that.
    assert runs.numbers(tmp_path) == [2]
    if isinstance(error, DiskError):
        assert "full, then go on with" in str(caught.value)
        assert "2 of 5 rounds are safe" in str(caught.value)
    past = reopen(tmp_path, Terms()).past
    past.lock.release()
    assert {name: mark.bytes for name, mark in past.progress.logs.items()} == {
        name: (tmp_path / name).stat().st_size for name in past.progress.logs
    }


def test_lines_that_cannot_be_cut_off_at_once_are_cut_off_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Log.append

    def failing(to: Log, rows: Iterable[object]) -> None:
        if to.file.name == "rounds.jsonl":
            raise DiskError("full")
        write(to, rows)

    def stuck(log: Log) -> None:
        raise DiskError("stuck")

    recording = Recording(tmp_path, runs.EXPERIMENT, every=10)
    append(recording, 2)
    monkeypatch.setattr(Log, "append", failing)
    monkeypatch.setattr(Log, "cut", stuck)
    with pytest.raises(DiskError, match="full"), recording:
        recording.append(runs.results()[2])
    orders = sum(len(result.round.ledger) for result in runs.results()[:3])
    assert len(read_ledger(tmp_path)) == orders
    monkeypatch.undo()
    assert runs.contents(runs.finished(tmp_path)) == runs.whole(tmp_path / "whole")


def test_a_run_without_checkpoints_does_not_promise_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(log: Log, rows: Iterable[object]) -> None:
        raise DiskError("full")

    recording = Recording(tmp_path, runs.EXPERIMENT, every=0)
    monkeypatch.setattr(Log, "append", full)
    with pytest.raises(DiskError, match="full, then run it again: anyfleet run") as told, recording:
        append(recording, 1)
    assert "resume" not in str(told.value)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_run_that_breaks_off_has_a_checkpoint_of_its_last_step(
    tmp_path: Path, error: type[BaseException]
) -> None:
    recording = Recording(tmp_path, runs.EXPERIMENT, every=4)
    append(recording, 3)
    with pytest.raises(error), recording:
        raise error
    assert runs.numbers(tmp_path) == [3]
    assert not finished(tmp_path, Terms())
    assert runs.contents(runs.finished(tmp_path)) == runs.whole(tmp_path / "whole")


class Foreign:
    """What nobody knows how to write."""


def foreign(result: RoundResult) -> RoundResult:
    """The same round, with something in the state of the selection that cannot be written."""
    states = {**result.round.snapshot.states, "select": {"seen": Foreign()}}
    snapshot = replace(result.round.snapshot, states=states)
    return replace(result, round=replace(result.round, snapshot=snapshot))


@pytest.mark.parametrize("every", [None, 1, 100])
def test_a_state_that_cannot_be_written_is_refused_in_the_round_it_comes(
    tmp_path: Path, every: int | None
) -> None:
    told = r"select=\w+\(.*\) returned a state in round 2 that cannot be kept: "
    place = r"states\.select\.seen: a `Foreign`(.|\n)*--checkpoint-every 0"
    recording = Recording(tmp_path, runs.EXPERIMENT, every=every)
    append(recording, 1)
    with pytest.raises(BadReturn, match=told + place) as caught, recording:
        recording.append(foreign(runs.results()[1]))
    safe = (
        f"The run so far is safe (1 of {runs.EXPERIMENT.rounds} rounds): mend this, then anyfleet"
    )
    assert note(caught.value).startswith(safe)
    assert runs.contents(runs.finished(tmp_path)) == runs.whole(tmp_path / "whole")


def test_without_checkpoints_a_state_may_hold_anything(tmp_path: Path) -> None:
    with Recording(tmp_path, runs.EXPERIMENT, every=0) as recording:
        recording.append(foreign(runs.results()[0]))
    assert (tmp_path / "model.safetensors").exists()


def test_a_run_with_all_its_steps_ends_well_without_its_last_checkpoint(tmp_path: Path) -> None:
    first, *_, last = runs.results()
    told = r"The last checkpoint .* cannot be written: fleet: a `Foreign`"
    recording = Recording(tmp_path, runs.EXPERIMENT, every=100)
    append(recording, runs.EXPERIMENT.rounds - 1)
    with pytest.warns(AnyfleetWarning, match=told), recording:
        recording.append(replace(last, round=replace(last.round, fleet=Foreign())))
    assert finished(tmp_path, Terms())
    (tmp_path / "early").mkdir()
    early = Recording(tmp_path / "early", runs.EXPERIMENT, every=100)
    with pytest.raises(StoreError, match="fleet: a `Foreign`"), early:
        early.append(replace(first, round=replace(first.round, fleet=Foreign())))


def forge(checkpoint: Path, name: str, content: bytes) -> None:
    """Another file in a checkpoint, with a checksum that is right."""
    (checkpoint / name).write_bytes(content)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    digest = hashlib.sha256(content).hexdigest()
    manifest["files"][name] = {"bytes": len(content), "sha256": digest}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("state.json", b"{}"),
        ("state.json", b"[" * 100_000),
        ("state.json", b'{"scalar": "int64", "value": 1e400}'),
        ("state.json", b'{"scalar": "int64", "value": 99999999999999999999999}'),
        ("tensors.safetensors", b"\xff" * 64),
    ],
)
def test_a_checkpoint_that_means_nothing_is_passed_over(
    tmp_path: Path, name: str, content: bytes
) -> None:
    folder = runs.written(tmp_path / "run", runs.results()[:3])
    forge(folder / "checkpoints" / "000003", name, content)
    reopened = reopen(folder, Terms())
    reopened.past.lock.release()
    assert reopened.past.progress.rounds == 2
    assert "Going on from the checkpoint before it." in reopened.remarks[0]


@pytest.mark.parametrize(
    "logs",
    [
        {"rounds.jsonl": {"bytes": 10**19, "crc32": 0}},
        {"rounds.jsonl": {"bytes": -5, "crc32": 0}},
        {"../elsewhere": {"bytes": 0, "crc32": 0}},
        {"config.toml": {"bytes": 0, "crc32": 0}},
    ],
)
def test_a_checkpoint_that_lies_about_logs_is_passed_over(
    tmp_path: Path, logs: dict[str, object]
) -> None:
    folder = runs.written(tmp_path / "run", runs.results()[:3])
    file = folder / "checkpoints" / "000003" / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"logs": logs}))
    reopened = reopen(folder, Terms())
    reopened.past.lock.release()
    assert reopened.past.progress.rounds == 2


def test_a_log_that_is_no_file_is_told(tmp_path: Path) -> None:
    folder = runs.written(tmp_path / "run", runs.results()[:2])
    (folder / "rounds.jsonl").unlink()
    (folder / "rounds.jsonl").mkdir()
    with pytest.raises(StoreError, match=r"rounds\.jsonl is damaged"):
        reopen(folder, Terms())
