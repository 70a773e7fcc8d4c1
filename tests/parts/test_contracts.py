"""All parts × the properties that all of them share. A new part is one row."""

import dataclasses
import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from anyfleet import config, measure, rng, runtime, world
from anyfleet.core.messages import Kind, SubModelSize
from anyfleet.core.method import Method
from anyfleet.core.plans import Plans
from anyfleet.core.server import Server
from anyfleet.core.signals import Diagnostic, FollowsSentFraction, HeldResults, Menu, Signal
from anyfleet.core.slots import Policy, nested
from anyfleet.core.view import View
from anyfleet.methods import (
    anycost,
    bn2,
    centralised,
    fedadp,
    fedavg,
    feddrop,
    fedhq,
    fedpmt,
    fedpns,
    fedprox,
    fedrescue,
    fedrolex,
    fedrush,
    fedseq,
    fedslim,
    fjord,
    heterofl,
    local,
    optimal_aggregation,
    qsgd,
    stc,
    uveqfed,
    whale,
)
from anyfleet.parts import aggregate, choose, codec, extract, norm, plan, schedule, select, train
from anyfleet.runtime import Simulated
from anyfleet.world import levels
from tests.helpers import small

PARTS: list[Any] = [
    select.Everyone(),
    select.Uniform(3),
    select.Uniform(fraction=0.5),
    select.Quota(5),
    select.Quota(by="group", counts=(2, 1)),
    select.InOrder(2),
    select.Learned(3, alpha=1.0, beta=0.5),
    select.Largest(6, 2, "loss"),
    schedule.Synchronous(patience=5.0),
    schedule.Deadline(2.0, late="counted", staleness=3),
    schedule.Buffered(concurrency=4, buffer_size=2),
    schedule.Overselected(keep=2, patience=90.0),
    schedule.Tiers(staleness=4),
    schedule.HoldAndFetch(patience=90.0),
    schedule.Surveyed(schedule.Synchronous(), Kind.STATISTICS, every=3),
    plan.WholeModel(),
    plan.WidthByLevel((1.0, 0.5)),
    plan.WidthByLevel((0.5, 0.25), layers="linear"),
    plan.WidthMenu((1.0, 0.25)),
    plan.TrainedLayersByLevel(3),
    plan.TrainedLayersByLevel(trained_layers=(4, 1)),
    plan.TrainedLayersMenu(2),
    plan.Assigned(plan.TrainedLayersMenu(), choose.LargestInTime(3.0)),
    plan.TargetSeconds(plan.WidthMenu((1.0, 0.5), capped=True)),
    choose.FisherUtility(levels=3, effectiveness="literal", target=2.0),
    plan.LargestFitting((1.0, 0.5), plan.WidthByLevel((1.0, 0.25))),
    plan.LocalStepsWithin(1.0, plan.WidthByLevel((0.5,))),
    plan.JustInTime(2.0, plan.WidthMenu((1.0, 0.5))),
    plan.WorkByLevel(batch_sizes=(16, 8), epochs=(2,), lrs=(0.1, 0.2), inner=plan.WholeModel()),
    plan.SentFractionByLink(0.1, inner=plan.WidthByLevel((1.0, 0.5))),
    plan.SentFractionByLink(seconds=2.0, inner=plan.WidthMenu((1.0, 0.5))),
    plan.SentFractionByLevel((0.2, 0.05), plan.TrainedLayersByLevel(2)),
    plan.Assigned(plan.WidthMenu((1.0, 0.5)), choose.MostGain(3.0, 5.0)),
    choose.First(),
    choose.LargestInTime(3.0),
    choose.MostGain(3.0, least_fraction=0.0, most_fraction=0.5),
    extract.Leading(),
    extract.FisherBlocks(4, score="maxmin"),
    extract.Random(),
    extract.Rolling(-3),
    extract.Strongest(),
    train.Gradient(train.Decaying(0.1, 0.99), train.Sgd(0.9, True, 1e-4), local_steps=5, clip=1.0),
    train.Gradient(train.Inverse(1.0, 2.0), train.AdamW(), masked=True, scaler=True),
    train.FrozenPrefix(train.Decaying(0.1), train.Sgd(0.9), frozen=0.25),
    measure.Fisher(every=2, samples=3, estimate="mean"),
    train.Slim(train.Gradient(batch_size=16), (0.25, 0.5, 1.0), samples=2),
    train.Fjord(train.Gradient(optimiser=train.Sgd(0.5), clip=0.5)),
    train.Progressive(train.Gradient(optimiser=train.Sgd(0.9, True, 1e-3)), momentum_rule="masked"),
    train.Progressive(
        train.Gradient(optimiser=train.AdamW()), distil=False, momentum_rule="literal"
    ),
    train.Rush(train.Gradient(train.Decaying(0.1), proximal=0.1), samples=2, gated=False),
    train.Sgd(0.5),
    train.AdamW((0.8, 0.9)),
    train.Decaying(0.5, 0.9),
    train.Inverse(0.1, 0.2, 3.0),
    norm.BatchStatistics(),
    norm.Tracked(),
    norm.OnDevice(),
    norm.Static(),
    norm.PerWidth(),
    codec.Raw(),
    codec.Nothing(),
    codec.Plain(),
    codec.TopK(0.5, codec.Qsgd(4, None)),
    codec.Stc(0.1, "model"),
    codec.Qsgd(bucket=64),
    codec.Uveq(3.0, 1),
    codec.Hq((1, 4), keep=0.5),
    codec.Fgc(((0.1, 0.5, 4), (1.0, 1.0, 8))),
    codec.ErrorFeedback(codec.TopK(0.1)),
    aggregate.Mean("equal", discount=0.5),
    aggregate.Aio(aggregate.Mean("equal"), floor=0.01),
    aggregate.ErrorWeighted(aggregate.Mean("equal", discount=1.0)),
    aggregate.AngleWeighted(3.0, aggregate.Aio()),
    aggregate.Subset(aggregate.AngleWeighted(), 0.5, statistic="mean", left="thesis"),
    aggregate.Clipped(aggregate.AngleWeighted(), times=2.0),
    aggregate.Clipped(length=0.5),
    aggregate.TrimmedMean(0.1),
    aggregate.CoordinateMedian(),
    aggregate.Diagnosed(aggregate.ServerOptimised()),
    aggregate.ServerOptimised(aggregate.Mean(), aggregate.ServerAdam(0.1)),
    aggregate.ServerSgd(0.5, 0.9),
    aggregate.ServerAdam(),
    runtime.Limits(norm=10.0, growth=50.0),
    runtime.Sequential(),
    runtime.Threads(workers=3),
    runtime.Stacked(chunk=7),
    runtime.Workers(count=2),
    levels(speeds=(1e9, 1e8), mortality=0.1),
    world.Uniform(0.1, 0.2),
    world.Normal(400.0, 80.0, low=1.0),
    world.LogNormal(1.0, 0.2, high=3.0),
    world.Categorical((1.0, 2.0), (1.0, 3.0)),
    world.Disc(550.0),
    world.Redrawn(world.Disc(550.0), every=60.0),
    world.Wandering(world.Uniform(1e6, 2e6), spread=0.2),
    world.Replayed(Path(__file__).parents[1] / "world" / "trace.csv", "rate", scale=2.0),
    world.Always(),
    world.Intermittent(0.9),
    world.Diurnal(spread=0.5),
    world.Steady(world.Uniform(1e6, 2e6), 4e7, send_power=0.2),
    world.Shannon(band=2e6, fading=True, shared=True),
    world.wifi(),
    world.ColumnLoss(error=world.Uniform(0.1, 0.2)),
    world.Group("phones", count=3, speed=world.Uniform(1e8, 1e9), availability=world.Diurnal()),
    world.Reports(rounds=1, noise=0.1),
    world.Table(file=Path(__file__).parents[2] / "recipes" / "fleet.csv"),
    world.testbed(),
    world.steep(),
    world.cell(distance=world.unequal_distance(50.0)),
    world.lossy(errors=(0.05, 0.3), levels=2),
    fedavg(count=3, lr=0.1),
    fedadp(sharpness=3.0, lr=0.1),
    optimal_aggregation(share=0.5, count=4, lr=0.1),
    fedpmt(depths=3, count=6, lr=0.1),
    fedpmt(seconds=2.0, count=4, lr=0.1),
    fedpns(count=4, beta=0.5, lr=0.1),
    bn2(draw=6, keep=2, lr=0.1),
    fedprox(mu=0.5, seconds=2.0),
    heterofl(widths=(1.0, 0.5), masked=False),
    feddrop(widths=(1.0, 0.5), layers="linear", inverted=True),
    fedrolex(widths=(0.5,), shift=2, masked=False),
    fedrescue(count=3, samples=2, momentum_rule="masked"),
    fedseq(count=3, samples=2),
    fedrush(count=3, samples=2, gated=False),
    fjord(count=3, momentum=0.0, lr=0.05),
    fedslim(count=3, nested_widths=(0.5, 1.0)),
    local(lr=0.2),
    whale(widths=(1.0, 0.5), regions=4),
    anycost(seconds=5.0, widths=(1.0, 0.5), sent_fraction=0.2, count=4, lr=0.1),
    stc(keep=0.1, count=3, lr=0.1),
    qsgd(quantisation_levels=4, keep=0.5, count=3, lr=0.1),
    uveqfed(bits_each=3.0, dimension=1, keep=0.5, count=3, lr=0.1),
    fedhq(sent_fraction=0.1, keep=0.3, count=3, lr=0.1),
    centralised(batch_size=8),
]
ROOMS = (
    *(
        f"anyfleet.parts.{slot}"
        for slot in [
            "select",
            "schedule",
            "plan",
            "choose",
            "extract",
            "train",
            "norm",
            "codec",
            "aggregate",
        ]
    ),
    "anyfleet.runtime",
    "anyfleet.world",
)


