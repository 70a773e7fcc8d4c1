"""Experiments and the questions one asks of them afterwards."""

import warnings
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch.utils.data import TensorDataset

from anyfleet import config, methods, tasks
from anyfleet.analysis.summaries import summarise
from anyfleet.errors import AnyfleetWarning, ConfigError
from anyfleet.experiment import Experiment, build, load, play
from anyfleet.names import HOMES, Factory
from anyfleet.runtime import Limits, Threads
from anyfleet.tasks import zoo
from anyfleet.world import ColumnLoss, Fleet, Group
from tests.helpers import regression

MODEL = Factory.of(zoo.perceptron, hidden=(8,))
TASK = tasks.Embedded(model=MODEL, devices=4, limit=200, server=20)
SMALL = Experiment(TASK, methods.fedavg(count=2, lr=0.1), rounds=3)


def test_play_evaluates_when_due_and_at_the_end() -> None:
    experiment = replace(SMALL, rounds=4, evaluate_every=2, widths=(1.0, 0.5))
    points = [moment.record for moment in play(experiment)]
    assert [p.round_index for p in points] == [0, 1, 2, 3]
    assert [bool(p.scores) for p in points] == [True, False, True, True]
    assert {"accuracy", "accuracy@1", "accuracy@0.5"} <= points[-1].scores.keys()
    assert points[-1].scores["accuracy"] == points[-1].scores["accuracy@1"]
    for sooner, later in pairwise(points):
        assert later.time > sooner.time
        assert later.down > sooner.down


def regressed() -> tasks.Task:
    """Judged by the mean absolute error before anything else."""
    return tasks.Task.of(
        regression.net(),
        regression.data(),
        loss=tasks.squared_error,
        metrics={"mae": tasks.absolute_error, "mse": tasks.squared_error},
        split=tasks.Split(devices=4, test_share=0.2),
    )


def test_a_task_is_measured_by_its_own_first_metric() -> None:
    experiment = Experiment(
        regressed(), methods.fedavg(lr=0.05), rounds=3, evaluate_every=2, widths=(0.5, 1.0)
    )
    points = [moment.record for moment in play(experiment)]
    assert {point.metric for point in points} == {"mae"}
    assert [point.evaluated() for point in points] == [True, False, True]
    last = points[-1]
    assert last.score == last.scores["mae"] == last.at(0.5) == last.scores["mae@0.5"] > 0
    assert last.at(1.0) == last.scores["mae@1"] != last.score
    assert last.widths == (0.5, 1.0)


@pytest.mark.parametrize("second", ["top2_accuracy", "accuracy_of_two", "my accuracy"])
def test_widths_are_those_of_the_judging_metric_alone(second: str) -> None:
    """The name of another metric may end or begin like it."""
    task = tasks.Task.of(
        zoo.perceptron(8, 3, hidden=(4,)),
        TensorDataset(torch.randn(60, 8), torch.arange(60) % 3),
        metrics={"accuracy": tasks.accuracy, second: tasks.accuracy},
        split=tasks.Split(devices=2),
    )
    experiment = Experiment(task, methods.fedavg(lr=0.05), rounds=1, widths=(1.0, 0.5))
    (moment,) = play(experiment)
    assert moment.record.widths == (1.0, 0.5)
    assert list(summarise([moment.record]).others) == [second]


def test_devices_own_models_are_measured_by_the_tasks_own_metric() -> None:
    """Not by the shared model, which no one trains."""
    experiment = Experiment(regressed(), methods.local(lr=0.2), rounds=2, evaluate_every=5)
    first, last = (moment.record for moment in play(experiment))
    assert first.score == first.on_devices != first.scores["mae"]
    assert last.score == last.on_devices < first.score


def test_the_same_experiment_twice_gives_the_same_points() -> None:
    first, again = (
        [m.record.scores for m in play(SMALL)],
        [m.record.scores for m in play(SMALL)],
    )
    assert first == again
    assert first != [m.record.scores for m in play(replace(SMALL, seed=1))]


