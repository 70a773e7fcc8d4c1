"""Experiments and the questions one asks of them afterwards."""

import math
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from anyfleet import config, methods, tasks
from anyfleet import experiment as experiment_module
from anyfleet.analysis.metric import Metric
from anyfleet.analysis.summaries import summarise
from anyfleet.arrays import Ints
from anyfleet.core.ledger import Ledger
from anyfleet.core.objectives import Task
from anyfleet.core.view import View
from anyfleet.elastic import cost
from anyfleet.errors import AnyfleetWarning, BadCall, ConfigError, StoreError
from anyfleet.experiment import (
    Experiment,
    Prepared,
    RoundResult,
    State,
    build,
    due,
    evaluation_flops,
    load,
    play,
    prepare,
)
from anyfleet.names import HOMES, Factory
from anyfleet.parts.select import Uniform
from anyfleet.runtime import Limits, Sequential, Stacked, Threads, Workers
from anyfleet.runtime.simulated.engines import Engine
from anyfleet.tasks import zoo
from anyfleet.world import ColumnLoss, Fleet, Group, World
from tests.helpers import regression, small
from tests.helpers.small import identical

MODEL = Factory.of(zoo.perceptron, hidden=(8,))
TASK = tasks.Embedded(model=MODEL, devices=4, limit=200, server=20)
SMALL = Experiment(TASK, methods.fedavg(count=2, lr=0.1), rounds=3)


def test_play_evaluates_when_due_and_at_the_end() -> None:
    experiment = replace(SMALL, rounds=4, evaluate_every=2, widths=(1.0, 0.5))
    points = [result.record for result in play(experiment)]
    assert [p.round_index for p in points] == [0, 1, 2, 3]
    assert [bool(p.scores) for p in points] == [True, False, True, True]
    assert {"accuracy", "accuracy@1", "accuracy@0.5"} <= points[-1].scores.keys()
    assert points[-1].scores["accuracy"] == points[-1].scores["accuracy@1"]
    for sooner, later in pairwise(points):
        assert later.time > sooner.time
        assert later.down > sooner.down


def evaluated(results: Iterable[RoundResult]) -> list[int]:
    """Return the rounds after which the model was evaluated."""
    return [result.record.round_index for result in results if result.record.scores]


def test_a_run_may_be_evaluated_by_simulated_seconds() -> None:
    """After the first round that ends at or after each multiple, and after the last."""
    results = list(play(replace(SMALL, rounds=9, evaluate_every=9)))
    assert evaluated(results) == [0, 8]
    ends = [result.record.time for result in results]
    between = ends[2] / 2  # the rounds take nearly equally long
    expected = [
        index
        for index, (begin, end) in enumerate(pairwise([0.0, *ends]))
        if index in (0, 8) or any(begin < n * between <= end for n in range(1, 99))
    ]
    assert 2 < len(expected) < 9
    assert evaluated(play(replace(SMALL, rounds=9, evaluate_every=f"{between!r} s"))) == expected
    # A round that ends at a multiple is the one that is meant, and not the round after it.
    at_an_end = f"{ends[4]!r} s"
    assert evaluated(play(replace(SMALL, rounds=7, evaluate_every=at_an_end))) == [0, 4, 6]


def test_a_resumed_run_is_evaluated_when_it_would_have_been() -> None:
    task = build(SMALL)
    first = next(play(SMALL, task)).record.time
    experiment = replace(SMALL, rounds=8, evaluate_every=f"{2.5 * first!r}s")
    whole = list(play(experiment, task))
    assert 3 < len(evaluated(whole)) < 8
    for stop in (0, 1, 2, 4, 6):
        rest = list(play(experiment, task, resume=whole[stop].state))
        # As texts: NaN is no other NaN.
        assert [str(r.record) for r in rest] == [str(r.record) for r in whole[stop + 1 :]]


def as_on_an_accelerator(experiment: Experiment, task: Task) -> Prepared:
    """Return a run that takes this machine for one with an accelerator."""
    found = prepare(experiment, task)
    return replace(found, execution=replace(found.execution, device="cuda:0"))


def test_scores_may_come_while_the_next_round_is_played() -> None:
    experiment = replace(SMALL, rounds=5, evaluate_every=2, engine=Sequential())
    task = build(experiment)
    whole = list(play(experiment, task))
    ahead = as_on_an_accelerator(experiment, task)
    found = list(ahead.play())
    assert [str(r.record) for r in found] == [str(r.record) for r in whole]
    for one, other in zip(found, whole, strict=True):
        assert identical(one.round.params, other.round.params)
        rest = [str(r.record) for r in play(experiment, task, resume=continued_here(one.state))]
        assert rest == [str(r.record) for r in whole[one.record.round_index + 1 :]]


