"""EMS as an extraction: the strongest channels, without sorting the model."""

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from itertools import islice, pairwise
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from anyfleet import rng
from anyfleet.core.evaluation import evaluate
from anyfleet.core.loop import run
from anyfleet.core.messages import SubModelSize
from anyfleet.core.method import Method
from anyfleet.core.server import Server
from anyfleet.core.slots import Extract
from anyfleet.core.view import View
from anyfleet.elastic import (
    EVALUATE,
    WHOLE,
    Blueprint,
    Slice,
    apply,
    channel_order,
    cut,
    paste,
    permute,
    trace,
)
from anyfleet.experiment import Experiment, RoundResult, play
from anyfleet.formulas.anycost import anycost_channel_norms
from anyfleet.formulas.reference.masks import anycost_channels
from anyfleet.methods import fedavg
from anyfleet.parts.extract import Leading, Strongest
from anyfleet.parts.norm import PerWidth
from anyfleet.parts.plan import WidthByLevel
from anyfleet.runtime import Simulated
from anyfleet.store import Recording, Terms, reopen
from tests.helpers import nets, runs, small

Params = dict[str, Tensor]
KEY = rng.root(0, "test")
HALF = SubModelSize(0.5)


@cache
def seen() -> View:
    task = small.task()
    return Server(fedavg(), task, Simulated(task, small.world(task)), 0).view()


def chosen(want: SubModelSize, params: Params, blueprint: Blueprint) -> Slice:
    view = replace(seen(), blueprint=blueprint, model=params)
    part = Strongest()
    return part(want, view, part.init(view), KEY, None)


@cache
def pyramid() -> tuple[Blueprint, Params]:
    """The widths of the worked example."""
    torch.manual_seed(2)
    layers = (nn.Conv2d(1, 16, 3), nn.Conv2d(16, 32, 3), nn.Flatten(), nn.Linear(128, 64))
    module = nn.Sequential(*layers, nn.ReLU(), nn.Linear(64, 5))
    params = {name: p.detach() for name, p in module.named_parameters()}
    return trace(module, torch.zeros(2, 1, 6, 6)), params


# --- which channels ---------------------------------------------------------------------------


def test_1_12_1_widths_and_channels() -> None:
    """specification §1.12.1: alpha = 1/4 on {16, 32, 64} keeps {8, 16, 32}, the strongest."""
    blueprint, params = pyramid()
    slice_ = chosen(SubModelSize(sqrt(1 / 4), rounding="round"), params, blueprint)
    assert [len(kept) for _, kept in slice_.keep] == [8, 16, 32]
    for axis, kept in slice_.keep:
        norms = anycost_channel_norms([params[f"{axis}.weight"].numpy()])
        assert kept == tuple(anycost_channels(norms, 1 / 4).tolist())
    assert slice_ != blueprint.prefix(0.5)


def test_one_set_of_channels_for_all_that_is_added_together() -> None:
    net = nets.traced("resnet_bottleneck")
    producers = [net.params[f"{n}.weight"] for n in ("stem", "blocks.0.c3", "blocks.1.c3")]
    norms = anycost_channel_norms([each.numpy() for each in producers])
    kept = chosen(HALF, net.params, net.blueprint).kept("stem")
    assert kept == tuple(sorted(np.argsort(-norms)[:4].tolist()))
    assert kept not in {
        tuple(anycost_channels(anycost_channel_norms([each.numpy()]), 1 / 4)) for each in producers
    }


@pytest.mark.parametrize("name", [*nets.FAMILIES])
def test_the_network_is_that_of_the_leading_channels_of_the_sorted_model(name: str) -> None:
    net = nets.traced(name)
    blueprint = net.blueprint
    orders = channel_order(net.params, blueprint)
    if name == "vision":
        orders.pop("patch")  # a constant runs along it, so that no sorted model exists
    shares = dict.fromkeys(blueprint.counts(1.0).keys() & orders.keys(), 0.5)
    want = SubModelSize(1.0, axis_widths=tuple(shares.items()))
    strong, leading = chosen(want, net.params, blueprint), blueprint.prefix(shares)
    assert strong.shape(blueprint) == leading.shape(blueprint)
    assert strong != leading
    found = output(net, strong, net.params, net.buffers)
    ordered = [permute(tree, orders, blueprint) for tree in (net.params, net.buffers)]
    torch.testing.assert_close(found, output(net, leading, *ordered), rtol=1e-10, atol=1e-10)


def output(net: nets.Traced, slice_: Slice, params: Params, buffers: Params) -> Tensor:
    trees = [cut(tree, slice_, net.blueprint) for tree in (params, buffers)]
    return apply(net.blueprint.local(slice_), trees[0], trees[1], net.inputs, EVALUATE)[0]