def test_a_built_task_stands_for_its_own_description() -> None:
    (moment,) = play(replace(SMALL, task=TASK.build(0), rounds=1))
    assert moment.record.scores == next(play(SMALL)).record.scores


def test_pooled_data_lie_on_one_device() -> None:
    apart, together = TASK.build(0), tasks.Pooled(TASK).build(0)
    assert together.devices == 1
    assert len(together.data(0)) == sum(len(apart.data(d)) for d in range(apart.devices))


def test_a_file_names_parts_shortly(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        'rounds = 7\n[task]\nuse = "Embedded"\npartition = { use = "Dirichlet", alpha = 1.0 }\n'
        'model = { use = "logistic" }\n[method]\nuse = "fedavg"\nlr = 0.2\n'
        '[method.aggregate]\nuse = "ServerOptimised"\noptimiser = { use = "ServerAdam" }\n'
        '[method.norm]\nuse = "Tracked"\n[engine]\nuse = "Stacked"\n'
    )
    experiment = load(file, ["rounds=2", "method.count=3"])
    assert experiment.rounds == 2
    assert experiment.method.train == methods.fedavg(lr=0.2).train
    assert experiment.method.select == methods.fedavg(count=3).select
    assert str(experiment.engine) == "Stacked(chunk=64)"
    assert "ServerAdam" in str(experiment.method.aggregate)


def test_a_file_says_how_long_an_update_may_be(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        'rounds = 1\n[task]\nuse = "Embedded"\ndevices = 4\nlimit = 200\nserver = 20\n'
        'model = { use = "perceptron", hidden = [8] }\n'
        '[method]\nuse = "fedavg"\ncount = 4\n[limits]\nnorm = 1e-6\n'
    )
    experiment = load(file)
    assert experiment.limits == Limits(norm=1e-6)
    (moment,) = play(experiment)
    assert moment.record.failures == 4
    assert all(lost.startswith("refused: norm: ") for lost in moment.round.ledger.failure)
    assert next(play(load(file, ["limits.norm=1e6"]))).record.replies == 4


def test_a_method_that_devices_would_refuse_is_a_problem_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        'rounds = 1\n[task]\nuse = "Embedded"\ndevices = 4\nlimit = 200\nserver = 20\n'
        'model = { use = "perceptron", hidden = [8] }\n[engine]\nuse = "Threads"\n'
        '[method]\nuse = "fedavg"\ncount = 2\n'
        'uplink = { use = "Qsgd", quantisation_levels = 2000000 }\n'
    )
    told = "method.uplink.quantisation_levels: 2000000 is above limits.count, which is 1000000"
    with pytest.raises(ConfigError, match=told):
        load(file)
    raised = load(file, ["limits.count=2000000"])
    with pytest.raises(ConfigError, match=told):  # also without a file
        build(replace(raised, limits=Limits()))
    assert next(play(raised)).record.replies == 2
    assert load(file, ["engine.use=Stacked"]).limits == Limits()


OWN = """
from dataclasses import dataclass
from anyfleet.parts.train import Gradient

@dataclass(frozen=True)
class Mine(Gradient):
    pass
"""


