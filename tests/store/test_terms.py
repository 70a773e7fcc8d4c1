"""Under which conditions a run may go on, to which end, and from which folders."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from anyfleet.errors import StoreError
from anyfleet.experiment import play
from anyfleet.store import Recording, Terms, environment, finished, read_rounds, reopen
from tests.helpers import runs


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that died after a step; to be left as it is."""
    return runs.written(tmp_path_factory.mktemp("killed") / "run", runs.results()[:1])


def changed(folder: Path, **conditions: Any) -> None:
    recorded = environment.read(folder)
    other = msgspec.structs.replace(recorded.conditions, **conditions)
    environment.record(folder, msgspec.structs.replace(recorded, conditions=other))


def test_every_other_condition_is_told_and_must_be_accepted(tmp_path: Path) -> None:
    folder = runs.written(tmp_path / "run", runs.results()[:2])
    changed(folder, torch="1.0", processor="abacus")
    before = runs.results()[1].record
    with pytest.raises(StoreError, match=r"torch: 1.0 then, (.|\n)*processor: abacus then") as told:
        reopen(folder, Terms())
    assert "--not-identical" in str(told.value)
    assert read_rounds(folder)[-1].round_index == before.round_index
    opened = reopen(folder, Terms(not_identical=True))
    opened.past.lock.release()
    assert "Not identical from here on: torch: 1.0 then" in opened.remarks[-1]
    recorded = environment.read(folder)
    assert [change.rounds for change in recorded.changes] == [2]
    assert recorded.conditions.torch == torch.__version__
    reopen(folder, Terms()).past.lock.release()  # accepted once


def test_what_a_process_can_choose_is_chosen_as_it_was(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    folder = runs.written(tmp_path / "run", runs.results()[:1])
    changed(folder, threads=threads + 1, products="high")
    try:
        opened = reopen(folder, Terms())
        opened.past.lock.release()
        assert torch.get_num_threads() == threads + 1
        assert torch.get_float32_matmul_precision() == "high"
        conditions = environment.read(folder).conditions
        environment.adopt(msgspec.structs.replace(conditions, precision="float64"))
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision("highest")
    assert not opened.remarks


def test_a_changed_configuration_is_refused(tmp_path: Path) -> None:
    folder = runs.written(tmp_path / "run", runs.results()[:2])
    file = folder / "config.toml"
    text = file.read_text()
    assert text.count("concurrency = 4") == 1
    file.write_text(text.replace("concurrency = 4", "concurrency = 3"))
    with pytest.raises(StoreError, match=r"config.toml: changed since the run began"):
        reopen(folder, Terms())
    reopen(folder, Terms(not_identical=True)).past.lock.release()


def test_the_digest_of_a_configuration_counts_all_but_the_rounds() -> None:
    data: dict[str, Any] = {
        "seed": 3,
        "rounds": 10,
        "method": {"use": "fedavg", "lr": 0.1},
        "task": {"limit": 9},
    }
    own = environment.digest(data)
    assert environment.digest({**data, "rounds": 20}) == own
    assert environment.digest(dict(reversed(data.items()))) == own
    others: list[dict[str, Any]] = [
        {"seed": 4},
        {"method": {"use": "fedavg", "lr": 0.2}},
        {"task": {"limit": 8}},
    ]
    digests = {environment.digest({**data, **other}) for other in others}
    assert len(digests | {own}) == 1 + len(others)


def test_another_task_of_the_same_configuration_is_noticed(tmp_path: Path) -> None:
    folder = runs.written(tmp_path / "run", runs.results()[:1])
    changed(folder, task="something else")
    with pytest.raises(StoreError, match="task: something else then"):
        reopen(folder, Terms())


def test_a_run_can_become_longer(tmp_path: Path) -> None:
    folder = runs.written(tmp_path / "run", runs.results())
    runs.finished(folder)
    assert finished(folder, Terms())
    assert not finished(folder, Terms(rounds=7))
    runs.finished(folder, Terms(rounds=7))
    longer = replace(runs.EXPERIMENT, rounds=7)
    whole = tmp_path / "whole"
    whole.mkdir()
    with Recording(whole, longer) as recording:
        for result in play(longer):
            recording.append(result)
    assert runs.contents(folder) == runs.contents(whole)
    assert (folder / "config.toml").read_text() == (whole / "config.toml").read_text()
    assert finished(folder, Terms())
    with pytest.raises(StoreError, match="already has 7 rounds"):
        reopen(folder, Terms(rounds=6))


def test_a_run_without_checkpoints_is_not_resumed(tmp_path: Path) -> None:
    folder = runs.written(tmp_path / "run", runs.results()[:2], every=0)
    assert not (folder / "checkpoints").exists()
    with pytest.raises(StoreError, match=r"without checkpoints(.|\n)*anyfleet run"):
        reopen(folder, Terms())
    assert len(read_rounds(folder)) == 2


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"has no environment.json"):
        reopen(tmp_path, Terms())
    for none in (tmp_path / "none", tmp_path / "none" / "run"):
        with pytest.raises(StoreError, match=f"{none} does not exist"):
            reopen(none, Terms())
    (tmp_path / environment.FILE).mkdir()
    with pytest.raises(StoreError, match=r"environment.json cannot be read: Is a directory"):
        reopen(tmp_path, Terms())


def test_files_are_no_folders(tmp_path: Path) -> None:
    plan, other = tmp_path / "plan.toml", tmp_path / "rounds.jsonl"
    for file in (plan, other):
        file.touch()
    with pytest.raises(StoreError, match=f"{plan} is a file(.|\n)*anyfleet run {plan}"):
        reopen(plan, Terms())
    with pytest.raises(StoreError, match="is a file; name the folder of a run") as told:
        reopen(other, Terms())
    assert "anyfleet run" not in str(told.value)
    with pytest.raises(StoreError, match="does not exist"):
        reopen(plan / "run", Terms())


def without(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda conditions: conditions.pop(name)


def with_other(**values: Any) -> Callable[[dict[str, Any]], object]:
    return lambda conditions: conditions.update(values)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (without("threads"), "threads"),
        (without("torch"), "torch"),
        (with_other(threads=0), "threads"),
        (with_other(threads="four"), "threads"),
        (with_other(threads=1 << 40), "threads"),
        (with_other(precision="float7"), "float7"),
        (with_other(precision="nn"), "nn"),
        (with_other(products="some"), "some"),
    ],
)
def test_a_damaged_record_is_told_and_nothing_is_set(
    killed: Path, change: Callable[[dict[str, Any]], object], told: str
) -> None:
    file = killed / environment.FILE
    before = file.read_bytes()
    recorded = json.loads(before)
    change(recorded["conditions"])
    file.write_text(json.dumps(recorded))
    threads = torch.get_num_threads()
    try:
        with pytest.raises(StoreError, match=f"environment.json is damaged: .*{told}"):
            reopen(killed, Terms())
    finally:
        file.write_bytes(before)
    assert torch.get_num_threads() == threads


def test_half_a_record_is_told(tmp_path: Path) -> None:
    (tmp_path / environment.FILE).write_text("{")
    with pytest.raises(StoreError, match="is damaged"):
        reopen(tmp_path, Terms())
