"""A run that goes on: identical, from the last checkpoint that is whole, under the same terms."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from anyfleet import codec as codecs
from anyfleet import methods
from anyfleet.cli.methods import known_methods
from anyfleet.codec import ErrorFeedback, Fgc, Hq, Qsgd, Raw, Stc, TopK, Uveq
from anyfleet.coding import Codec
from anyfleet.errors import StoreError
from anyfleet.loop import run
from anyfleet.method import Method
from anyfleet.runtime import Simulated
from anyfleet.schedule import Buffered
from anyfleet.store import (
    Document,
    Recording,
    Terms,
    checkpoint,
    decode,
    encode,
    environment,
    finished,
    read_points,
    reopen,
)
from anyfleet.store.disk import DiskError
from anyfleet.study import play
from tests import small
from tests.store import runs
from tests.store.test_disk import room


def numbers(folder: Path) -> list[int]:
    return [int(path.name) for path in checkpoint.found(folder)]


def listed(folder: Path) -> list[str]:
    return sorted(each.name for each in (folder / "checkpoints").iterdir())


def append(recording: Recording, steps: int) -> None:
    for moment in runs.moments()[:steps]:
        recording.append(moment)


@pytest.mark.parametrize("steps", range(6))
def test_a_run_goes_on_as_if_nothing_had_happened(tmp_path: Path, steps: int) -> None:
    folder = runs.written(tmp_path / "run", runs.moments()[:steps])
    assert runs.contents(runs.finished(folder)) == runs.whole(tmp_path / "whole")
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["ended"], summary["result"]["steps"]) == ("finished", 5)


def test_the_last_two_checkpoints_are_kept(tmp_path: Path) -> None:
    folder = runs.written(tmp_path / "run", runs.moments()[:4])
    assert numbers(folder) == [4, 3]
    assert listed(folder) == ["000003", "000004"]


def test_checkpoints_come_every_so_many_steps_and_at_the_end(tmp_path: Path) -> None:
    with Recording(tmp_path, runs.EXPERIMENT, every=2) as recording:
        seen = []
        for moment in runs.moments():
            recording.append(moment)
            seen.append(numbers(tmp_path))
    assert seen == [[], [2], [2], [4, 2], [4, 2]]
    assert numbers(tmp_path) == [5, 4]


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
    for moment in runs.moments():
        clock[0] += 8.0
        recording.append(moment)
        seen.append(max(numbers(tmp_path)))
    # One took a second: the next is due when twenty more have passed.
    assert seen == [1, 1, 1, 4, 4]


def test_what_came_after_the_checkpoint_is_played_again(tmp_path: Path) -> None:
    folder = runs.written(tmp_path / "run", runs.moments()[:4], every=3)
    assert (len(read_points(folder)), numbers(folder)) == (4, [3])
    with (folder / "points.jsonl").open("ab") as out:
        out.write(b'{"half":')
    opened = reopen(folder, Terms())
    assert len(opened.past.points) == len(read_points(folder)) == 3
    opened.past.lock.release()
    assert runs.contents(runs.finished(folder)) == runs.whole(tmp_path / "whole")


def test_a_resumed_run_can_be_resumed(tmp_path: Path) -> None:
    folder = runs.written(tmp_path / "run", runs.moments()[:1])
    for _ in range(3):
        opened = reopen(folder, Terms())
        recording = Recording(folder, opened.experiment, past=opened.past, every=1)
        recording.append(next(play(opened.experiment, opened.task, resume=opened.past.state)))
        opened.past.lock.release()
    assert numbers(folder) == [4, 3]
    assert runs.contents(runs.finished(folder)) == runs.whole(tmp_path / "whole")


# --- every method -----------------------------------------------------------------------------


CODECS = [Fgc(), Hq(), Qsgd(), Raw(), Stc(), TopK(), Uveq(), ErrorFeedback()]


@pytest.mark.parametrize("name", known_methods())
def test_the_state_of_every_method_comes_back(name: str) -> None:
    assert_it_comes_back(known_methods()[name].make())


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: type(codec).__name__)
def test_the_state_of_every_codec_comes_back(codec: Codec) -> None:
    assert {type(each).__name__ for each in CODECS} >= set(codecs.__all__) - {"Nothing", "Plain"}
    schedule = Buffered(concurrency=4, size=2)  # some answers are known, and have not arrived
    assert_it_comes_back(replace(methods.heterofl(lr=0.1), schedule=schedule, uplink=codec))


def assert_it_comes_back(method: Method) -> None:
    task = small.task()
    runtime = Simulated(task, small.world(task), 0)
    steps = run(method, task, runtime, 0)
    next(steps)
    state = {"loop": next(steps).snapshot, "fleet": runtime.save()}
    document = encode(state, checkpoint.SURROUNDINGS)
    flat = {key: block.reshape(-1).clone() for key, block in document.blocks.items()}
    known = {"world": small.world(task), "task": task, "blueprint": task.blueprint}
    text = msgspec.json.encode(document.root)
    back = decode(Document(msgspec.json.decode(text), flat), known)
    again = encode(back, checkpoint.SURROUNDINGS)
    assert msgspec.json.encode(again.root) == text
    assert again.blocks.keys() == document.blocks.keys()
    for key, block in document.blocks.items():
        assert torch.equal(again.blocks[key], block), key


# --- damage -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [checkpoint.MANIFEST, checkpoint.STATE, checkpoint.TENSORS])
@pytest.mark.parametrize("damage", ["flipped", "torn", "missing"])
def test_a_damaged_checkpoint_is_noticed_and_the_one_before_is_used(
    tmp_path: Path, name: str, damage: str
) -> None:
    folder = runs.written(tmp_path / "run", runs.moments()[:3])
    file = folder / "checkpoints" / "000003" / name
    content = bytearray(file.read_bytes())
    if damage == "flipped":
        content[len(content) // 2] ^= 1
    file.write_bytes(content[: -len(content) // 3] if damage == "torn" else content)
    if damage == "missing":
        file.unlink()
    opened = reopen(folder, Terms())
    opened.past.lock.release()
    assert opened.past.progress.step == 2
    assert "000003" in opened.remarks[0]
    assert "is damaged" in opened.remarks[0]
    assert runs.contents(runs.finished(folder)) == runs.whole(tmp_path / "whole")
    assert numbers(folder) == [5, 4]


def test_a_log_that_lost_lines_makes_the_checkpoint_useless(tmp_path: Path) -> None:
    folder = runs.written(tmp_path / "run", runs.moments()[:3])
    log = folder / "points.jsonl"
    log.write_bytes(log.read_bytes()[:-3])
    opened = reopen(folder, Terms())
    opened.past.lock.release()
    assert opened.past.progress.step == 2
    assert "points.jsonl is damaged" in opened.remarks[0]


def test_when_no_checkpoint_is_whole_nothing_is_touched(tmp_path: Path) -> None:
    folder = runs.written(tmp_path / "run", runs.moments()[:3])
    for path in checkpoint.found(folder):
        (path / checkpoint.STATE).write_bytes(b"{}")
    before = (folder / "points.jsonl").read_bytes()
    with pytest.raises(StoreError, match=r"no checkpoint can be used(.|\n)*remove .*checkpoints"):
        reopen(folder, Terms())
    assert (folder / "points.jsonl").read_bytes() == before
    shutil.rmtree(folder / "checkpoints")
    assert runs.contents(runs.finished(folder)) == runs.whole(tmp_path / "whole")


def test_what_a_killed_process_left_half_written_is_removed(tmp_path: Path) -> None:
    folder = runs.written(tmp_path / "run", runs.moments()[:2])
    left = folder / "checkpoints" / ".000003.part"
    left.mkdir()
    (left / checkpoint.STATE).write_bytes(b'{"half')
    runs.finished(folder)
    assert listed(folder) == ["000004", "000005"]


def test_another_format_is_refused(tmp_path: Path) -> None:
    folder = runs.written(tmp_path / "run", runs.moments()[:1])
    (path,) = checkpoint.found(folder)
    manifest = json.loads((path / checkpoint.MANIFEST).read_text())
    (path / checkpoint.MANIFEST).write_text(json.dumps(manifest | {"format": 2}))
    with pytest.raises(StoreError, match="has format 2, but this version reads 1 only"):
        reopen(folder, Terms())


def test_the_model_can_be_read_from_a_checkpoint_without_anyfleet(tmp_path: Path) -> None:
    folder = runs.written(tmp_path / "run", runs.moments()[:1])
    saved = load_file(checkpoint.found(folder)[0] / checkpoint.TENSORS)
    for name, value in runs.moments()[0].step.params.items():
        assert torch.equal(saved[f"snapshot.params.{name}"], value)


# --- terms ------------------------------------------------------------------------------------


def changed(folder: Path, **conditions: Any) -> None:
    recorded = environment.read(folder)
    other = recorded.conditions | conditions
    environment.record(folder, msgspec.structs.replace(recorded, conditions=other))


def test_every_other_condition_is_told_and_must_be_accepted(tmp_path: Path) -> None:
    folder = runs.written(tmp_path / "run", runs.moments()[:2])
    changed(folder, torch="1.0", processor="abacus")
    before = runs.moments()[1].point
    with pytest.raises(StoreError, match=r"torch: 1.0 then, (.|\n)*processor: abacus then") as told:
        reopen(folder, Terms())
    assert "--not-identical" in str(told.value)
    assert read_points(folder)[-1].step == before.step
    opened = reopen(folder, Terms(not_identical=True))
    opened.past.lock.release()
    assert "Not identical from here on: torch: 1.0 then" in opened.remarks[-1]
    recorded = environment.read(folder)
    assert [change.step for change in recorded.changes] == [2]
    assert recorded.conditions["torch"] == torch.__version__
    reopen(folder, Terms()).past.lock.release()  # accepted once


def test_what_a_process_can_choose_is_chosen_as_it_was(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    folder = runs.written(tmp_path / "run", runs.moments()[:1])
    changed(folder, threads=threads + 1, products="high")
    try:
        opened = reopen(folder, Terms())
        opened.past.lock.release()
        assert torch.get_num_threads() == threads + 1
        assert torch.get_float32_matmul_precision() == "high"
        environment.adopt(environment.read(folder).conditions | {"precision": "float64"})
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision("highest")
    assert not opened.remarks


def test_a_changed_configuration_is_refused(tmp_path: Path) -> None:
    folder = runs.written(tmp_path / "run", runs.moments()[:2])
    file = folder / "config.toml"
    text = file.read_text()
    assert text.count("concurrency = 4") == 1
    file.write_text(text.replace("concurrency = 4", "concurrency = 3"))
    with pytest.raises(StoreError, match=r"config.toml: changed since the run began"):
        reopen(folder, Terms())
    reopen(folder, Terms(not_identical=True)).past.lock.release()


def test_another_task_of_the_same_configuration_is_noticed(tmp_path: Path) -> None:
    folder = runs.written(tmp_path / "run", runs.moments()[:1])
    changed(folder, task="something else")
    with pytest.raises(StoreError, match="task: something else then"):
        reopen(folder, Terms())


def test_a_run_can_become_longer(tmp_path: Path) -> None:
    folder = runs.written(tmp_path / "run", runs.moments())
    runs.finished(folder)
    assert finished(folder, Terms())
    assert not finished(folder, Terms(rounds=7))
    runs.finished(folder, Terms(rounds=7))
    longer = replace(runs.EXPERIMENT, rounds=7)
    whole = tmp_path / "whole"
    whole.mkdir()
    with Recording(whole, longer) as recording:
        for moment in play(longer):
            recording.append(moment)
    assert runs.contents(folder) == runs.contents(whole)
    assert (folder / "config.toml").read_text() == (whole / "config.toml").read_text()
    assert finished(folder, Terms())
    with pytest.raises(StoreError, match="has 7 steps already"):
        reopen(folder, Terms(rounds=6))


def test_a_run_without_checkpoints_is_not_resumed(tmp_path: Path) -> None:
    folder = runs.written(tmp_path / "run", runs.moments()[:2], every=0)
    assert not (folder / "checkpoints").exists()
    with pytest.raises(StoreError, match=r"without checkpoints(.|\n)*anyfleet run"):
        reopen(folder, Terms())
    assert len(read_points(folder)) == 2


def test_other_folders_are_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(StoreError, match=r"has no environment.json"):
            reopen(folder, Terms())
    (tmp_path / environment.FILE).write_text("{")
    with pytest.raises(StoreError, match="is damaged"):
        reopen(tmp_path, Terms())


# --- errors while it runs ---------------------------------------------------------------------


def test_a_folder_in_use_is_not_touched(tmp_path: Path) -> None:
    with Recording(tmp_path, runs.EXPERIMENT, every=1) as recording:
        recording.append(runs.moments()[0])
        with pytest.raises(StoreError, match=f"in use by process {os.getpid()}"):
            reopen(tmp_path, Terms())
        recording.append(runs.moments()[1])
    assert len(read_points(tmp_path)) == 2


def test_a_folder_that_has_a_run_is_not_written_over(tmp_path: Path) -> None:
    folder = runs.written(tmp_path / "run", runs.moments()[:1])
    with pytest.raises(StoreError, match="has a run already"):
        Recording(folder, runs.EXPERIMENT)
    assert len(read_points(folder)) == 1
    assert runs.contents(runs.finished(folder)) == runs.whole(tmp_path / "whole")


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
    recording.append(runs.moments()[0])
    folder.rename(tmp_path / "elsewhere")
    with pytest.raises(DiskError, match="Bring it back, then go on with"), recording:
        recording.append(runs.moments()[1])
    assert not folder.exists()
    (tmp_path / "elsewhere").rename(folder)
    assert runs.contents(runs.finished(folder)) == runs.whole(tmp_path / "whole")


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_run_that_breaks_off_has_a_checkpoint_of_its_last_step(
    tmp_path: Path, error: type[BaseException]
) -> None:
    recording = Recording(tmp_path, runs.EXPERIMENT, every=4)
    append(recording, 3)
    with pytest.raises(error), recording:
        raise error
    assert numbers(tmp_path) == [3]
    assert not finished(tmp_path, Terms())
    assert runs.contents(runs.finished(tmp_path)) == runs.whole(tmp_path / "whole")


class Foreign:
    """What nobody knows how to write."""


def test_a_state_that_cannot_be_written_is_told_with_its_place(tmp_path: Path) -> None:
    (first, *_) = runs.moments()
    states = {**first.step.snapshot.states, "select": {"seen": Foreign()}}
    snapshot = replace(first.step.snapshot, states=states)
    moment = replace(first, step=replace(first.step, snapshot=snapshot))
    told = "snapshot.states.select.seen: a `Foreign`(.|\n)*--checkpoint-every 0"
    with pytest.raises(StoreError, match=told), Recording(tmp_path, runs.EXPERIMENT) as recording:
        recording.append(moment)
    assert (tmp_path / "model.safetensors").exists()
    (tmp_path / "other").mkdir()
    with Recording(tmp_path / "other", runs.EXPERIMENT, every=0) as recording:
        recording.append(moment)
