"""Run folders: complete, never overwritten, whole after any end."""

import json
import math
import signal
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from anyfleet import config, methods, tasks
from anyfleet.analysis.breakdown import Breakdown
from anyfleet.arrays import join
from anyfleet.core.ledger import Ledger
from anyfleet.errors import StoreError
from anyfleet.experiment import Experiment, RoundResult, play
from anyfleet.names import Factory
from anyfleet.papers import bibliography, papers_of
from anyfleet.parts.norm import PerWidth
from anyfleet.stopping import terminable
from anyfleet.store import Recording, claim, describe, fresh, read_ledger, read_rounds
from anyfleet.store.disk import Log
from anyfleet.tasks import zoo
from anyfleet.world import levels

MODEL = Factory.of(zoo.perceptron, features=60, hidden=(8,))
TASK = tasks.Synthetic(MODEL, tasks.Generator(devices=4, samples=40), server=20)
SMALL = Experiment(TASK, methods.heterofl(count=2, lr=0.1), rounds=2)


@pytest.fixture(scope="module")
def results() -> list[RoundResult]:
    return list(play(SMALL))


def lines(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_new_folder_gets_a_number_when_the_name_is_taken(tmp_path: Path) -> None:
    made = [fresh(tmp_path / "runs", "demo") for _ in range(3)]
    assert [path.name for path in made] == ["demo", "demo-2", "demo-3"]
    assert all(path.is_dir() for path in made)


def test_a_named_folder_must_be_new_or_empty(tmp_path: Path) -> None:
    assert claim(tmp_path / "a" / "b").is_dir()
    assert claim(tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").touch()
    for taken in (tmp_path, tmp_path / "file"):
        with pytest.raises(FileExistsError, match="not empty"):
            claim(taken)


def test_a_finished_run_is_complete(tmp_path: Path, results: list[RoundResult]) -> None:
    with Recording(tmp_path, SMALL) as recording:
        for result in results:
            recording.append(result)
            # On disk after every step, not only at the end.
            assert len(lines(tmp_path / "rounds.jsonl")) == result.record.round_index + 1
    # By their text: NaN is not equal to itself.
    assert repr(read_rounds(tmp_path)) == repr(tuple(recording.records))
    rows = [row for result in results for row in result.round.ledger.as_dicts()]
    assert lines(tmp_path / "ledger.jsonl") == json.loads(msgspec.json.encode(rows))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["ended"] == "finished"
    assert summary["result"]["rounds"] == 2
    assert summary["threads"] == torch.get_num_threads()
    assert not list(tmp_path.glob(".*")), "a file was left half-written"
    assert (tmp_path / "papers.bib").read_text() == bibliography(papers_of(SMALL.method))


def test_the_saved_model_is_a_state_dict_of_the_module(
    tmp_path: Path, results: list[RoundResult]
) -> None:
    with Recording(tmp_path, SMALL) as recording:
        recording.append(results[-1])
    module = MODEL.make()
    module.load_state_dict(load_file(tmp_path / "model.safetensors"))
    for name, value in module.named_parameters():
        assert torch.equal(value, results[-1].round.params[name])


def test_normalisation_by_width_adds_names_to_the_saved_model(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    data = tasks.Data(torch.randn(60, 4), torch.arange(60) % 2)
    spec = tasks.Own(Factory.of(zoo.logistic), Factory.of(zoo.logistic))  # only to be written down
    method = replace(methods.heterofl(count=4, widths=(1.0, 0.5)), norm=PerWidth())
    experiment = Experiment(spec, method, levels(speeds=(2e9, 1e9)), rounds=1)
    task = tasks.Task.of(module, data, split=tasks.Split(devices=4))
    with Recording(tmp_path, experiment) as recording:
        recording.append(next(play(experiment, task)))
    saved = load_file(tmp_path / "model.safetensors")
    extra = {name for name in saved if "@" in name}
    kinds = ("weight", "bias", "running_mean", "running_var")
    assert {name.partition("@")[0] for name in extra} == {f"1.{kind}" for kind in kinds}
    module.load_state_dict({name: saved[name] for name in saved.keys() - extra})


@pytest.mark.parametrize(
    ("error", "ended"), [(KeyboardInterrupt, "interrupted"), (RuntimeError, "failed")]
)
def test_a_broken_run_keeps_what_it_has(
    tmp_path: Path, results: list[RoundResult], error: type[BaseException], ended: str
) -> None:
    def play_on() -> None:
        with Recording(tmp_path, SMALL) as recording:
            recording.append(results[0])
            raise error

    with pytest.raises(error):
        play_on()
    assert len(read_rounds(tmp_path)) == 1
    assert (tmp_path / "model.safetensors").is_file()
    assert json.loads((tmp_path / "summary.json").read_text())["ended"] == ended


def test_a_run_without_a_step_has_no_model(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), Recording(tmp_path, SMALL):
        raise KeyboardInterrupt
    assert not (tmp_path / "model.safetensors").exists()
    assert json.loads((tmp_path / "summary.json").read_text())["result"] is None
    assert read_rounds(tmp_path) == ()


def test_numbers_that_are_none_come_back_as_such(
    tmp_path: Path, results: list[RoundResult]
) -> None:
    unknown = replace(results[0].record, loss=math.nan, scores={"accuracy": math.nan})
    with Recording(tmp_path, SMALL) as recording:
        recording.append(replace(results[0], record=unknown))
    (back,) = read_rounds(tmp_path)
    assert math.isnan(back.loss)
    assert math.isnan(back.scores["accuracy"])


def test_the_ledger_comes_back_as_it_was(tmp_path: Path, results: list[RoundResult]) -> None:
    with Recording(tmp_path, SMALL) as recording:
        for result in results:
            recording.append(result)
    written, back = join([result.round.ledger for result in results]), read_ledger(tmp_path)
    assert np.isnan(written.frequency).all()  # so that a number that is none is among them
    assert len(back) == len(written) > 0
    for each in fields(Ledger):
        before, after = getattr(written, each.name), getattr(back, each.name)
        assert type(before) is type(after), each.name
        np.testing.assert_array_equal(before, after, err_msg=each.name)
        if each.name not in ("kind", "failure"):
            assert before.dtype == after.dtype, each.name


def test_a_run_without_a_step_has_no_points_and_an_empty_ledger(tmp_path: Path) -> None:
    with Recording(str(tmp_path), SMALL):
        pass
    assert read_rounds(tmp_path) == ()
    assert len(read_ledger(str(tmp_path))) == 0


@pytest.mark.parametrize("read", [read_rounds, read_ledger])
def test_what_is_no_run_is_refused(tmp_path: Path, read: Callable[[str | Path], object]) -> None:
    with pytest.raises(StoreError, match=r"nowhere does not exist\. Name the folder of a run"):
        read(tmp_path / "nowhere")
    (tmp_path / "a.toml").touch()
    with pytest.raises(StoreError, match="is a file"):
        read(str(tmp_path / "a.toml"))
    with pytest.raises(
        StoreError, match=r"is not the folder of a run: it has no environment\.json"
    ):
        read(tmp_path)
    claim(tmp_path / "small/seed-0")
    with Recording(tmp_path / "small/seed-0", SMALL):
        pass
    with pytest.raises(StoreError, match=r"name one, such as .*small.seed-0"):
        read(str(tmp_path))


@pytest.mark.parametrize(
    ("read", "name"), [(read_rounds, "rounds.jsonl"), (read_ledger, "ledger.jsonl")]
)
@pytest.mark.parametrize("line", ["{", "[1]", "\xff", "[" * 5000])
def test_a_damaged_line_is_named(
    tmp_path: Path,
    results: list[RoundResult],
    read: Callable[[str | Path], object],
    name: str,
    line: str,
) -> None:
    with Recording(tmp_path, SMALL) as recording:
        recording.append(results[0])
    before = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(before + line.encode("latin-1") + b"\n")
    number = before.count(b"\n") + 1
    with pytest.raises(StoreError, match=rf"{name}, line {number}, is damaged"):
        read(tmp_path)


def test_lines_with_other_fields_are_damaged(tmp_path: Path) -> None:
    with Recording(tmp_path, SMALL):
        pass
    (tmp_path / "rounds.jsonl").write_text('{"scores": {}, "round_index": 0, "colour": 3}\n')
    with pytest.raises(StoreError, match=r"rounds\.jsonl, line 1, is damaged"):
        read_rounds(tmp_path)
    (tmp_path / "ledger.jsonl").write_text('{"order": "first"}\n')
    with pytest.raises(StoreError, match=r"ledger\.jsonl is damaged, or another version"):
        read_ledger(tmp_path)


def test_a_record_taken_apart_comes_back(tmp_path: Path, results: list[RoundResult]) -> None:
    parts = Breakdown(0.5, (0.5, math.nan), (math.nan, 1.0), {"phones": 0.25, "none": math.nan})
    with Recording(tmp_path, SMALL) as recording:
        recording.append(replace(results[0], record=replace(results[0].record, details=(parts,))))
    assert repr(read_rounds(tmp_path)[0].details) == repr((parts,))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_until_a_step_is_on_disk(
    tmp_path: Path,
    results: list[RoundResult],
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
) -> None:
    write = Log.append

    def interrupted(log: Log, rows: Iterable[object]) -> None:
        signal.raise_signal(number)
        write(log, rows)

    monkeypatch.setattr(Log, "append", interrupted)
    with (
        terminable(),
        pytest.raises(KeyboardInterrupt),
        Recording(tmp_path, SMALL) as recording,
    ):
        recording.append(results[0])
    assert json.loads((tmp_path / "summary.json").read_text())["ended"] == "interrupted"
    assert len(read_rounds(tmp_path)) == 1
    assert len(lines(tmp_path / "ledger.jsonl")) == len(results[0].round.ledger)


def test_a_stop_that_python_lost_is_obeyed_after_the_round(
    tmp_path: Path, results: list[RoundResult]
) -> None:
    with terminable():
        with suppress(KeyboardInterrupt):  # as Python sometimes does by itself
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt), Recording(tmp_path, SMALL) as recording:
            recording.append(results[0])
    assert json.loads((tmp_path / "summary.json").read_text())["ended"] == "interrupted"
    assert len(read_rounds(tmp_path)) == 1


@pytest.mark.parametrize(
    "experiment",
    [
        SMALL,
        replace(SMALL, method=methods.local(), task=tasks.Pooled(TASK), widths=(1.0, 0.5)),
        replace(SMALL, method=methods.fedprox(seconds=1.5), seed=7),
    ],
)
def test_the_config_of_a_folder_gives_the_same_experiment(
    tmp_path: Path, experiment: Experiment
) -> None:
    file = tmp_path / "config.toml"
    file.write_text(describe(experiment, ["mine"]))
    source = config.read(file)
    assert (source.asked, source.allow) == (("mine",), ())
    assert source.load(Experiment) == experiment
    # Complete: also what had its default value.
    assert source.data["evaluate_every"] == "auto"
    assert source.data["fleet"]["counting"] == "flops"
    assert source.data["fleet"]["groups"][0]["mortality"] == 0.0