def names(part: Any) -> str:
    return repr(part)[:70]


def test_every_public_part_has_a_row() -> None:
    public = {
        getattr(importlib.import_module(room), name)
        for room in ROOMS
        for name in importlib.import_module(room).__all__
    }
    classes = {thing for thing in public if dataclasses.is_dataclass(thing)}
    # What a run is made with rather than described by has no row.
    assert classes - {type(part) for part in PARTS} == {world.World, world.When}


@pytest.mark.parametrize("part", PARTS, ids=names)
def test_frozen_hashable_and_equal_to_its_copy(part: Any) -> None:
    assert dataclasses.is_dataclass(type(part))
    assert vars(type(part))["__dataclass_params__"].frozen
    copy = replace(part)
    assert copy == part
    assert hash(copy) == hash(part)
    for entry in dataclasses.fields(part):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, entry.name, None)


@pytest.mark.parametrize("part", PARTS, ids=names)
def test_printable(part: Any) -> None:
    assert type(part).__name__ in repr(part)
    assert " at 0x" not in str(part)


@pytest.mark.parametrize("part", PARTS, ids=names)
def test_plain_data_and_back(part: Any) -> None:
    assert config.load(config.dump(part), type(part)) == part


def view(method: Method) -> tuple[View, Server]:
    task = small.task()
    server = Server(method, task, Simulated(task, small.world(task)), 0)
    return server.view(), server


