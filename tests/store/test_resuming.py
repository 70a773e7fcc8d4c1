"""A run that goes on: identical, from the last checkpoint that is whole."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from anyfleet.errors import StoreError
from anyfleet.experiment import play
from anyfleet.store import Recording, Terms, checkpoint, read_rounds, reopen
from tests.helpers import runs


def listed(folder: Path) -> list[str]:
    return sorted(each.name for each in (folder / "checkpoints").iterdir())


@pytest.mark.parametrize("steps", [0, 1, 3, 5])
def test_a_run_goes_on_as_if_nothing_had_happened(tmp_path: Path, steps: int) -> None:
    folder = runs.written(tmp_path / "run", runs.results()[:steps])
    assert runs.contents(runs.finished(folder)) == runs.whole(tmp_path / "whole")
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["ended"], summary["result"]["rounds"]) == ("finished", 5)


def test_the_last_two_checkpoints_are_kept(tmp_path: Path) -> None:
    folder = runs.written(tmp_path / "run", runs.results()[:4])
    assert runs.numbers(folder) == [4, 3]
    assert listed(folder) == ["000003", "000004"]


def test_the_newest_checkpoint_is_the_one_with_the_highest_number(tmp_path: Path) -> None:
    home = tmp_path / "checkpoints"
    for step in (999_998, 999_999, 1_000_000):
        (home / f"{step:06d}").mkdir(parents=True)
    assert runs.numbers(tmp_path) == [1_000_000, 999_999, 999_998]
    state = runs.results()[0].state
    checkpoint.save(tmp_path, state, checkpoint.Progress(1_000_001))
    assert runs.numbers(tmp_path) == [1_000_001, 1_000_000]
    assert checkpoint.examine(home / "1000001").rounds == 1_000_001


def test_checkpoints_come_every_so_many_steps_and_at_the_end(tmp_path: Path) -> None:
    with Recording(tmp_path, runs.EXPERIMENT, every=2) as recording:
        seen = []
        for result in runs.results():
            recording.append(result)
            seen.append(runs.numbers(tmp_path))
    assert seen == [[], [2], [2], [4, 2], [4, 2]]
    assert runs.numbers(tmp_path) == [5, 4]


def test_without_a_number_checkpoints_take_a_share_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    save = checkpoint.save

    def slow(*given: Any) -> None:
        clock[0] += 1.0
        save(*given)

    monkeypatch.setattr(checkpoint, "save", slow)
    recording = Recording(tmp_path, runs.EXPERIMENT)
    seen = []
    for result in runs.results():
        clock[0] += 8.0
        recording.append(result)
        seen.append(max(runs.numbers(tmp_path)))
    # One took a second: the next is due when twenty more have passed.
    assert seen == [1, 1, 1, 4, 4]


def test_what_came_after_the_checkpoint_is_played_again(tmp_path: Path) -> None:
    folder = runs.written(tmp_path / "run", runs.results()[:4], every=3)
    assert (len(read_rounds(folder)), runs.numbers(folder)) == (4, [3])
    with (folder / "rounds.jsonl").open("ab") as out:
        out.write(b'{"half":')
    opened = reopen(folder, Terms())
    assert len(opened.past.records) == len(read_rounds(folder)) == 3
    opened.past.lock.release()
    assert runs.contents(runs.finished(folder)) == runs.whole(tmp_path / "whole")


def test_a_resumed_run_can_be_resumed(tmp_path: Path) -> None:
    folder = runs.written(tmp_path / "run", runs.results()[:1])
    for _ in range(2):
        opened = reopen(folder, Terms())
        recording = Recording(folder, opened.experiment, past=opened.past, every=1)
        recording.append(next(play(opened.experiment, opened.task, resume=opened.past.state)))
        opened.past.lock.release()
    assert runs.numbers(folder) == [3, 2]
    assert runs.contents(runs.finished(folder)) == runs.whole(tmp_path / "whole")


# --- damage -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that died after three steps; not to be changed."""
    return runs.written(tmp_path_factory.mktemp("killed") / "run", runs.results()[:3])