def continued_here(state: State) -> State:
    """Return a state that may go on here."""
    assert state.execution is not None
    return replace(state, execution=replace(state.execution, device="cpu"))


@dataclass(frozen=True)
class Noted(Uniform):
    """A selection that fails in a round, and notes for which it was asked."""

    fails_in: int = 99
    error: type[BaseException] = OSError
    asked: list[int] = field(default_factory=list, compare=False)

    def __call__(self, view: View, state: Any, key: Tensor) -> Ints:
        self.asked.append(view.round_index)
        if view.round_index == self.fails_in:
            raise self.error("nobody there")
        return super().__call__(view, state, key)


def test_a_round_is_yielded_after_the_next_was_played_if_that_cannot_matter() -> None:
    def asked(results: int = 1, **changes: Any) -> list[int]:
        select = Noted(count=2)
        method = replace(SMALL.method, select=select)
        experiment = replace(SMALL, method=method, engine=Sequential(), **changes)
        list(islice(as_on_an_accelerator(experiment, build(experiment)).play(), results))
        return select.asked

    assert asked(evaluate_every=1) == [0, 1]
    assert asked(evaluate_every=1, rounds=1) == [0]
    # Where it might be the last one, or nothing is computed meanwhile, nothing is played ahead.
    assert asked(evaluate_every=1, stop_at=0.9) == [0]
    assert asked(2, evaluate_every=2) == [0, 1]
    assert asked(3, evaluate_every=2, rounds=9) == [0, 1, 2, 3]


def test_the_result_of_a_round_survives_the_failure_of_the_next() -> None:
    method = replace(SMALL.method, select=Noted(count=2, fails_in=2))
    experiment = replace(SMALL, method=method, evaluate_every=1, engine=Sequential())
    results = as_on_an_accelerator(experiment, build(experiment)).play()
    found = [next(results).record, next(results).record]
    assert [record.round_index for record in found] == [0, 1]
    assert all(record.scores for record in found)
    with pytest.raises(OSError, match="nobody there"):
        next(results)


def failing_ahead(error: type[BaseException]) -> Iterator[RoundResult]:
    """Return a run whose third round fails while the scores of its second one are computed."""
    method = replace(SMALL.method, select=Noted(count=2, fails_in=2, error=error))
    experiment = replace(SMALL, method=method, evaluate_every=1, engine=Sequential())
    return as_on_an_accelerator(experiment, build(experiment)).play()


def test_an_interrupt_ends_a_run_at_once() -> None:
    """Whoever leaves the loop at one result more would never hear of it."""
    results = failing_ahead(KeyboardInterrupt)
    assert next(results).record.round_index == 0
    with pytest.raises(KeyboardInterrupt):
        next(results)


def test_of_two_errors_the_first_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    results, read = failing_ahead(OSError), experiment_module._read

    def once(*given: Any) -> Any:
        monkeypatch.setattr(experiment_module, "_read", unreadable)
        return read(*given)

    def unreadable(*_: Any) -> Any:
        raise RuntimeError("the accelerator is lost")

    monkeypatch.setattr(experiment_module, "_read", once)
    assert next(results).record.round_index == 0
    with pytest.raises(OSError, match="nobody there"):
        next(results)


@pytest.mark.parametrize("less", [False, True], ids=["more is better", "less is better"])
def test_a_run_may_end_at_a_score(less: bool) -> None:
    task = regressed() if less else TASK
    experiment = replace(SMALL, task=task, rounds=9, evaluate_every=2)
    built = build(experiment)
    whole = [str(result.record) for result in play(experiment, built)]
    scores = [result.record.score for result in play(experiment, built)]
    metric = Metric(next(play(experiment, built)).record.metric)
    assert metric.less == less
    target = metric.best(scores[index] for index in (0, 2, 4, 6))
    last = next(n for n in (0, 2, 4, 6) if metric.reaches(scores[n], target))
    assert last > 0
    stopped = list(play(replace(experiment, stop_at=target), built))
    assert [str(result.record) for result in stopped] == whole[: last + 1]
    assert not list(play(replace(experiment, stop_at=target), built, resume=stopped[-1].state))
    beyond = -1.0 if less else 1.1
    assert len(list(play(replace(experiment, stop_at=beyond), built))) == 9