@pytest.mark.parametrize("part", [p for p in PARTS if Policy in type(p).__mro__], ids=names)
def test_policies_are_deterministic_and_keep_their_state_outside(part: Any) -> None:
    before = hash(part)
    outcomes = []
    for _ in range(2):
        seen, server = view(fedavg())
        state, key = part.init(seen), rng.root(3, "contract")
        outcomes.append(describe(part, seen, state, key, server))
        part.learn(None, {}, seen, state)
    assert outcomes[0] == outcomes[1]
    assert hash(part) == before


def describe(part: Any, seen: View, state: Any, key: torch.Tensor, server: Server) -> str:
    """What the part decides, as text."""
    room = type(part).__module__.split(".")[2]
    if room == "select":
        return str(part(seen, state, key).tolist())
    if room == "plan":
        return repr(part(drafts(seen), seen, state, key))
    if room == "extract":
        device = 2 if part.personal else None
        return repr(part(SubModelSize(width=0.5), seen, state, key, device))
    small_steps = small.steps(replace(fedavg(count=3, lr=0.1), aggregate=part), small.task(), 2)
    return str({n: v.sum().item() for n, v in small_steps[-1].params.items()})


def drafts(seen: View) -> Plans:
    devices = np.array([0, 1, 2, 3, 4])
    samples = seen.devices.samples[devices]
    return Plans.whole_model(devices, train.Gradient().hyperparameters(seen.round_index, samples))


