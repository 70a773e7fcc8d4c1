"""What a study is made of: names, folders, settings, and runs of equal shape."""

from dataclasses import replace
from pathlib import Path

import pytest

from anyfleet import methods
from anyfleet.core.method import Method
from anyfleet.errors import ConfigError, StoreError
from anyfleet.experiment import Experiment
from anyfleet.store import Terms
from anyfleet.store.environment import FILE
from anyfleet.study import (
    Cell,
    Means,
    PlannedRun,
    Setting,
    Sources,
    Study,
    cells_of,
    conduct,
    results,
    settings_of,
    settle,
    standing,
    state_file,
    stop,
)
from anyfleet.study.events import Advanced, Begun, Ended
from anyfleet.study.plan import written
from anyfleet.study.playing import Player, grouped, shape
from anyfleet.study.sources import combinations, short_keys
from tests.helpers.runs import EXPERIMENT, TASK, contents
from tests.study.test_study import RUN_FILE

SHORT = replace(EXPERIMENT, rounds=2, engine="auto")


def study_of(*names: str, seeds: tuple[int, ...] = (0,)) -> Study:
    return Study({name: Cell(SHORT, seeds) for name in names})


def test_keys_are_as_short_as_they_can_be() -> None:
    assert short_keys(["method.lr", "rounds"]) == {"method.lr": "lr", "rounds": "rounds"}
    keys = ["method.lr", "method.train.lr", "lr"]
    assert short_keys(keys) == {"method.lr": "method.lr", "method.train.lr": "train.lr", "lr": "lr"}


