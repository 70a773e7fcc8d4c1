"""What equals FedAvg must equal it bit for bit."""

from dataclasses import replace
from typing import TypedDict, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anyfleet.core.local_training import samples_processed
from anyfleet.core.method import Method
from anyfleet.core.slots import Plan
from anyfleet.methods import fedavg, fedprox, fedrescue, fedrush, heterofl
from anyfleet.methods.fedavg import Training
from anyfleet.parts.choose import LargestInTime
from anyfleet.parts.norm import Tracked
from anyfleet.parts.plan import (
    Assigned,
    LocalStepsWithin,
    TrainedLayersMenu,
    WidthMenu,
    WorkByLevel,
)
from anyfleet.parts.plan.local_steps import StepSeconds, fitting
from anyfleet.parts.schedule import Deadline
from anyfleet.parts.select import Everyone, Uniform
from anyfleet.tasks import Dirichlet, XClass
from anyfleet.world import levels
from tests.helpers import small

SETTINGS: Training = {"lr": 0.1, "batch_size": 8}
FEDAVG = fedavg(count=5, **SETTINGS)


class Parts(TypedDict):
    """The switches of HeteroFL."""

    label_rows: bool
    masked: bool
    scaler: bool
    static_norm: bool


OFF: Parts = {"label_rows": False, "masked": False, "scaler": False, "static_norm": False}


@pytest.mark.parametrize(
    "method",
    [
        fedprox(mu=0.0, count=5, **SETTINGS),
        fedprox(mu=0.0, seconds=1e9, count=5, **SETTINGS),
        heterofl(widths=(1.0,), **OFF, count=5, **SETTINGS),
        replace(fedavg(count=5, **SETTINGS), plan=WidthMenu((1.0,))),
        replace(
            fedavg(count=5, **SETTINGS), plan=WorkByLevel(batch_sizes=(8,), epochs=(1,), lrs=(0.1,))
        ),
    ],
    ids=["fedprox mu=0", "fedprox with time to spare", "heterofl whole", "menu", "by level"],
)
def test_equal_to_fedavg_bit_for_bit(method: Method) -> None:
    task = small.task()
    expected = small.steps(fedavg(count=5, **SETTINGS), task, 5)[-1].params
    assert small.identical(small.steps(method, task, 5)[-1].params, expected)


@pytest.mark.parametrize("count", [1, 4])
def test_fedrush_differs_from_fedrescue_only_where_parts_lie_inside_each_other(count: int) -> None:
    """With one part, the whole of what a device holds, there is nothing to freeze or overwrite."""
    task, two_levels = small.task(), levels(speeds=(1e9, 1e8))
    one, two = (
        small.steps(make(widths=(1.0, 0.5), samples=count, **SETTINGS), task, 2, fleet=two_levels)
        for make in (fedrescue, fedrush)
    )
    assert small.identical(one[-1].params, two[-1].params) == (count == 1)


@pytest.mark.parametrize(
    "menu", [WidthMenu((1.0, 0.5, 0.25)), TrainedLayersMenu()], ids=["shares", "depths"]
)
def test_what_the_server_assigns_trains_the_model_that_devices_would_choose(menu: Plan) -> None:
    task, fleet = small.task(), levels(speeds=(1e8, 3e7, 1e7, 3e6))
    base, choose = replace(fedavg(lr=0.1), select=Everyone()), LargestInTime(0.04)
    chosen = small.steps(replace(base, plan=menu, choose=choose), task, 3, fleet=fleet)
    assigned = small.steps(replace(base, plan=Assigned(menu, choose)), task, 3, fleet=fleet)
    assert small.identical(chosen[-1].params, assigned[-1].params)
    assert len({(row.width, row.first_trained_layer) for row in small.rows(chosen[-1])}) > 1


@pytest.mark.parametrize("part", ["label_rows", "masked", "scaler", "static_norm"])
def test_each_part_of_heterofl_is_a_switch_of_its_own(part: str) -> None:
    task = small.task(partition=Dirichlet(0.2))
    off = heterofl(widths=(1.0, 0.5), **OFF, count=5, **SETTINGS)
    switches = cast(Parts, {**OFF, part: True})
    on = heterofl(widths=(1.0, 0.5), **switches, count=5, **SETTINGS)
    changed = [name for name in ("train", "norm") if getattr(on, name) != getattr(off, name)]
    assert changed == (["norm"] if part == "static_norm" else ["train"])
    one, two = (small.steps(method, task, 2)[-1] for method in (off, on))
    same = small.identical(one.params, two.params)
    # Static statistics act in the test only; the other three change what is learned.
    assert same == (part == "static_norm")


