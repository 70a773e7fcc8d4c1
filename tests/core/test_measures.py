"""Measures: what devices measure beside training, brought along by the parts of a method."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from anyfleet.arrays import Ints
from anyfleet.core.messages import Hyperparameters
from anyfleet.core.slots import (
    Measure,
    Minibatch,
    Train,
    TrainingContext,
    TrainingResult,
    TrainingStart,
    TrainingState,
)
from anyfleet.core.training_work import Counted, Work
from anyfleet.elastic import WHOLE, Priced
from anyfleet.errors import CompositionError
from anyfleet.measure import Fisher
from anyfleet.methods import bn2, fedavg, whale
from anyfleet.parts.aggregate import Diagnosed, Mean
from anyfleet.parts.extract import FisherBlocks
from anyfleet.parts.select import Largest
from anyfleet.parts.train import Decaying, Gradient, Sgd, Slim
from anyfleet.runtime import Sequential, Stacked
from tests.helpers import small


@dataclass(frozen=True)
class StepCounter(Train):
    """Another trainer; it reports how many local steps it took."""

    inner: Train

    def hyperparameters(self, round_index: int, samples: Ints) -> Hyperparameters:
        return self.inner.hyperparameters(round_index, samples)

    def start(self, context: TrainingContext, start: TrainingStart) -> TrainingState:
        inner = self.inner.start(context, start)
        return {"inner": inner, "taken": inner["loss"]}

    def step(
        self,
        context: TrainingContext,
        state: TrainingState,
        batch: Minibatch,
        hyperparameters: Mapping[str, Tensor],
        draw: Any,
    ) -> TrainingState:
        inner = self.inner.step(context, state["inner"], batch, hyperparameters, draw)
        return {"inner": inner, "taken": state["taken"] + 1}

    def finish(self, context: TrainingContext, state: TrainingState) -> TrainingResult:
        result = self.inner.finish(context, state["inner"])
        return result._replace(report={**result.report, "taken": state["taken"]})


@dataclass(frozen=True)
class Steps(Measure):
    """A measure of a user: the local steps that a device took, which costs nothing."""

    scalars: ClassVar[frozenset[str]] = frozenset({"taken"})
    nonnegative: ClassVar[frozenset[str]] = scalars

    def observed(self, train: Train, asked: frozenset[str]) -> Train:
        return StepCounter(train)

    def work(self, priced: Priced, processed: Counted, local_steps: Counted) -> Work:
        return Work(0.0, 0.0, 0.0, 0.0)


def diagnosed(*reported: str, measures: tuple[Measure, ...] = ()) -> Diagnosed:
    return Diagnosed(reported=reported, measures=measures)


def test_a_method_has_the_measures_of_its_parts_and_equal_ones_once() -> None:
    seldom = Fisher(every=3)
    assert fedavg().measures == ()
    assert whale(fisher=seldom, regions=4).measures == (seldom,)
    both = replace(whale(fisher=seldom), aggregate=diagnosed("taken", measures=(Steps(),)))
    assert set(both.measures) == {seldom, Steps()}
    assert both.job().measures == both.measures


def test_different_settings_of_one_measure_are_refused() -> None:
    method = whale(fisher=Fisher(every=3))
    with pytest.raises(CompositionError, match=r"choose=.* and extract=.*every=3.*the same"):
        replace(method, extract=FisherBlocks(4, fisher=Fisher(every=2)))
    assert replace(method, extract=FisherBlocks(4, fisher=Fisher(every=3))).measures == (
        Fisher(every=3),
    )


def test_what_nobody_measures_is_refused_and_what_some_part_measures_is_not() -> None:
    with pytest.raises(CompositionError, match=r"aggregate wants \['fisher'\].*`measures`"):
        replace(fedavg(), aggregate=diagnosed("fisher"))
    assert replace(whale(), aggregate=diagnosed("fisher")).job().report == ("fisher",)
    by_fisher = Largest(4, 2, number="fisher", measures=(Fisher(),))
    assert replace(bn2(), select=by_fisher).job().report == ("fisher",)
    with pytest.raises(ValueError, match=r"Largest\.number must be a single number"):
        replace(by_fisher, number="channels")


def test_measures_that_are_none_are_refused_at_once() -> None:
    class Odd(Mean):
        measures = ("fisher",)  # type: ignore[assignment]

    with pytest.raises(CompositionError, match=r"`measures` must be a tuple of Measure"):
        replace(fedavg(), aggregate=Odd())


@pytest.mark.parametrize("engine", [Sequential(), Stacked()], ids=str)
def test_a_measure_of_a_user_is_reported_where_a_part_asks_and_changes_nothing(
    engine: Any,
) -> None:
    task = small.task()
    plain = fedavg(count=4, lr=0.1, batch_size=8)
    asked = replace(plain, aggregate=Watching(("taken",), (Steps(),)))
    (step,) = small.steps(asked, task, 1, engine=engine)
    assert Watching.seen == [{"loss", "distortion", "taken"}] * 4
    assert Watching.taken == [-(-task.size(device) // 8) for device in Watching.devices]
    (before,) = small.steps(plain, task, 1, engine=engine)
    assert small.identical(step.params, before.params)
    # One number more in every reply.
    bits = [row.bits_up for row in small.rows(step)]
    assert bits == [row.bits_up + 32 for row in small.rows(before)]
    unasked = replace(plain, aggregate=Watching((), (Steps(),)))
    small.steps(unasked, task, 1, engine=engine)
    assert Watching.seen == [{"loss", "distortion"}] * 4


@dataclass(frozen=True)
class Watching(Diagnosed):
    """A mean that remembers what the reports had of the last round."""

    seen: ClassVar[list[set[str]]] = []
    taken: ClassVar[list[float]] = []
    devices: ClassVar[list[int]] = []

    def __init__(self, reported: tuple[str, ...], measures: tuple[Measure, ...]) -> None:
        super().__init__(reported=reported, measures=measures)

    def __call__(self, model: Any, updates: Any, view: Any, state: Any, key: Tensor) -> Any:
        Watching.seen[:] = [set(update.report) for update in updates]
        Watching.taken[:] = [update.report.get("taken", np.nan) for update in updates]
        Watching.devices[:] = [int(device) for device in updates.device]
        return self.inner(model, updates, view, state, key)


# --- work of whole cohorts --------------------------------------------------------------------

TRAINERS: dict[str, Any] = {
    "gradient": Gradient(optimiser=Sgd(0.9)),
    "slim": Slim(samples=2),
    "fisher": Fisher(every=3, samples=4),
    "observed": Fisher(every=2).observed(Gradient(), frozenset({"fisher"})),
    "default": StepCounter(Gradient()),
}


@pytest.mark.parametrize("name", TRAINERS)
def test_work_of_many_orders_is_that_of_each(name: str) -> None:
    priced = Priced(small.task().blueprint, WHOLE, 8)
    processed, steps = np.array([30, 8, 0, 17]), np.array([4, 1, 0, 0])
    found = TRAINERS[name].work(priced, processed, steps)
    for row, (count, taken) in enumerate(zip(processed.tolist(), steps.tolist(), strict=True)):
        alone = TRAINERS[name].work(priced, count, taken)
        for field in ("flops", "memory", "calls", "moved"):
            of_all = np.broadcast_to(getattr(found, field), processed.shape)
            assert of_all[row] == getattr(alone, field), field
            assert isinstance(getattr(alone, field), float)


def test_work_adds_up_but_for_the_memory() -> None:
    one, two = Work(1.0, 8.0, 2.0, 3.0), Work(10.0, 4.0, 20.0, 30.0)
    assert one + two == Work(11.0, 8.0, 22.0, 33.0)
    assert 2 * one == one * 2 == Work(2.0, 8.0, 4.0, 6.0)


def test_a_trainer_without_words_of_its_own_trains_an_epoch_of_32_at_a_hundredth() -> None:
    class Bare(StepCounter):
        hyperparameters = Train.hyperparameters

    found = Bare(Gradient()).hyperparameters(0, np.array([5, 9]))
    assert found.lr.tolist() == [0.01, 0.01]
    assert found.batch_size.tolist() == [32, 32]
    assert found.epochs.tolist() == [1, 1]


# --- a trainer of a user ----------------------------------------------------------------------


@dataclass(frozen=True)
class Sam(Gradient):
    """Sharpness-aware minimisation: descend along the gradient found `rho` further uphill."""

    rho: float = 0.05

    def gradient(self, context: Any, params: Any, state: Any, batch: Any) -> Any:
        here = super().gradient(context, params, state, batch)
        norm = torch.stack([g.square().sum() for g in here.gradients.values()]).sum().sqrt()
        uphill = {n: params[n] + self.rho / norm * g for n, g in here.gradients.items()}
        there = super().gradient(context, {**params, **uphill}, state, batch)
        return here._replace(gradients=there.gradients)

    def work(self, priced: Priced, processed: Counted, local_steps: Counted) -> Work:
        return 2 * super().work(priced, processed, local_steps)


def test_sharpness_aware_minimisation_is_one_method_more() -> None:
    task = small.task(dropout=0.0, norm=False, dtype=torch.float64)
    method = fedavg(count=4, lr=0.1, batch_size=8)
    train = Sam(Decaying(0.1), batch_size=8, rho=0.1)
    sam = replace(method, train=train)
    one, two = (small.steps(sam, task, 2, engine=e)[-1] for e in (Sequential(), Stacked()))
    assert small.distance(one.params, two.params) < 1e-10
    plain = small.steps(method, task, 2)[-1]
    assert 1e-6 < small.distance(one.params, plain.params) < 0.1
    still = replace(sam, train=replace(train, rho=0.0))
    assert small.distance(small.steps(still, task, 2)[-1].params, plain.params) < 1e-12
    flops = [small.rows(step)[0].flops for step in (one, plain)]
    assert flops[0] == 2 * flops[1]
