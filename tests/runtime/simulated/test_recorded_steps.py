"""Recorded steps: the same bits as mapped ones, for every trainer, and what is not recorded."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap

from anyfleet.core.local_training import train, train_with
from anyfleet.core.slots import Minibatch, Train, TrainingContext, TrainingResult, TrainingState
from anyfleet.measure.fisher import Fisher, Observed
from anyfleet.parts.norm import Tracked
from anyfleet.parts.train import Gradient
from anyfleet.runtime.simulated import recorded_steps
from anyfleet.runtime.simulated.captured_training import CapturedTraining
from anyfleet.runtime.simulated.recorded_steps import RecordedSteps, plain_operators, simplified
from anyfleet.tasks import Data, Split, Task
from tests.helpers import small
from tests.helpers.stacks import Stack, same_bits, stack
from tests.methods.test_combinations import BASE, TRAINERS

PLAIN = replace(BASE, epochs=2)
PLAINEST = lru_cache(maxsize=1)(lambda: small.task(equal=False, dropout=0.0, norm=False))


def recorded(steps: RecordedSteps, trainer: Train, given: Stack, key: int = 0) -> TrainingResult:
    draws = trainer.shared_draws(given.bounds.local_steps, torch.tensor(key))
    lift_step = steps.of(trainer, given.context)
    return train_with(draws, trainer, *given, lift=vmap, lift_step=lift_step)


@pytest.mark.parametrize("name", ["inverted, proximal, clipped, adam", "progressive, masked"])
def test_recorded_steps_have_the_same_bits(name: str) -> None:
    trainer, steps = TRAINERS[name], RecordedSteps(after=2)
    for round_index in range(2):
        devices = [round_index, 3, 5]  # with unequal data: some are done before others
        given = stack(PLAINEST(), trainer, devices, round_index=round_index)
        mapped = train(trainer, *given, lift=vmap, cohort_key=round_index)
        assert same_bits(recorded(steps, trainer, given, round_index), mapped)
    assert steps.recorded > 0


def test_dropout_and_statistics_of_batches_are_recorded_too() -> None:
    task, steps = small.task(equal=False), RecordedSteps(after=2)
    for round_index in range(2):
        given = stack(task, PLAIN, [0, 3], norm=Tracked(), round_index=round_index)
        mapped = train(PLAIN, *given, lift=vmap, cohort_key=0)
        assert same_bits(recorded(steps, PLAIN, given), mapped)
    assert steps.recorded > 0


def test_convolutions_are_recorded_too() -> None:
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.LazyLinear(3),
    )
    x, y = (
        torch.randn(60, 1, 8, 8, generator=torch.Generator().manual_seed(0)),
        torch.arange(60) % 3,
    )
    net(x[:2])
    task = Task.of(net, Data(x, y), Data(x, y), split=Split(devices=3))
    given, steps = stack(task, PLAIN, [0, 1, 2]), RecordedSteps(after=1)
    assert same_bits(recorded(steps, PLAIN, given), train(PLAIN, *given, lift=vmap, cohort_key=0))
    assert steps.recorded > 0


def test_a_step_is_recorded_when_it_comes_often_and_once() -> None:
    given, steps = stack(PLAINEST(), PLAIN, [0, 1]), RecordedSteps(after=10**6)
    for after, due in ((10**6, 0), (1, 3), (1, 3)):
        steps._after = after
        recorded(steps, PLAIN, given)
        # The first step leaves what it read; later ones write over it; the last ones are guarded.
        assert steps.recorded == due


@dataclass(frozen=True)
class Alternating(Gradient):
    """A trainer that looks at the index of a step: every other one is twice as long."""

    def descend(
        self,
        context: TrainingContext,
        state: TrainingState,
        found: Any,
        batch: Minibatch,
        hyperparameters: Mapping[str, Tensor],
    ) -> TrainingState:
        factor = 2.0 if batch.step_index in {1, 3, 5, 7} else 1.0
        doubled = {**hyperparameters, "lr": hyperparameters["lr"] * factor}
        return super().descend(context, state, found, batch, doubled)


@pytest.mark.parametrize(
    "trainer",
    [
        Alternating(PLAIN.lr, PLAIN.optimiser, batch_size=8, epochs=2),
        Observed(PLAIN, Fisher(samples=2, every=2)),
    ],
    ids=["alternating", "observed"],
)
def test_who_looks_at_the_index_of_a_step_is_not_recorded(trainer: Train) -> None:
    given, steps = stack(PLAINEST(), trainer, [0, 1]), RecordedSteps(after=1)
    assert same_bits(
        recorded(steps, trainer, given), train(trainer, *given, lift=vmap, cohort_key=0)
    )
    assert steps.recorded == 0


def test_trainers_are_told_apart() -> None:
    steps = RecordedSteps(after=1)
    for trainer in (PLAIN, replace(PLAIN, clip=1e-3)):
        given = stack(PLAINEST(), trainer, [0, 1])
        mapped = train(trainer, *given, lift=vmap, cohort_key=0)
        assert same_bits(recorded(steps, trainer, given), mapped)


@dataclass(frozen=True)
class Nameless(Gradient):
    """A trainer that cannot be told from others: it has no hash."""

    __hash__ = None  # type: ignore[assignment]


def test_what_cannot_be_told_from_others_is_mapped() -> None:
    trainer = Nameless(PLAIN.lr, PLAIN.optimiser, batch_size=8)
    given, steps = stack(PLAINEST(), trainer, [0, 1]), RecordedSteps(after=1)
    assert steps.of(trainer, given.context) is vmap
    mapped = train(trainer, *given, lift=vmap, cohort_key=0)
    assert same_bits(recorded(steps, trainer, given), mapped)


def test_what_is_kept_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    given, steps = stack(PLAINEST(), PLAIN, [0, 1]), RecordedSteps(after=2)
    monkeypatch.setattr(recorded_steps, "_SITES", 1)
    monkeypatch.setattr(recorded_steps, "_STEPS", 1)
    mapped = train(PLAIN, *given, lift=vmap, cohort_key=0)
    for _ in range(2):
        assert same_bits(recorded(steps, PLAIN, given), mapped)
        assert steps.of(replace(PLAIN, clip=1.0), given.context) is vmap
    assert (len(steps._sites), len(steps._counts), steps.recorded) == (1, 1, 1)


def test_threads_may_record_at_once() -> None:
    runner = CapturedTraining()
    runner._recorded = RecordedSteps(after=2)
    stacks = [stack(PLAINEST(), PLAIN, [0, 1], round_index=r) for r in range(6)]

    def trained(given: Stack) -> TrainingResult:
        return runner(PLAIN, *given, lift=vmap, cohort_key=0)

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(trained, stacks))
    for given, each in zip(stacks, found, strict=True):
        assert same_bits(each, train(PLAIN, *given, lift=vmap, cohort_key=0))


def test_numbers_that_somebody_writes_over_or_keeps_are_made_every_time() -> None:
    number = torch.ops.aten.scalar_tensor

    def function(x: Tensor) -> list[Tensor]:
        chosen = torch.where(x > 1, x.view(3), number(4.0))
        return [number(2.0), number(3.0).add_(x.sum()), chosen]

    x = torch.arange(3.0)
    graph = simplified(plain_operators(function, [x]))
    for _ in range(2):
        found = graph(x)
        assert [each.tolist() for each in found] == [2.0, 6.0, [4.0, 4.0, 2.0]]
        found[0].add_(1)  # whoever gets it may change it
    called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert called.count(number.default) == 2
    assert torch.ops.aten.view.default not in called


def test_what_is_written_through_a_view_stays() -> None:
    def function(x: Tensor) -> list[Tensor]:
        y = x.clone()
        y[0].add_(5.0)
        y.view(3).mul_(2.0)  # a view that changes nothing
        return [y]

    x = torch.arange(3.0)
    (found,) = simplified(plain_operators(function, [x]))(x)
    assert found.tolist() == [10.0, 2.0, 4.0]
    assert x.tolist() == [0.0, 1.0, 2.0]
