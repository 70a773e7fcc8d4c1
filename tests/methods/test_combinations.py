"""Every trainer × every aggregator, on every engine: unequal slices, unequal data, one result."""

from dataclasses import is_dataclass, replace
from functools import lru_cache

import pytest
import torch

from anyfleet.core.loop import Round
from anyfleet.core.messages import Params
from anyfleet.core.method import Method
from anyfleet.core.slots import Aggregate, Policy, Train, nested
from anyfleet.elastic import place
from anyfleet.measure import Fisher
from anyfleet.methods import heterofl
from anyfleet.parts import aggregate, train
from anyfleet.parts.aggregate import (
    Aio,
    AngleWeighted,
    Clipped,
    CoordinateMedian,
    Diagnosed,
    ErrorWeighted,
    Mean,
    ServerAdam,
    ServerOptimised,
    ServerSgd,
    TrimmedMean,
)
from anyfleet.parts.select import Everyone
from anyfleet.parts.train import (
    AdamW,
    Decaying,
    Fjord,
    FrozenPrefix,
    Gradient,
    Progressive,
    Rush,
    Sgd,
    Slim,
)
from anyfleet.runtime import Sequential, Stacked, Threads
from anyfleet.runtime.simulated.engines import Engine
from anyfleet.tasks import Split, Task
from anyfleet.tasks.partition import LogNormalSizes
from anyfleet.world import levels
from tests.helpers import small
from tests.parts.extract.test_extract import issued

BASE = Gradient(Decaying(0.05), Sgd(0.9, nesterov=True, weight_decay=1e-3), batch_size=8)
FEW = (0.25, 0.5)

TRAINERS: dict[str, Train] = {
    "gradient": BASE,
    "with heterofl's parts": replace(BASE, masked=True, label_rows=True, scaler=True),
    "inverted, proximal, clipped, adam": replace(
        BASE, inverted=True, proximal=0.1, clip=0.5, optimiser=AdamW()
    ),
    "frozen": FrozenPrefix(BASE.lr, BASE.optimiser, batch_size=8, frozen=0.25),
    "slim": Slim(BASE, FEW, samples=2),
    "fjord": Fjord(BASE, FEW, samples=2),
    "progressive": Progressive(BASE, FEW, samples=2),
    "progressive, masked": Progressive(BASE, FEW, samples=2, distil=False, momentum_rule="masked"),
    "progressive, literal": Progressive(BASE, FEW, samples=2, momentum_rule="literal"),
    "rush": Rush(BASE, FEW, samples=2, gated=False),
}
AGGREGATORS: dict[str, Aggregate] = {
    "mean": Mean("samples"),
    "equal": Mean("equal"),
    "angles": AngleWeighted(),
    "subset": aggregate.Subset(AngleWeighted(base=Aio()), share=0.5, statistic="mean"),
    # Every trainer, with something measured beside it.
    "diagnosed": Diagnosed(
        Clipped(ErrorWeighted(Mean("equal"))),
        reported=("fisher", "channels"),
        measures=(Fisher(samples=2),),
    ),
    "momentum": ServerOptimised(TrimmedMean(0.25), ServerSgd(0.5, 0.9)),
    "adam": ServerOptimised(CoordinateMedian(), ServerAdam()),
}
FLEET = levels(speeds=(1e9, 1e8))


@lru_cache(maxsize=1)
def task() -> Task:
    """As `small.task`, with fewer samples, in double precision: stacks must not hide mistakes."""
    split = Split(devices=4, partition=LogNormalSizes(), test_share=0.0, server=30, seed=5)
    made = Task.of(small.net(), small.patterns(70, 1), small.patterns(10, 2), split=split)
    return made.to(torch.float64)


def method(trainer: str, aggregator: str) -> Method:
    """Nobody has more than half of the model, some a quarter."""
    base = heterofl(widths=(0.5, 0.25), static_norm=False)
    return replace(
        base, select=Everyone(), train=TRAINERS[trainer], aggregate=AGGREGATORS[aggregator]
    )


def end(trainer: str, aggregator: str, engine: Engine) -> Round:
    return small.steps(method(trainer, aggregator), task(), 2, engine=engine, fleet=FLEET)[-1]


@pytest.mark.parametrize("aggregator", AGGREGATORS)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_engines_agree_and_what_nobody_trained_keeps_its_value(
    trainer: str, aggregator: str
) -> None:
    one = end(trainer, aggregator, Sequential())
    # Threads train one device after the other too, and of an aggregator they see what is reported:
    # "diagnosed" asks for most.
    if trainer == "gradient" or aggregator == "diagnosed":
        two = end(trainer, aggregator, Threads())
        assert small.identical(one.params, two.params)
        assert one.time == two.time
    stacked = end(trainer, aggregator, Stacked())
    # Batch norm takes the first bias away again: its gradients are noise of rounding, about 1e-17,
    # which Adam divides by its epsilon, 1e-8. All others agree to the last digits but a few.
    noise = {"0.bias"} if "adam" in trainer else set()
    ends = [{n: p[n] for n in p if n not in noise} for p in (one.params, stacked.params)]
    assert small.distance(*ends) < 1e-10
    assert small.distance(one.params, stacked.params) < 1e-8
    for params in (one.params, stacked.params):
        assert all(bool(value.isfinite().all()) for value in params.values())
        assert untouched(params)
        assert small.distance(params, task().params) > 1e-4


def untouched(params: Params) -> bool:
    """Whether everything outside of the larger slice is as it was, bit for bit."""
    half, blueprint = task().blueprint.prefix(0.5), task().blueprint
    for name, value in params.items():
        outside = torch.ones_like(value, dtype=torch.bool)
        outside[place(name, half, blueprint)] = False
        if not torch.equal(value[outside], task().params[name][outside]):
            return False
    return True


def test_a_cohort_shares_its_draws_and_every_round_has_others() -> None:
    by_round = [issued(method("slim", "mean"), step=step).cohort_key for step in range(3)]
    assert len(set(by_round)) == 3
    again = [issued(method("slim", "mean"), step=1, seed=seed).cohort_key for seed in (0, 1)]
    assert again[0] == by_round[1] != again[1]


def test_every_public_trainer_and_aggregator_has_a_row() -> None:
    public = {getattr(train, name) for name in train.__all__}
    trainers = {each for each in public if {"hyperparameters", "step", "finish"} <= set(dir(each))}
    assert trainers - {type(each) for each in TRAINERS.values()} == set()
    room: list[type] = [getattr(aggregate, name) for name in aggregate.__all__]
    made: set[type] = {e for e in room if Policy in e.__mro__ and is_dataclass(e)}
    assert made == {type(inner) for part in AGGREGATORS.values() for inner in nested(part)}