@pytest.mark.parametrize("name", [checkpoint.MANIFEST, checkpoint.STATE, checkpoint.TENSORS])
@pytest.mark.parametrize("damage", ["flipped", "torn", "missing"])
def test_a_damaged_checkpoint_is_noticed_and_the_one_before_is_used(
    killed: Path, tmp_path: Path, name: str, damage: str
) -> None:
    folder = shutil.copytree(killed, tmp_path / "run")
    file = folder / "checkpoints" / "000003" / name
    content = bytearray(file.read_bytes())
    if damage == "flipped":
        content[len(content) // 2] ^= 1
    file.write_bytes(content[: -len(content) // 3] if damage == "torn" else content)
    if damage == "missing":
        file.unlink()
    opened = reopen(folder, Terms())
    opened.past.lock.release()
    assert opened.past.progress.rounds == 2
    assert "000003" in opened.remarks[0]
    assert "is damaged" in opened.remarks[0]


def test_a_run_goes_on_over_a_damaged_checkpoint(killed: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(killed, tmp_path / "run")
    (folder / "checkpoints" / "000003" / checkpoint.STATE).write_bytes(b"{}")
    assert runs.contents(runs.finished(folder)) == runs.whole(tmp_path / "whole")
    assert runs.numbers(folder) == [5, 4]


def test_a_log_that_lost_lines_makes_the_checkpoint_useless(killed: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(killed, tmp_path / "run")
    log = folder / "rounds.jsonl"
    log.write_bytes(log.read_bytes()[:-3])
    opened = reopen(folder, Terms())
    opened.past.lock.release()
    assert opened.past.progress.rounds == 2
    assert "rounds.jsonl is damaged" in opened.remarks[0]


def test_when_no_checkpoint_is_whole_nothing_is_touched(killed: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(killed, tmp_path / "run")
    for path in checkpoint.found(folder):
        (path / checkpoint.STATE).write_bytes(b"{}")
    before = (folder / "rounds.jsonl").read_bytes()
    with pytest.raises(StoreError, match=r"no checkpoint can be used(.|\n)*remove .*checkpoints"):
        reopen(folder, Terms())
    assert (folder / "rounds.jsonl").read_bytes() == before
    shutil.rmtree(folder / "checkpoints")
    opened = reopen(folder, Terms())
    opened.past.lock.release()
    assert (opened.past.state, read_rounds(folder)) == (None, ())
    assert "the run begins again" in opened.remarks[0]


def test_what_a_killed_process_left_half_written_is_removed(tmp_path: Path) -> None:
    folder = runs.written(tmp_path / "run", runs.results()[:2])
    left = folder / "checkpoints" / ".000003.part"
    left.mkdir()
    (left / checkpoint.STATE).write_bytes(b'{"half')
    runs.finished(folder)
    assert listed(folder) == ["000004", "000005"]


def test_another_format_is_refused(tmp_path: Path) -> None:
    folder = runs.written(tmp_path / "run", runs.results()[:1])
    (path,) = checkpoint.found(folder)
    manifest = json.loads((path / checkpoint.MANIFEST).read_text())
    (path / checkpoint.MANIFEST).write_text(json.dumps(manifest | {"format": 1}))
    with pytest.raises(StoreError, match="has format 1, but this version reads only 2"):
        reopen(folder, Terms())


def test_the_model_can_be_read_from_a_checkpoint_without_anyfleet(tmp_path: Path) -> None:
    folder = runs.written(tmp_path / "run", runs.results()[:1])
    saved = load_file(checkpoint.found(folder)[0] / checkpoint.TENSORS)
    for name, value in runs.results()[0].round.params.items():
        assert torch.equal(saved[f"snapshot.params.{name}"], value)
