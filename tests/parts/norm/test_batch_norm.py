"""The five batch normalisation policies, in runs."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from anyfleet.core.evaluation import batches, calibrate, evaluate
from anyfleet.core.loop import run
from anyfleet.elastic import Slice, cut
from anyfleet.methods import fedavg, heterofl
from anyfleet.parts.norm import BatchStatistics, OnDevice, PerWidth, Static, Tracked
from anyfleet.parts.plan import WidthByLevel
from anyfleet.parts.select import Uniform
from anyfleet.runtime import Simulated
from tests.helpers import small

FAST = fedavg(count=4, lr=0.1, batch_size=8)


def test_batch_statistics_leave_the_buffers_alone() -> None:
    task = small.task()
    last = small.steps(replace(FAST, norm=BatchStatistics()), task)[-1]
    assert small.identical(last.buffers, task.buffers)
    assert not torch.equal(last.params["1.weight"], task.params["1.weight"])


def test_tracked_statistics_are_averaged_by_samples_and_count_as_traffic() -> None:
    task = small.task(equal=False)
    method = replace(FAST, norm=Tracked())
    (step,) = small.steps(method, task, 1)
    without = small.steps(FAST, task, 1)[0]
    assert not torch.equal(step.buffers["1.running_mean"], task.buffers["1.running_mean"])
    extra = 32 * 2 * 6  # mean and variance of six channels
    for one, two in zip(small.rows(step), small.rows(without), strict=True):
        assert one.bits_up - two.bits_up == extra
        assert one.bits_down - two.bits_down == extra


def test_tracked_mean_of_two_devices_is_the_weighted_one() -> None:
    task = small.task(equal=False, devices=2)
    method = replace(fedavg(count=2, lr=0.1), norm=Tracked())
    alone = [
        small.steps(replace(method, select=Uniform(1)), task, 1, seed=seed)[0]
        for seed in (0, 1, 2, 3, 4)
    ]
    devices = {small.rows(step)[0].device: step.buffers["1.running_mean"] for step in alone}
    if len(devices) < 2:
        pytest.fail("the seeds never drew both devices")
    sizes = [len(task.data(0)), len(task.data(1))]
    together = small.steps(method, task, 1)[0].buffers["1.running_mean"]
    expected = (sizes[0] * devices[0] + sizes[1] * devices[1]) / sum(sizes)
    torch.testing.assert_close(together, expected, rtol=0.05, atol=0.02)


def test_on_device_normalisation_never_travels() -> None:
    task = small.task()
    runtime = Simulated(task, small.world(task))
    method = replace(fedavg(count=8, lr=0.1), norm=OnDevice())
    steps = run(method, task, runtime, 0)
    step = next(steps)
    step = next(steps)
    home = {"1.weight", "1.bias", "1.running_mean", "1.running_var"}
    assert all(torch.equal(step.params[n], task.params[n]) for n in home & set(step.params))
    kept = [runtime.state(device).tensors["own"] for device in range(task.devices)]
    assert all(set(memory) == home for memory in kept)
    assert not torch.equal(kept[0]["1.running_mean"], kept[1]["1.running_mean"])
    assert not torch.equal(kept[0]["1.weight"], task.params["1.weight"])
    whole = sum(v.numel() for v in task.params.values())
    assert small.rows(step)[0].bits_down == 32 * (whole - 12)


def test_static_statistics_are_the_plain_mean_over_batches() -> None:
    """specification §1.5 d, against nn.BatchNorm2d with momentum=None."""
    task = small.task(dropout=0.0)
    module = small.net(dropout=0.0)
    norm = module[1]
    assert isinstance(norm, nn.BatchNorm2d)
    norm.momentum = None  # torch: a cumulative average
    norm.reset_running_stats()
    module.train()
    pool = small.patterns(700, 4)
    assert len(list(batches(pool))) == 3
    found = calibrate(task.blueprint, task.params, task.buffers, pool)
    with torch.no_grad():
        for x, _ in batches(pool):
            module(x)
    torch.testing.assert_close(found["1.running_mean"], norm.running_mean)
    torch.testing.assert_close(found["1.running_var"], norm.running_var)


def test_static_training_keeps_no_statistics_but_testing_uses_calibrated_ones() -> None:
    task = small.task()
    method = replace(FAST, norm=Static())
    last = small.steps(method, task, 3)[-1]
    assert small.identical(last.buffers, task.buffers)
    static = evaluate(task, last.params, last.buffers, norm=Static())
    stale = evaluate(task, last.params, last.buffers, norm=Tracked())
    assert static["loss"] != pytest.approx(stale["loss"], rel=1e-3)


def test_every_width_has_its_own_normalisation() -> None:
    task = small.task()
    method = replace(FAST, norm=PerWidth(), plan=WidthByLevel((1.0, 0.5)))
    step = small.steps(replace(method, select=Uniform(8)), task, 2)[-1]
    (half_name,) = (name for name in step.params if name.startswith("1.weight@0.5"))
    assert any(name.startswith("1.running_mean@0.5") for name in step.buffers)
    assert not torch.equal(step.params["1.weight"][:3], step.params[half_name][:3])
    # The half-width one exists in full, and only its own half has moved.
    own = step.params[half_name]
    assert torch.equal(own[3:], task.params["1.weight"][3:])
    assert not torch.equal(own[:3], task.params["1.weight"][:3])
    half = task.blueprint.prefix(0.5)
    assert evaluate(task, step.params, step.buffers, norm=PerWidth(), slice_=half)["loss"] > 0


def test_a_net_without_normalisation_runs_under_every_policy() -> None:
    task = small.task(norm=False, dropout=0.0)
    ends = [
        small.steps(replace(FAST, norm=norm), task, 2)[-1].params
        for norm in (BatchStatistics(), Tracked(), OnDevice(), Static(), PerWidth())
    ]
    assert all(small.identical(ends[0], end) for end in ends[1:])


def test_sub_models_are_tested_with_their_own_statistics() -> None:
    task = small.task()
    method = heterofl(widths=(1.0, 0.5), count=4, lr=0.1)
    last = small.steps(method, task, 2)[-1]
    half = task.blueprint.prefix(0.5)
    small_params = cut(last.params, half, task.blueprint)
    assert small_params["0.weight"].shape[0] == 3
    whole = evaluate(task, last.params, last.buffers, norm=method.norm, slice_=Slice())
    part = evaluate(task, last.params, last.buffers, norm=method.norm, slice_=half)
    assert whole["loss"] != part["loss"]