def test_threads_may_use_the_code_that_the_file_may_use(tmp_path: Path) -> None:
    (tmp_path / "own_trainer.py").write_text(OWN)
    file = tmp_path / "run.toml"
    file.write_text(
        'rounds = 1\n[allow]\npackages = ["own_trainer"]\n'
        '[task]\nuse = "Embedded"\ndevices = 4\nlimit = 200\nserver = 20\n'
        'model = { use = "perceptron", hidden = [8] }\n'
        '[method]\nuse = "fedavg"\ncount = 2\n[method.train]\nuse = "own_trainer:Mine"\n'
        '[engine]\nuse = "Threads"\n'
    )
    experiment = load(file, allow=["own_trainer"])
    assert experiment.engine == Threads(allow=("own_trainer",))
    (moment,) = play(experiment)
    assert moment.record.replies == 2
    both = load(file, ['engine.allow=["other", "own_trainer"]'], ["own_trainer", "other"])
    assert both.engine == Threads(allow=("other", "own_trainer"))
    with pytest.raises(ConfigError, match=r'method\.train: "own_trainer:Mine" is outside'):
        load(file, ['engine.allow=["other"]'], ["own_trainer", "other"])
    with pytest.raises(ConfigError, match=r"engine\.allow: asks for other\. .*--allow other"):
        load(file, ['engine.allow=["other", "own_trainer"]'], ["own_trainer"])


def test_an_experiment_with_a_built_task_is_told_briefly() -> None:
    experiment = replace(SMALL, task=TASK.build(0))
    assert "task=Task('Fashion-MNIST subset', devices=4, parameters=6370)" in repr(experiment)
    with pytest.raises(ConfigError, match=r"^task: a built task cannot .*anyfleet\.tasks\.Own\.$"):
        config.dump(experiment)


@pytest.mark.parametrize("home", sorted(set(HOMES.values())))
def test_homes_exist(home: str) -> None:
    assert __import__(home, fromlist=["__all__"]).__all__


def test_what_the_data_refuse_is_a_problem_of_the_file() -> None:
    greedy = replace(SMALL, task=replace(TASK, server=10_000))
    with pytest.raises(ConfigError, match="task: server asks for 10000 of 200"):
        build(greedy)


def test_more_devices_than_there_are_is_said_once_with_the_number_that_fits() -> None:
    many = replace(SMALL, method=methods.fedavg(count=50, lr=0.1), rounds=1)
    with pytest.warns(AnyfleetWarning, match=r"Uniform\.count is 50, .* 4 is the most") as told:
        (moment,) = play(many)
    assert moment.record.replies == 4
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build(replace(SMALL, method=methods.fedavg(count=4)))


def test_a_fleet_of_another_size_is_a_problem_of_the_file() -> None:
    crowded = replace(SMALL, fleet=Fleet((Group(count=3), Group(count=2))))
    with pytest.raises(ConfigError, match=r"^fleet: .*have 5 devices but the task has 4"):
        build(crowded)
    with pytest.raises(ConfigError, match=r"^fleet: "):
        next(play(crowded, TASK.build(0)))


LOSSY = Fleet((Group(), Group(column_loss=ColumnLoss(error=0.1))))


@pytest.mark.parametrize(("send", "cache"), [("delta", True), ("weights", False)])
def test_links_that_lose_columns_need_a_cache(send: Literal["delta"], cache: bool) -> None:
    method = replace(SMALL.method, send=send, cache=cache)
    with pytest.raises(ConfigError, match=r'^method\.send: .*add send = "weights" and cache = tr'):
        build(replace(SMALL, method=method, fleet=LOSSY))
    build(replace(SMALL, method=method))
    build(replace(SMALL, fleet=LOSSY, method=replace(method, send="weights", cache=True)))


def test_a_file_is_refused_for_its_links_before_anything_is_built(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        '[task]\nuse = "Embedded"\n[method]\nuse = "fedavg"\n'
        "[[fleet.groups]]\ncolumn_loss = { error = 0.1 }\n"
    )
    with pytest.raises(ConfigError) as caught:
        load(file)
    assert [problem.path for problem in caught.value.problems] == ["method.send"]
    assert load(file, ["method.send=weights", "method.cache=true"]).method.cache


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rounds", 0),
        ("evaluate_every", 0),
        ("widths", ()),
        ("widths", (1.5,)),
        ("details", ("classes", "colours")),
    ],
)
def test_impossible_experiments_are_refused(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        replace(SMALL, **{field: value})  # type: ignore[arg-type]