METHODS = [part for part in PARTS if isinstance(part, Method)]


@pytest.mark.parametrize("method", METHODS, ids=lambda m: repr(m)[:50])
def test_methods_make_progress_and_repeat_themselves(method: Method) -> None:
    one, two = (small.steps(method, small.task(), 2) for _ in range(2))
    assert small.identical(one[-1].params, two[-1].params)
    assert 0 < one[0].time < one[1].time


# Trainers and aggregators meet all engines, and each other, in test_combinations.py.
SLOTS = {
    "select": [p for p in PARTS if type(p).__module__.startswith("anyfleet.parts.select")],
    "schedule": [p for p in PARTS if type(p).__module__.startswith("anyfleet.parts.schedule")],
    "plan": [
        p
        for p in PARTS
        if type(p).__module__.startswith("anyfleet.parts.plan.") and Policy in type(p).__mro__
    ],
    "choose": [choose.First(), choose.LargestInTime(3.0), choose.MostGain(3.0)],
    "norm": [p for p in PARTS if type(p).__module__ == "anyfleet.parts.norm.batch_norm"],
    "uplink": [p for p in PARTS if type(p).__module__.startswith("anyfleet.parts.codec.")],
    "downlink": [codec.Raw()],
}
# Who provides what a part requires.
PROVIDERS: dict[Signal, dict[str, Any]] = {
    Diagnostic("labelled"): {"aggregate": aggregate.Subset()},
    HeldResults(): {"schedule": schedule.HoldAndFetch()},
    Menu(): {"plan": plan.WidthMenu((1.0, 0.5))},
    FollowsSentFraction(): {"uplink": codec.Hq()},
}


def missing(part: Any) -> set[Signal]:
    """What a part, or another inside it, requires and none of them provides."""
    inside = list(nested(part)) if Policy in type(part).__mro__ else [part]
    asked = frozenset().union(*(getattr(each, "requires", frozenset()) for each in inside))
    given = frozenset().union(*(getattr(each, "provides", frozenset()) for each in inside))
    return {signal for signal in asked if not any(map(signal.met_by, given))}


@pytest.mark.parametrize(
    ("slot", "part"), [(s, p) for s, ps in SLOTS.items() for p in ps], ids=lambda v: str(v)[:60]
)
def test_every_part_runs_in_its_slot_on_every_engine(slot: str, part: Any) -> None:
    task = small.task(equal=False, dtype=torch.float64)
    company = {k: v for signal in missing(part) for k, v in PROVIDERS[signal].items()}
    method = replace(fedavg(count=4, lr=0.05), **{slot: part}, **company)
    ends = [
        small.steps(method, task, 2, engine=engine)[-1].params
        for engine in (runtime.Sequential(), runtime.Threads(), runtime.Stacked())
    ]
    assert small.identical(ends[0], ends[1])
    assert small.distance(ends[0], ends[2]) < 1e-10


class Counting(plan.WholeModel):
    """A planner that counts server steps and wants a measurement."""

    reports = frozenset({"norm"})

    def init(self, view: View) -> Any:
        return 0

    def learn(self, updates: Any, diagnostics: Any, view: View, state: Any) -> Any:
        return state + 1


@pytest.mark.parametrize(
    "wrapper",
    [plan.LocalStepsWithin(1e9, Counting()), plan.WorkByLevel(inner=Counting())],
    ids=names,
)
def test_a_wrapper_threads_the_state_and_the_wishes_of_what_it_wraps(wrapper: Any) -> None:
    method = replace(fedavg(count=3, lr=0.1), plan=wrapper)
    assert method.job().report == ("norm",)
    assert small.steps(method, small.task(), 3)[-1].snapshot.states["plan"] == 3


def test_a_method_refuses_a_need_that_nobody_meets() -> None:
    class NeedsLabels(select.Uniform):
        requires = frozenset({Diagnostic("labelled", provider="aggregate=Subset()")})

    with pytest.raises(ValueError, match=r"'labelled'.*use aggregate=Subset\(\) \(docs/mixing"):
        replace(fedavg(), select=NeedsLabels(3))
    with pytest.raises(ValueError, match="send"):
        replace(fedavg(), send="everything")  # type: ignore[arg-type]
