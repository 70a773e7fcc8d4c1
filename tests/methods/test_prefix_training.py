"""Methods that train every prefix of the model: what they equal, and what they are good for."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from anyfleet.core.evaluation import evaluate
from anyfleet.core.loop import Round
from anyfleet.core.method import Method
from anyfleet.core.slots import TrainingResult
from anyfleet.core.updates import Updates
from anyfleet.elastic import trace
from anyfleet.errors import ConfigError
from anyfleet.experiment import Experiment, build
from anyfleet.methods import fedavg, fedrescue, fedrush, fedseq, fedslim, fjord
from anyfleet.methods.fedavg import Training
from anyfleet.parts.aggregate import Mean
from anyfleet.parts.train import AdamW, Gradient, Progressive
from anyfleet.runtime import Stacked, Threads
from anyfleet.runtime.simulated.captured_training import CapturedTraining
from anyfleet.tasks import Data, Split, Task
from anyfleet.tasks.losses import squared_error
from anyfleet.world import levels, lossy
from tests.helpers import small

SETTINGS: Training = {"lr": 0.1, "batch_size": 8, "momentum": 0.5}
MAKERS: dict[str, Callable[..., Method]] = {
    "fedrescue": fedrescue,
    "fedseq": fedseq,
    "fedrush": fedrush,
    "fjord": fjord,
    "fedslim": fedslim,
}
FOUR = levels(speeds=(1e9, 5e8, 2e8, 1e8))


# --- what equals what -------------------------------------------------------------------------


@cache
def plain() -> list[Round]:
    """FedAvg as the others set it."""
    own: Training = {**SETTINGS, "nesterov": True, "weight_decay": 1e-4}
    return small.steps(fedavg(count=5, **own), small.task(), 3)


@pytest.mark.parametrize("name", MAKERS)
def test_without_samples_all_are_fedavg_bit_for_bit(name: str) -> None:
    expected = plain()
    found = small.steps(MAKERS[name](samples=0, widths=(1.0,), **SETTINGS), small.task(), 3)
    assert small.identical(found[-1].params, expected[-1].params)
    assert [step.time for step in found] == [step.time for step in expected]


def test_fedseq_is_fedrescue_without_distillation_bit_for_bit() -> None:
    task, with_it = small.task(), fedrescue(**SETTINGS)
    train = with_it.train
    assert isinstance(train, Progressive)
    without = replace(with_it, train=replace(train, distil=False))
    one, two, three = (
        small.steps(method, task, 1, fleet=FOUR)[-1].params
        for method in (fedseq(**SETTINGS), without, with_it)
    )
    assert small.identical(one, two)
    assert small.distance(one, three) > 1e-4


def test_settings_reach_their_parts() -> None:
    method = fedrescue(
        samples=3, nested_widths=(0.5, 1.0), momentum_rule="masked", lr=0.2, batch_size=16
    )
    train = method.train
    assert isinstance(train, Progressive)
    assert (train.samples, train.nested_widths, train.momentum_rule) == (3, (0.5, 1.0), "masked")
    sgd = train.base.optimiser
    assert repr(sgd) == "Sgd(momentum=0.9, nesterov=True, weight_decay=0.0001)"
    assert (train.base.lr(0), train.base.batch_size) == (0.2, 16)
    assert (method.send, method.cache, method.aggregate) == ("weights", True, Mean("equal"))
    assert fjord().aggregate == fedslim().aggregate == Mean("samples")
    assert "nesterov=False" in repr(fedseq(momentum=0.0).train)
    assert "gated=False" in repr(fedrush(gated=False).train)


# --- the federated side -----------------------------------------------------------------------


def test_1_8_example_of_overlapping_prefixes() -> None:
    """Widths 0.5, 0.75 and 1 with values 1, 2 and 4 make columns (7/3, 7/3, 3, 4)."""
    net = nn.Sequential(nn.Linear(1, 4, bias=False), nn.Linear(4, 2, bias=False))
    blueprint = trace(net, (torch.zeros(2, 1),))
    slices = [blueprint.prefix(width) for width in (0.5, 0.75, 1.0)]
    trees = [
        {n: torch.full(blueprint.local(part).shape(n), value) for n in blueprint.params}
        for part, value in zip(slices, (1.0, 2.0, 4.0), strict=True)
    ]
    start = {name: torch.zeros(blueprint.shape(name)) for name in blueprint.params}
    found = Updates.of(trees, blueprint, slices=slices, samples=(1, 10, 100))
    change = found.mean(Mean("equal").weigh(found))
    expected = torch.tensor([7 / 3, 7 / 3, 3.0, 4.0])
    torch.testing.assert_close(start["0.weight"] + change["0.weight"], expected[:, None])
    torch.testing.assert_close(start["1.weight"] + change["1.weight"], expected.expand(2, 4))


@pytest.mark.parametrize("name", MAKERS)
def test_links_that_lose_columns_are_no_obstacle(name: str) -> None:
    task = small.task()
    method = MAKERS[name](samples=2, count=6, **SETTINGS)
    fleet = lossy(errors=(0.3,), levels=4)
    steps = small.steps(method, task, 3, fleet=fleet)
    rows = [row for step in steps for row in small.rows(step)]
    assert any(0 < row.delivered_down < 1 for row in rows)
    assert any(0 < row.delivered_up < 1 for row in rows)
    assert all(torch.isfinite(value).all() for value in steps[-1].params.values())
    assert small.distance(task.params, steps[-1].params) > 1e-2


def test_engines_agree_about_devices_of_several_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two devices of each of four widths: stacks of two, which draw the same ratios."""
    stacks: list[int] = []
    train = CapturedTraining.__call__

    def counted(self: CapturedTraining, *given: Any, **named: Any) -> TrainingResult:
        stacks.append(given[2].key.numel())  # devices
        return train(self, *given, **named)

    monkeypatch.setattr(CapturedTraining, "__call__", counted)
    task = small.task(equal=False, dtype=torch.float64)
    method = fedrescue(count=8, samples=3, lr=0.05)
    one, two, three = (
        small.steps(method, task, 2, engine=engine, fleet=FOUR)[-1].params
        for engine in (None, Threads(), Stacked())
    )
    assert small.identical(one, two)
    assert small.distance(one, three) < 1e-10
    assert stacks == 2 * [2, 2, 2, 2]