def test_by_default_a_long_run_is_evaluated_about_twenty_times() -> None:
    task = build(SMALL)
    (result,) = play(replace(SMALL, rounds=1), task)

    def rounds_evaluated(rounds: int) -> list[int]:
        experiment = replace(SMALL, rounds=rounds)
        results = (replace(result.round, index=index) for index in range(rounds))
        return [each.index for each in results if due(experiment, task, result.record, each)]

    assert rounds_evaluated(20) == list(range(20))
    assert rounds_evaluated(21) == list(range(0, 21, 2))
    assert rounds_evaluated(200) == [*range(0, 200, 10), 199]


def test_by_default_evaluation_is_a_fifth_of_the_work_of_training_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where it is no trifle; the last round is evaluated whatever it costs."""
    task, experiment = build(SMALL), replace(SMALL, rounds=16)
    whole = list(play(experiment, task))
    assert evaluated(whole) == [*range(16)]
    monkeypatch.setattr("anyfleet.experiment._CHEAP", 0.0)
    flops = [result.record.flops for result in whole]

    def at(work: float) -> list[int]:
        """Return the rounds that are evaluated if an evaluation takes so many FLOP."""
        monkeypatch.setattr("anyfleet.experiment.evaluation_flops", lambda *_: work)
        return evaluated(play(experiment, task))

    assert at(flops[0] / 100) == [*range(16)]
    once_in_three = at(flops[2] / 5)  # the training of three rounds pays for one
    assert len(once_in_three) == flops[15] // flops[2]
    assert once_in_three[-1] == 15
    gaps = [later - before for before, later in pairwise([-1, *once_in_three])]
    assert max(gaps) - min(gaps) <= 1
    # The last round's is one of them: here two would take more than their share.
    assert at(flops[15] / 5 / 1.9) == [15]
    assert at(flops[15] / 5 / 2.1) == [7, 15]
    assert at(flops[15]) == [15]
    # A resumed run is evaluated when it would have been.
    assert at(flops[2] / 5) == once_in_three
    rest = play(experiment, task, resume=whole[4].state)
    assert evaluated(rest) == [index for index in once_in_three if index > 4]
    # Where the work of devices is not known, it is as if it were enough.
    unknown = replace(whole[3].round, index=3, ledger=unmeasured(whole[3].round.ledger))
    assert due(experiment, task, whole[2].record, unknown)


def unmeasured(ledger: Ledger) -> Ledger:
    """Return a ledger whose FLOP nobody knows."""
    return replace(ledger, flops=np.full_like(ledger.flops, np.nan))


@pytest.mark.parametrize("calibrated", [False, True])
def test_an_evaluation_is_a_forward_pass_over_the_test_set_at_every_width(
    calibrated: bool,
) -> None:
    """And over all training data, if normalisation is measured on them."""
    task = small.task()
    method = methods.heterofl(widths=(1.0, 0.5)) if calibrated else methods.fedavg()
    work = [cost(task.blueprint, task.blueprint.prefix(w)).forward_flops for w in (1.0, 0.5)]
    samples = len(task.test) + calibrated * sum(map(task.size, range(task.devices)))
    experiment = Experiment(TASK, method, widths=(1.0, 0.5))
    assert evaluation_flops(experiment, task) == samples * sum(work)


def test_a_file_says_when_to_evaluate(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('evaluate_every = "60 s"\n[task]\nuse = "Embedded"\n[method]\nuse = "fedavg"\n')
    assert load(file).evaluate_every == "60 s"
    assert load(file, ["evaluate_every=3"]).evaluate_every == 3
    for wrong in ("0", "1.5", "'60 m'"):
        with pytest.raises(ConfigError, match="evaluate_every"):
            load(file, [f"evaluate_every={wrong}"])


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
    points = [result.record for result in play(experiment)]
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
    (result,) = play(experiment)
    assert result.record.widths == (1.0, 0.5)
    assert list(summarise([result.record]).others) == [second]


def test_devices_own_models_are_measured_by_the_tasks_own_metric() -> None:
    """Not by the shared model, which no one trains."""
    experiment = Experiment(regressed(), methods.local(lr=0.2), rounds=2, evaluate_every=5)
    first, last = (result.record for result in play(experiment))
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
    (result,) = play(replace(SMALL, task=TASK.build(0), rounds=1))
    assert result.record.scores == next(play(SMALL)).record.scores


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
    assert experiment.engine == Stacked()
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
    (result,) = play(experiment)
    assert result.record.failures == 4
    assert all(lost.startswith("refused: norm: ") for lost in result.round.ledger.failure)
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
    (result,) = play(experiment)
    assert result.record.replies == 2
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
        (result,) = play(many)
    assert result.record.replies == 4
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
        ("evaluate_every", "0 s"),
        ("evaluate_every", "1e999 s"),
        ("evaluate_every", "60"),
        ("evaluate_every", "two minutes"),
        ("stop_at", math.nan),
        ("widths", ()),
        ("widths", (1.5,)),
        ("details", ("classes", "colours")),
    ],
)
def test_impossible_experiments_are_refused(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        replace(SMALL, **{field: value})  # type: ignore[arg-type]


# --- the engine and the device of a run -----------------------------------------------------------

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def test_a_run_that_names_no_engine_says_which_it_has() -> None:
    assert (SMALL.engine, SMALL.device) == ("auto", "auto")
    prepared = prepare(replace(SMALL, device="cpu"))
    assert isinstance(prepared.experiment.engine, Sequential)
    assert prepared.experiment.device == "cpu"
    results = list(prepared.play())
    assert all(result.execution == prepared.execution for result in results)
    told = (
        "engine Sequential (not measured: the run is short; pin it with "
        'engine = { use = "Sequential" })'
    )
    assert str(results[0].execution) == f"device cpu, {told}, float32"
    named = next(play(replace(SMALL, engine=Stacked(chunk=2)), prepared.task)).execution
    assert str(named) == "device cpu, engine Stacked(chunk=2), float32"


def test_a_built_task_needs_no_second_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[World] = []
    build_fleet = Fleet.build

    def counted(fleet: Fleet, *words: Any) -> World:
        made.append(build_fleet(fleet, *words))
        return made[-1]

    monkeypatch.setattr(Fleet, "build", counted)
    assert len(list(play(replace(SMALL, rounds=1)))) == 1
    assert len(made) == 1


@pytest.mark.parametrize("engine", [Sequential(), Threads(), Workers(2), Stacked()], ids=str)
def test_a_run_goes_on_with_the_engine_it_had(engine: Engine) -> None:
    experiment = replace(SMALL, engine=engine)
    first, _, last = play(experiment)
    left_open = replace(SMALL, engine="auto", device="auto")
    *_, resumed = play(left_open, resume=first.state)
    assert resumed.execution == first.execution
    assert identical(resumed.round.params, last.round.params)
    assert resumed.record.scores == last.record.scores


def test_a_run_does_not_go_on_with_another_engine_unless_asked_to() -> None:
    first, *_ = play(replace(SMALL, engine=Stacked()))
    other = replace(SMALL, engine=Sequential())
    told = r"engine Stacked then, Sequential now\. Name the device and the engine that it had"
    with pytest.raises(StoreError, match=told):
        next(play(other, resume=first.state))
    result = next(play(other, resume=replace(first.state, execution=None)))
    assert result.record.round_index == 1
    assert str(result.execution) == "device cpu, engine Sequential, float32"


@needs_no_gpu
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_gpu_that_is_not_there_is_refused_before_anything_is_built(device: str) -> None:
    class Never:
        """A task that must not be built."""

        def build(self, seed: int) -> tasks.Task:
            raise AssertionError

    experiment = Experiment(Never(), SMALL.method, device=device)
    told = f'device: "{device}" asks for a GPU, but torch finds no CUDA device here; use "cpu"'
    for build_it in (build, prepare, lambda each: next(play(each, TASK.build(0)))):
        with pytest.raises(ConfigError, match=told):
            build_it(experiment)


def test_a_file_says_engine_and_device(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        'device = "cpu"\nengine = "auto"\n[task]\nuse = "Embedded"\n[method]\nuse = "fedavg"\n'
    )
    assert (load(file).engine, load(file).device) == ("auto", "cpu")
    assert load(file, ["engine={use='Stacked'}", "device=cuda:1"]) == replace(
        load(file), engine=Stacked(), device="cuda:1"
    )
    told = r"""expected Engine or "auto", got 'Stacked'; a part is a table, \{ use = "Stacked" \}"""
    with pytest.raises(ConfigError, match=told):
        load(file, ["engine=Stacked"])
    with pytest.raises(ConfigError, match=r'engine\.use: .*did you mean "Stacked"'):
        load(file, ["engine={use='Stackd'}"])
    with pytest.raises(ConfigError, match='device must be "auto", "cpu", "cuda"'):
        load(file, ["device=gpu"])
    with pytest.raises(BadCall, match=r'Experiment.engine must be an Engine or "auto"'):
        replace(SMALL, engine="fast")  # type: ignore[arg-type]