def test_lists_are_values_to_try() -> None:
    words = ["rounds=3", "method.lr=[0.1, 1e-3]", 'task.use=["a", "b"]', "widths=[[1.0, 0.5]]"]
    overrides, settings = settings_of(words)
    assert overrides == ["rounds=3"]
    assert settings == [
        Setting("method.lr", ("0.1", "0.001")),
        Setting("task.use", ('"a"', '"b"')),
        Setting("widths", ("[1.0, 0.5]",)),
    ]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["lr=[]"], "lr: the list has no values to try"),
        (["lr=[1, 1]"], "lr: the list has a value twice"),
        (["lr=[1, 1.0]"], "lr: the list has a value twice"),
        (["lr=[[1], [1.0]]"], "lr: the list has a value twice"),
        (["lr=[1]", "lr=[2]"], "lr: is given twice"),
        (["lr=[1]", "lr=3"], "lr: is given as a list to try and as one value"),
        (["lr=[1"], "lr: '[1' is neither a TOML value"),
        (["lr=[2020-01-01]"], "lr: TOML has no date"),
    ],
)
def test_lists_that_cannot_be_tried_are_refused(words: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        settings_of(words)
    assert told in str(refused.value)


def test_cells_are_all_combinations(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.toml").write_text(RUN_FILE)
    files = (tmp_path / "one.toml", tmp_path / "two.toml", tmp_path / "one.toml")
    settings = (Setting("method.lr", ("0.1", "0.2")), Setting("method.use", ('"heterofl"',)))
    found = cells_of(Sources(files, ("rounds=5",), settings, seeds=(7, 3)))
    assert list(found) == [
        f"{name}, lr={lr}, use=heterofl" for name in ("one", "two", "one-2") for lr in (0.1, 0.2)
    ]
    cell = found["two, lr=0.2, use=heterofl"]
    assert (cell.seeds, cell.experiment.seed, cell.experiment.rounds) == ((7, 3), 7, 5)
    assert cell.data()["method"]["train"]["lr"]["start"] == 0.2
    assert cell.left_open == ("engine", "device")
    assert cells_of(Sources(files[:1], ("seed=4",), seeds=2))["one"].seeds == (4, 5)


def test_labels_tell_values_apart() -> None:
    found = combinations((Setting("a.b", ('"1"', "1", '"x"')), Setting("c", ('"y"',))))
    assert [labels for labels, _ in found] == [('b="1"', "c=y"), ("b=1", "c=y"), ('b="x"', "c=y")]


def test_problems_are_told_once_for_all_cells(tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text(RUN_FILE)
    settings = (Setting("widths", ("1.0",)), Setting("method.lr", ("0.1", "0.2")))
    with pytest.raises(ConfigError) as refused:
        cells_of(Sources((tmp_path / "one.toml",), ("rouns=1",), settings))
    assert len(refused.value.problems) == 2
    assert "needs a list of lists: widths=[[…], […]]" in str(refused.value)


def test_an_unknown_key_is_no_question_of_lists(tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text(RUN_FILE)
    with pytest.raises(ConfigError, match="unknown key") as refused:
        cells_of(Sources((tmp_path / "one.toml",), (), (Setting("method.rl", ("0.1", "0.2")),)))
    assert len(refused.value.problems) == 1
    assert "list" not in str(refused.value)


def test_folders_are_safe_and_different() -> None:
    names = ("FedAvg", "fedavg", "a, lr=[1.0, 0.5]", "../x/y", "lock", "…", "z" * 300, "z" * 301)
    runs = study_of(*names).runs()
    folders = [str(run.folder.parent) for run in runs]
    assert folders[:6] == ["fedavg", "fedavg-2", "a_lr=1.0_0.5", "x-y", "lock-2", "run"]
    assert len(set(folders)) == len(folders)
    assert max(map(len, folders)) < 100
    assert all(run.folder.name == "seed-0" for run in runs)


def test_runs_with_the_same_task_follow_one_another() -> None:
    other = replace(SHORT, task=replace(TASK, server=10))
    study = Study({"a": Cell(SHORT, (0, 1)), "b": Cell(other, (0, 1)), "c": Cell(SHORT, (0, 1))})
    order = [(run.name, run.seed) for run in study.runs()]
    assert order == [("a", 0), ("c", 0), ("b", 0), ("a", 1), ("c", 1), ("b", 1)]


def test_a_study_is_read_as_it_was_written(tmp_path: Path) -> None:
    study = settle(study_of("a, lr=0.1", "b", seeds=(3, 5))).study
    assert {cell.experiment.device for cell in study.cells.values()} == {"cpu"}
    state_file.record(tmp_path, study)
    found = state_file.read(tmp_path)
    assert found == study
    assert list(state_file.differences(found, study)) == []
    asked = study_of("a, lr=0.1", "b", seeds=(3, 5))
    open_ = {
        name: replace(cell, left_open=("engine", "device"), experiment=replace(SHORT, seed=3))
        for name, cell in asked.cells.items()
    }
    stored = {name: replace(cell, left_open=("engine",)) for name, cell in found.cells.items()}
    told = list(state_file.differences(replace(found, cells=stored), replace(asked, cells=open_)))
    assert told == [
        f"{name}: device: {'cpu'!r} there, {'auto'!r} asked for".replace("'", '"')
        for name in ("a, lr=0.1", "b")
    ]


@pytest.mark.parametrize("text", ["", "format = 2", "format = 1\nkind = 3", "= ="])
def test_a_damaged_state_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "study.toml").write_text(text)
    with pytest.raises(StoreError, match=r"study\.toml"):
        state_file.read(tmp_path)


def test_a_study_is_the_same_whether_numbers_are_whole_or_not(tmp_path: Path) -> None:
    def study(method: Method) -> Study:
        return Study({"one": Cell(of_method(method), (0,))})

    asked = study(methods.heterofl())  # its first width is the integer 1
    state_file.record(tmp_path, asked)
    there = state_file.read(tmp_path)
    assert list(state_file.differences(there, asked)) == []
    others = {
        methods.heterofl(widths=(1.0, 0.5)): "[1.0, 0.5, 0.25, 0.125, 0.0625] there, [1.0, 0.5]",
        methods.heterofl(scaler=False): "true there, false asked for",
    }
    for method, told in others.items():
        (found,) = state_file.differences(there, study(method))
        assert told in found


def test_a_folder_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    home = tmp_path / "study"
    home.mkdir()
    state_file.record(home, settle(study_of("a")).study)
    (tmp_path / "elsewhere").mkdir()
    (home / "a").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="symbolic link"):
        state_file.read(home)


def test_runs_that_are_stopped_between_two_rounds_are_closed(tmp_path: Path) -> None:
    study = settle(study_of("a", "b")).study
    state_file.record(tmp_path, study)
    events = conduct(tmp_path, study, Means())
    assert isinstance(next(events), Begun)
    assert isinstance(next(events), Advanced)
    stop(events, KeyboardInterrupt())
    assert b'"interrupted"' in (tmp_path / "a/seed-0/summary.json").read_bytes()
    assert not standing(tmp_path, study).finished
    again = [event for event in conduct(tmp_path, study, Means()) if not isinstance(event, Begun)]
    assert [event.how for event in again if isinstance(event, Ended)] == ["finished"] * 2
    assert sum(isinstance(event, Advanced) for event in again) == 3  # one was there already
    runs, _ = results(tmp_path, study)
    assert {name: [*group] for name, group in runs.items()} == {"a": [0], "b": [0]}


def of_method(method: Method) -> Experiment:
    return replace(SHORT, method=method)


def test_runs_of_equal_shape_differ_in_seeds_and_numbers_of_the_method() -> None:
    fedavg = of_method(methods.fedavg(lr=0.1, count=3))
    same = (
        replace(fedavg, seed=3),
        of_method(methods.fedavg(lr=0.5, momentum=0.9, count=3)),
        of_method(methods.fedavg(lr=1, count=2, epochs=3, batch_size=7)),
    )
    others = (
        of_method(methods.heterofl(lr=0.1, count=3)),
        replace(fedavg, rounds=3),
        replace(fedavg, task=replace(TASK, server=10)),
    )
    expected = shape(written(fedavg))
    assert all(shape(written(each)) == expected for each in same)
    assert all(shape(written(each)) != expected for each in others)
    widths = [of_method(methods.heterofl(widths=(1.0, w), count=3, lr=0.1)) for w in (0.5, 0.25)]
    assert shape(written(widths[0])) != shape(written(widths[1]))
    cells = {"a": Cell(fedavg, (0, 1)), "b": Cell(others[0], (0,)), "c": Cell(same[2], (0,))}
    study = Study(cells)
    found = grouped(study, study.runs())
    assert [[str(run) for run in group] for group in found] == [
        ["a/seed-0", "c/seed-0", "a/seed-1"],
        ["b/seed-0"],
    ]


def test_runs_that_are_played_together_end_as_each_alone(tmp_path: Path) -> None:
    study = settle(study_of("a", seeds=(0, 1))).study
    for name, size in (("alone", 1), ("together", 2)):
        player = Player(tmp_path / name, study, Terms())
        runs = study.runs()
        events = [
            event
            for first in range(0, len(runs), size)
            for event in player.play(runs[first : first + size])
        ]
        assert [event.how for event in events if isinstance(event, Ended)] == ["finished"] * 2
    for seed in (0, 1):
        one, two = (contents(tmp_path / name / f"a/seed-{seed}") for name in ("alone", "together"))
        assert one == two


def test_a_run_that_somebody_made_longer_is_not_compared(tmp_path: Path) -> None:
    study = settle(study_of("a")).study
    for _ in conduct(tmp_path, study, Means()):
        pass
    shorter = {"a": replace(study.cells["a"], experiment=replace(SHORT, rounds=1))}
    with pytest.raises(StoreError, match="has 2 rounds, but the study compares runs of 1"):
        standing(tmp_path, replace(study, cells=shorter))
    assert (tmp_path / "a/seed-0" / FILE).exists()


def test_a_run_that_ended_at_its_score_is_not_played_again(tmp_path: Path) -> None:
    ending = replace(SHORT, stop_at=0.0)
    study = settle(Study({"a": Cell(SHORT, (0,)), "b": Cell(ending, (0,))})).study
    for _ in conduct(tmp_path, study, Means()):
        pass
    runs, _ = results(tmp_path, study)
    assert {name: len(seeds[0]) for name, seeds in runs.items()} == {"a": 2, "b": 1}
    assert not [*conduct(tmp_path, study, Means())]


def test_a_planned_run_has_a_name_for_people() -> None:
    assert str(PlannedRun("a, lr=0.1", 3, 5, Path("x"))) == "a, lr=0.1/seed-3"