def test_all_of_a_want_is_honoured() -> None:
    blueprint, params = pyramid()
    assert chosen(SubModelSize(), params, blueprint) == WHOLE
    assert (
        chosen(SubModelSize(0.5, first_trained_layer=2), params, blueprint).first_trained_layer == 2
    )
    want = SubModelSize(0.3, axis_widths=(("1", 1.0), ("0", 0.5)))
    slice_ = chosen(want, params, blueprint)
    assert {axis: len(kept) for axis, kept in slice_.keep} == {"0": 8, "3": 20}
    rounded = chosen(replace(want, rounding="round"), params, blueprint)
    assert {axis: len(kept) for axis, kept in rounded.keep} == {"0": 8, "3": 19}
    assert all(list(kept) == sorted(set(kept)) for _, kept in slice_.keep)


def test_smaller_sub_models_lie_inside_larger_ones() -> None:
    blueprint, params = pyramid()
    slices = [chosen(SubModelSize(share), params, blueprint) for share in (0.7, 0.5, 0.2, 0.01)]
    for larger, smaller in pairwise(slices):
        assert all(set(kept) <= set(larger.kept(axis) or ()) for axis, kept in smaller.keep)


# --- in a run ---------------------------------------------------------------------------------


def halves(extract: Extract) -> Method:
    """Weights decay fast, so that channels which are trained do not stay the strongest."""
    method = fedavg(count=4, lr=0.05, weight_decay=2.0)
    return replace(method, plan=WidthByLevel((0.5,)), extract=extract)


def strongest_half(params: Params, blueprint: Blueprint) -> Slice:
    orders = channel_order(params, blueprint)
    counts = blueprint.counts(0.5)
    return Slice.of({axis: sorted(orders[axis][:n]) for axis, n in counts.items()}, blueprint)


def test_every_round_trains_the_strongest_channels_of_its_own_model() -> None:
    task = small.task(dropout=0.0)
    steps = small.steps(halves(Strongest()), task, 4)
    models = [dict(task.params), *(dict(step.params) for step in steps)]
    slices = [strongest_half(model, task.blueprint) for model in models]
    for before, after, slice_ in zip(models, models[1:], slices, strict=False):
        nothing = {name: torch.zeros_like(value) for name, value in before.items()}
        ones = {name: torch.ones_like(value) for name, value in before.items()}
        inside = paste(cut(ones, slice_, task.blueprint), nothing, slice_, task.blueprint)
        changed = {name: after[name] != before[name] for name in before}
        assert all(not (changed[name] & (inside[name] == 0)).any() for name in before)
        assert all(changed[name].any() for name in before if name.endswith("weight"))
    assert len(set(slices)) > 2  # else nothing had to be renewed
    for step, slice_ in zip(steps, slices[1:], strict=True):
        assert step.sub_model(SubModelSize(0.5)) == slice_


def test_a_round_without_answers_keeps_the_orders() -> None:
    part, view = Strongest(), seen()
    state = part.init(view)
    assert part.learn(None, {}, view, state) == state


def experiment(extract: Extract) -> Experiment:
    method = replace(halves(extract), plan=WidthByLevel((1.0, 0.5)))
    return Experiment(runs.TASK, method, rounds=4, widths=(1.0, 0.5, 0.2))


@cache
def played(extract: Any) -> tuple[RoundResult, ...]:
    return tuple(play(experiment(extract)))


@pytest.mark.parametrize("extract", [Strongest(), Leading()], ids=["strongest", "leading"])
def test_widths_are_judged_by_the_channels_that_the_method_would_take(extract: Any) -> None:
    task = runs.TASK.build(0)
    norm = experiment(extract).method.norm
    for moment in played(extract):
        params, buffers = moment.round.params, moment.round.buffers
        half = strongest_half(dict(params), task.blueprint)
        if extract == Leading():
            half = task.blueprint.prefix(0.5)
        expected = evaluate(task, params, buffers, norm=norm, slice_=half)
        assert moment.record.scores["loss@0.5"] == expected["loss"]
        whole = evaluate(task, params, buffers, norm=norm)
        assert moment.record.scores["loss"] == moment.record.scores["loss@1"] == whole["loss"]


def written(folder: Path, moments: Iterable[RoundResult]) -> None:
    recording = Recording(folder, experiment(Strongest()), every=1)
    for moment in moments:
        recording.append(moment)
    recording._lock.release()  # as if the process had been killed


def test_a_run_that_goes_on_takes_the_same_channels(tmp_path: Path) -> None:
    written(tmp_path, played(Strongest())[:2])
    opened = reopen(tmp_path, Terms())
    rest = list(play(opened.experiment, opened.task, resume=opened.past.state))
    opened.past.lock.release()
    for moment, uninterrupted in zip(rest, played(Strongest())[2:], strict=True):
        assert small.identical(moment.round.params, uninterrupted.round.params)
        assert moment.record.scores == uninterrupted.record.scores
        states = [each.round.snapshot.states["extract"] for each in (moment, uninterrupted)]
        assert states[0] == states[1]


def test_normalisation_by_width_does_not_count() -> None:
    task = small.task()
    method = replace(halves(Strongest()), norm=PerWidth())
    runtime = Simulated(task, small.world(task))
    step = list(islice(run(method, task, runtime, 0), 2))[-1]
    assert any("@" in name for name in step.params)
    plain = {name: value for name, value in step.params.items() if "@" not in name}
    assert step.sub_model(SubModelSize(0.5)) == strongest_half(plain, task.blueprint)