def test_devices_are_charged_for_their_parts() -> None:
    """The ledger charges what is expected: of several passes for every one of plain training."""
    task = small.task()
    flops = []
    for samples in (0, 4):
        method = fedrescue(count=8, samples=samples, **SETTINGS)
        step = small.steps(method, task, 1, fleet=FOUR)[0]
        flops.append({row.width: row.flops for row in small.rows(step)})
    once, often = flops
    assert sorted(once) == [0.25, 0.5, 0.75, 1.0]
    assert all(2 * once[share] < often[share] < 5 * once[share] for share in once)


def test_a_task_without_classes_is_refused_before_the_run() -> None:
    x = torch.randn(40, 4)
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1))
    split = Split(devices=2, test_share=0.25)
    task = Task.of(net, Data(x, x.sum(1)), loss=squared_error, split=split)
    with pytest.raises(ConfigError, match=r"^method\.train: .*as FedSeq does"):
        build(Experiment(task, fedrescue(count=2)))
    assert build(Experiment(task, fedseq(count=2))) is task
    last = small.steps(fedseq(count=2, lr=0.01), task, 2)[-1]
    assert small.distance(task.params, last.params) > 1e-4


# --- what they are good for -------------------------------------------------------------------


# Those that step once for a minibatch need more rounds.
ROUNDS = {"fedrescue": 10, "fedseq": 10, "fedrush": 10, "fjord": 15, "fedslim": 15}


@cache
def scores(name: str, rounds: int) -> dict[str, float]:
    """Accuracy and loss of half of the model after so many rounds, without narrow devices.

    In stacks: what they hold is the same, and it is quicker.
    """
    task = small.task(dropout=0.0)
    make = {**MAKERS, "fedavg": fedavg}[name]
    widths = {} if name == "fedavg" else {"widths": (1.0,)}
    method = make(count=8, **widths, **SETTINGS)
    last = small.steps(method, task, rounds, engine=Stacked())[-1]
    half = task.blueprint.prefix(0.5)
    return evaluate(task, last.params, last.buffers, norm=method.norm, slice_=half)


@pytest.mark.parametrize("name", MAKERS)
def test_half_of_the_model_is_a_model(name: str) -> None:
    """FedAvg's is none: cut in half, it is right for 40 of 100 pictures at most."""
    found, plain = scores(name, ROUNDS[name]), scores("fedavg", ROUNDS[name])
    assert plain["accuracy"] < 0.5
    assert found["accuracy"] > plain["accuracy"] + 0.2
    assert found["loss"] < 0.75 * plain["loss"]


def test_an_optimiser_with_averages_trains_prefixes_too() -> None:
    task = small.task()
    base = Gradient(optimiser=AdamW(), batch_size=8)
    train = Progressive(base, samples=2, momentum_rule="masked")
    last = small.steps(replace(fedrescue(count=4), train=train), task, 1, fleet=FOUR)[-1]
    assert small.distance(task.params, last.params) > 1e-3
