"""FedAdp, Optimal Aggregation, FedPNS and BN2 as whole methods."""

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from anyfleet.arrays import Ints
from anyfleet.core.loop import Round
from anyfleet.core.messages import Params
from anyfleet.core.method import Method
from anyfleet.core.slots import Select
from anyfleet.core.view import View
from anyfleet.methods import bn2, fedadp, fedavg, fedpns, heterofl, optimal_aggregation
from anyfleet.methods.fedavg import Training
from anyfleet.parts.aggregate import AngleWeighted, Diagnosed
from anyfleet.parts.plan import WidthByLevel
from anyfleet.parts.schedule import Buffered
from anyfleet.parts.select import Quota, Uniform
from anyfleet.runtime import Sequential, Stacked, Threads
from anyfleet.tasks import Task
from anyfleet.tasks.partition import Mixed
from anyfleet.world import levels
from tests.helpers import small

SETTINGS: Training = {"lr": 0.1, "batch_size": 8}
LONGER: Training = {
    "lr": 0.1,
    "batch_size": 8,
    "epochs": 3,
}  # directions above the noise of batches
ONE_LEVEL = levels(speeds=(1e9,))
UNEQUAL = levels(speeds=(1e9, 2e7))


def devices(step: Round, kind: str = "train") -> list[int]:
    return [row.device for row in small.rows(step) if row.kind == kind]


# --- what equals FedAvg -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [
        optimal_aggregation(share=1.0, count=5, **SETTINGS),
        fedpns(share=1.0, count=5, **SETTINGS),
        bn2(draw=5, keep=5, **SETTINGS),
        replace(fedavg(**SETTINGS), select=Quota(5)),
    ],
    ids=["optimal aggregation of all", "fedpns of all", "bn2 of all", "quota of one level"],
)
def test_equal_to_fedavg_bit_for_bit(method: Method) -> None:
    assert small.identical(end(method), end(fedavg(count=5, **SETTINGS)))


@cache
def end(method: Method) -> Params:
    return small.steps(method, small.task(), 4, fleet=ONE_LEVEL)[-1].params


def test_fedadp_of_one_device_is_fedavg_bit_for_bit() -> None:
    alone = [replace(m, select=Uniform(1)) for m in (fedadp(**SETTINGS), fedavg(**SETTINGS))]
    one, two = (small.steps(method, small.task(), 3)[-1].params for method in alone)
    assert small.identical(one, two)


# --- FedAdp -----------------------------------------------------------------------------------


def test_everybody_takes_part_in_fedadp_and_angles_are_told() -> None:
    steps = small.steps(fedadp(**SETTINGS), small.task(), 3)
    assert all(sorted(devices(step)) == list(range(8)) for step in steps)
    notes = steps[-1].diagnostics
    assert notes["angles"].keys() == notes["smoothed_angles"].keys() == set(range(8))
    assert sum(notes["weights"].values()) == pytest.approx(1.0)
    history = [step.diagnostics["angles"][3] for step in steps]
    assert notes["smoothed_angles"][3] == pytest.approx(np.mean(history))
    assert notes["expected_decrease_instantaneous"] >= notes["expected_decrease_of_mean"]


def mixed(devices: int, iid: int) -> tuple[Task, set[int]]:
    """The last devices have one class each."""
    rule = Mixed(iid=iid, classes=1, samples=30)
    task = small.task(devices=devices, dropout=0.0, partition=rule)
    few = {d for d in range(devices) if len(task.labels(d).nonzero()) == 1}
    assert few == set(range(iid, devices))
    return task, few


def test_devices_of_one_class_weigh_less_in_fedadp() -> None:
    task, few = mixed(8, iid=5)
    notes = small.steps(fedadp(**LONGER), task, 4)[-1].diagnostics
    angles, weights = notes["smoothed_angles"], notes["weights"]
    assert min(angles[d] for d in few) > max(angles[d] for d in range(8) if d not in few)
    assert max(weights[d] for d in few) < min(weights[d] for d in range(8) if d not in few)


# --- Optimal Aggregation and FedPNS -----------------------------------------------------------


def test_optimal_aggregation_leaves_out_devices_of_one_class() -> None:
    task, few = mixed(10, iid=7)
    steps = small.steps(optimal_aggregation(count=10, **LONGER), task, 5)
    labelled = [step.diagnostics["labelled"] for step in steps]
    excluded = [step.diagnostics["excluded"] for step in steps]
    assert few == set().union(*excluded)
    assert all(set(out) <= set(told) for out, told in zip(excluded, labelled, strict=True))
    assert all(len(told) - len(out) <= 1 for out, told in zip(excluded, labelled, strict=True))
    assert max(map(len, excluded)) == 3  # seven of ten remain
    plain = small.steps(fedavg(count=10, **LONGER), task, 5)
    first = next(index for index, out in enumerate(excluded) if out)
    same = [small.identical(a.params, b.params) for a, b in zip(steps, plain, strict=True)]
    assert same == [index < first for index in range(5)]