def test_partial_work_does_the_steps_that_fit() -> None:
    task = small.task()
    fleet = levels(speeds=(2e9, 2e7))
    full = small.steps(fedavg(count=8, lr=0.1, batch_size=4, epochs=3), task, 1, fleet=fleet)[0]
    limit = 0.05
    method = fedprox(mu=0.1, seconds=limit, count=8, lr=0.1, batch_size=4, epochs=3)
    part = small.steps(method, task, 1, fleet=fleet)[0]
    whole = {row.device: row for row in small.rows(full)}
    shortened = [row for row in small.rows(part) if row.flops < whole[row.device].flops]
    assert 0 < len(shortened) < 8
    for row in small.rows(part):
        seconds = row.download_seconds + row.compute_seconds + row.upload_seconds
        one_step = whole[row.device].compute_seconds / 24
        assert seconds <= limit * 1.01 or row.compute_seconds <= one_step * 1.01
    assert part.time < full.time


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 200), st.integers(0, 5))
def test_the_steps_that_fit_are_the_most_that_fit(
    samples: int, batch: int, budget: int, step: int
) -> None:
    def needed(steps: int) -> int:
        return steps * step + samples_processed(steps, samples, batch)

    costs = StepSeconds(np.array([float(step)]), np.ones(1))
    (found,) = fitting(np.array([float(budget)]), costs, np.array([samples]), np.array([batch]))
    assert needed(int(found)) <= budget < needed(int(found) + 1)


def test_what_a_device_chooses_meets_an_equal_deadline() -> None:
    task = small.task()
    fleet = levels(speeds=(1e9, 1e8))
    menu = replace(fedavg(lr=0.1), select=Everyone(), plan=WidthMenu((1.0, 0.25)), norm=Tracked())
    free = small.steps(menu, task, 1, fleet=fleet)[0]
    slow = max(
        row.download_seconds + row.compute_seconds + row.upload_seconds for row in small.rows(free)
    )
    exact = slow * (1 + 1e-9)
    method = replace(menu, choose=LargestInTime(exact), schedule=Deadline(exact))
    step = small.steps(method, task, 1, fleet=fleet)[0]
    assert {(row.choice, row.failure) for row in small.rows(step)} == {(0, "")}


def test_heterofl_trains_the_leading_share_of_each_level() -> None:
    task = small.task()
    method = replace(heterofl(widths=(1.0, 0.5), lr=0.1), select=Everyone())
    step = small.steps(method, task, 1, fleet=levels(speeds=(1e9, 1e8)))[0]
    whole = task.blueprint.numel()
    half = task.blueprint.local(task.blueprint.prefix(0.5)).numel()
    assert sorted(row.parameters for row in small.rows(step)) == [half] * 4 + [whole] * 4


def test_channels_nobody_trains_keep_their_values() -> None:
    task = small.task()
    method = heterofl(widths=(0.5,), count=4, lr=0.1)
    last = small.steps(method, task, 2)[-1]
    assert torch.equal(last.params["0.weight"][3:], task.params["0.weight"][3:])
    assert not torch.equal(last.params["0.weight"][:3], task.params["0.weight"][:3])


def test_label_rows_of_absent_classes_keep_their_values() -> None:
    task = small.task(partition=XClass(2, samples=30))
    method = replace(heterofl(widths=(1.0,), lr=0.1), select=Uniform(1))
    step = small.steps(method, task, 1)[0]
    present = task.labels(small.rows(step)[0].device)
    moved = (step.params["10.weight"] != task.params["10.weight"]).any(dim=1)
    assert torch.equal(moved, present)


def test_largest_in_time_takes_the_last_entry_when_nothing_fits() -> None:
    task = small.task()
    method = replace(
        fedavg(count=5, **SETTINGS), plan=WidthMenu((1.0, 0.25)), choose=LargestInTime(1e-9)
    )
    assert {row.choice for row in small.rows(small.steps(method, task, 1)[0])} == {1}


def test_steps_within_keeps_at_least_one_step() -> None:
    task = small.task()
    method = replace(fedavg(count=5, **SETTINGS), plan=LocalStepsWithin(1e-9))
    step = small.steps(method, task, 1)[0]
    whole = small.steps(fedavg(count=5, **SETTINGS), task, 1)[0]
    for one, all_ in zip(small.rows(step), small.rows(whole), strict=True):
        assert 0 < one.flops < all_.flops