def test_fedpns_asks_those_less_often_whom_it_labelled() -> None:
    task, _ = mixed(10, iid=7)
    steps = small.steps(fedpns(count=5, **LONGER), task, 8)
    same = small.steps(fedavg(count=5, **LONGER), task, 1)
    assert devices(steps[0]) == devices(same[0])
    state = steps[-1].snapshot.states["select"]
    asked = np.bincount([d for step in steps for d in devices(step)], minlength=10)
    assert state.selected.tolist() == asked.tolist()
    labels = np.bincount([d for s in steps for d in s.diagnostics["labelled"]], minlength=10)
    assert state.labelled.tolist() == labels.tolist()
    assert labels.sum() > 0
    assert state.probability[labels > 0].max() < state.probability[labels == 0].min()
    assert state.probability.sum() == pytest.approx(1.0)
    entropy = [step.diagnostics["selection_entropy"] for step in steps]
    assert entropy[-1] < np.log(10)
    assert steps[-1].diagnostics["selection_highest"] == state.probability.max()


# --- BN2 --------------------------------------------------------------------------------------


def test_1_20_all_compute_few_upload_and_everybody_sends_one_number() -> None:
    task = small.task()
    method = bn2(draw=6, keep=2, **SETTINGS)
    assert method.job().report == ("norm",)
    for step in small.steps(method, task, 2):
        held = [row for row in small.rows(step) if row.kind == "hold"]
        fetched = [row for row in small.rows(step) if row.kind == "fetch"]
        assert (len(held), len(fetched)) == (6, 2)
        assert all(row.flops > 0 and row.compute_seconds > 0 and row.bits_up == 32 for row in held)
        whole = 32 * sum(value.numel() for value in task.params.values())
        assert all(row.flops == 0 and row.bits_up == whole for row in fetched)
        largest = sorted(held, key=lambda row: -row.norm)[:2]
        assert {row.device for row in fetched} == {row.device for row in largest}


@dataclass(frozen=True)
class Named(Select):
    """Always these devices."""

    devices: tuple[int, ...]

    def __call__(self, view: View, state: object, key: Tensor) -> Ints:
        return np.array(self.devices)


def test_bn2_is_fedavg_of_those_who_upload() -> None:
    task = small.task(equal=False)
    step = small.steps(bn2(draw=8, keep=3, **SETTINGS), task, 1)[0]
    kept = tuple(sorted(devices(step, "fetch")))
    assert len(kept) == 3
    same = replace(fedavg(**SETTINGS), select=Named(kept))
    expected = small.steps(same, task, 1)[0].params
    assert small.identical(step.params, expected)


# --- all of them ------------------------------------------------------------------------------

METHODS = {
    "fedadp": fedadp(**SETTINGS),
    "optimal aggregation": optimal_aggregation(count=6, statistic="mean", **SETTINGS),
    "fedpns": fedpns(count=6, statistic="mean", **SETTINGS),
    "bn2": bn2(draw=6, keep=3, **SETTINGS),
    "fedadp of sub-models": replace(
        heterofl(widths=(1.0, 0.5), **SETTINGS), aggregate=Diagnosed(AngleWeighted())
    ),
    "fedpns of sub-models": replace(
        fedpns(count=6, statistic="mean", **SETTINGS), plan=WidthByLevel((1.0, 0.5))
    ),
}


@pytest.mark.parametrize("name", METHODS)
def test_engines_agree(name: str) -> None:
    task = small.task(equal=False, dtype=torch.float64)
    ends = [
        small.steps(METHODS[name], task, 2, engine=engine, fleet=UNEQUAL)[-1]
        for engine in (Sequential(), Threads(), Stacked())
    ]
    assert small.identical(ends[0].params, ends[1].params)
    assert small.distance(ends[0].params, ends[2].params) < 1e-10
    assert ends[0].diagnostics.get("labelled") == ends[2].diagnostics.get("labelled")


@pytest.mark.parametrize("name", [name for name in METHODS if name != "bn2"])
def test_stale_updates_are_compared_with_the_others(name: str) -> None:
    method = replace(METHODS[name], schedule=Buffered(concurrency=6, buffer_size=4, staleness=9))
    steps = small.steps(method, small.task(), 6, fleet=UNEQUAL)
    ages = [row.round_index - row.issued_round for step in steps for row in small.rows(step)]
    assert max(ages) > 0
    assert all(value.isfinite().all() for value in steps[-1].params.values())
    assert not small.identical(steps[-1].params, steps[0].params)
