"""Evaluation: several models, widths and devices at once, as each of them alone."""

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from anyfleet.core import evaluation
from anyfleet.core.client import carry_out
from anyfleet.core.device_states import DeviceStates
from anyfleet.core.evaluation import TestedModel as Model  # else pytest takes it for a test
from anyfleet.core.evaluation import (
    batches,
    calibrate_each,
    examine,
    stackable,
    to_test,
    to_test_each,
)
from anyfleet.core.messages import Kind
from anyfleet.core.objectives import losses, scores
from anyfleet.core.slots import Norm
from anyfleet.elastic import COLLECT, apply
from anyfleet.methods import fedavg, local
from anyfleet.parts.norm import BatchStatistics, OnDevice, Static, Tracked
from anyfleet.parts.schedule import Surveyed, Synchronous
from anyfleet.runtime import Stacked, Workers
from anyfleet.tasks import Data, Split, Task
from tests.core.test_local_training import orders
from tests.helpers import small

WIDTHS = (1.0, 0.5, 0.25)
TASK = replace(small.task(), test=small.patterns(700, 4))  # three batches


@torch.no_grad()
def plainly(task: Task, model: Model, data: Data) -> dict[str, float]:
    """Return loss and metrics batch by batch, number by number: what `examine` must give."""
    totals = dict.fromkeys(("loss", *task.metrics), 0.0)
    for x, y in batches(data):
        output, _ = apply(model.blueprint, model.params, model.buffers, x, model.mode)
        values = {"loss": losses(task, output, y)}
        values |= {name: scores(task, name, output, y) for name in task.metrics}
        for name, value in values.items():
            totals[name] += float(value.double().sum())
    return {name: total / len(data) for name, total in totals.items()}


def models(norm: Norm) -> list[Model]:
    slices = [TASK.blueprint.prefix(width) for width in WIDTHS]
    return to_test_each(TASK, TASK.params, TASK.buffers, norm=norm, slices=slices)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("norm", [Tracked(), BatchStatistics(), Static()], ids=str)
def test_widths_examined_together_score_as_each_alone(norm: Norm, workers: int) -> None:
    tested = models(norm)
    found = examine(TASK, tested, TASK.test, workers=workers).means()
    assert found == [plainly(TASK, model, TASK.test) for model in tested]  # bit for bit
    assert len({each["loss"] for each in found}) == len(WIDTHS)


@pytest.mark.parametrize("workers", [1, 3])
def test_what_is_kept_is_in_the_order_of_the_data(workers: int) -> None:
    tested = models(Tracked())
    kept = examine(TASK, tested, TASK.test, keep="accuracy", workers=workers).samples()
    for model, hits in zip(tested, kept, strict=True):
        output, _ = apply(model.blueprint, model.params, model.buffers, TASK.test.x, model.mode)
        assert hits.tolist() == (output.argmax(1) == TASK.test.y).double().tolist()
    assert 0 < kept.mean() < 1


@pytest.mark.parametrize("workers", [1, 3])
@torch.no_grad()
def test_statistics_of_several_models_are_those_of_each(workers: int) -> None:
    tested = models(Tracked())
    found = calibrate_each(tested, TASK.test, workers)
    for model, statistics in zip(tested, found, strict=True):
        seen = [
            apply(model.blueprint, model.params, model.buffers, x, COLLECT)[1]
            for x, _ in batches(TASK.test)
        ]
        assert len(seen) == 3
        for name, value in statistics.items():
            total = seen[0][name] + seen[1][name] + seen[2][name]
            assert torch.equal(value, total / 3)
    alone = to_test(TASK, TASK.params, TASK.buffers, norm=Static())
    together = to_test_each(
        TASK,
        TASK.params,
        TASK.buffers,
        norm=Static(),
        slices=[TASK.blueprint.prefix(width) for width in WIDTHS],
        workers=workers,
    )
    assert small.identical(alone.buffers, together[0].buffers)


def test_without_data_nothing_is_known() -> None:
    nothing = Data(TASK.test.x[:0], TASK.test.y[:0])
    found = examine(TASK, models(Tracked()), nothing, keep="accuracy")
    assert all(np.isnan(value) for each in found.means() for value in each.values())
    assert found.samples().shape == (3, 0)


# --- devices that measure their own models --------------------------------------------------------


def uneven() -> Task:
    """Devices of which some have several batches, some a few rows, and one nothing to test on."""
    trained, tested = (300, 20, 530, 10, 30, 9, 12, 40), (600, 3, 257, 0, 7, 40, 256, 1)
    found = small.patterns(sum(trained) + sum(tested), 7)
    rows = torch.split_with_sizes(torch.arange(len(found)), [*trained, *tested])
    return replace(
        small.task(dtype=torch.float64),
        train=Data(found.x.double(), found.y),
        train_rows=rows[:8],
        test_rows=rows[8:],
    )


@pytest.mark.parametrize("kind", [Kind.EVALUATE, Kind.REPORT])
@pytest.mark.parametrize("norm", [Tracked(), OnDevice(), BatchStatistics(), Static()], ids=str)
def test_devices_measured_as_a_stack_are_as_one_by_one(norm: Norm, kind: Kind) -> None:
    task = uneven()
    devices = list(range(8))
    states = DeviceStates(task)
    method = replace(local(lr=0.1), norm=norm)
    trained = carry_out(orders(method, task, devices), states, task)
    states.commit(trained.remembered)  # now each has a model of its own
    asked = replace(orders(method, task, devices), kind=kind)
    assert stackable(task, task.blueprint)
    together = carry_out(asked, states, task).replies
    alone = carry_out(asked, states, task, stacks=list(np.arange(8)[:, None])).replies
    for row in devices:
        first, second = together.report_of(row), alone.report_of(row)
        assert first.keys() == second.keys() == {"loss", "accuracy"}
        for name, value in first.items():
            assert value == pytest.approx(second[name], rel=1e-10, nan_ok=True)
    assert together.samples.tolist() == alone.samples.tolist()
    losses_ = [together.report_of(row)["loss"] for row in devices]
    assert len(set(losses_)) == 8
    assert np.isnan(losses_[3]) == (kind == Kind.EVALUATE)


def test_a_device_without_data_keeps_its_statistics() -> None:
    task = uneven()
    task = replace(task, train_rows=(*task.train_rows[:7], task.train_rows[7][:0]))
    asked = replace(orders(replace(fedavg(), norm=Static()), task, [6, 7]), kind=Kind.EVALUATE)
    together = carry_out(asked, DeviceStates(task), task).replies
    alone = carry_out(asked, DeviceStates(task), task, stacks=[np.array([0]), np.array([1])])
    for row in (0, 1):
        expected = alone.replies.report_of(row)
        assert together.report_of(row) == pytest.approx(expected, rel=1e-10)


def test_engines_agree_on_what_devices_measure() -> None:
    task = small.task(dtype=torch.float64, equal=False)
    method = replace(fedavg(lr=0.1), norm=Static(), schedule=Surveyed(Synchronous()))
    expected, *others = (
        small.steps(method, task, 1, engine=engine)[0].replies
        for engine in (None, Workers(2), Stacked(), Stacked(workers=2))
    )
    assert len(expected) > 4
    for replies in others:
        for found, reply in zip(replies, expected, strict=True):
            assert found.report == pytest.approx(reply.report, rel=1e-10)


class Centred(nn.Module):
    """A layer in which the samples of a batch see each other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0, keepdim=True)


def test_devices_whose_samples_see_each_other_are_measured_alone() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), Centred())
    split = Split(devices=4, test_share=0.3)
    task = Task.of(net, small.patterns(150, 1), small.patterns(30, 2), split=split)
    assert not stackable(task, task.blueprint)
    asked = replace(orders(fedavg(), task, [0, 1, 2, 3]), kind=Kind.EVALUATE)
    together = carry_out(asked, DeviceStates(task), task).replies
    alone = carry_out(asked, DeviceStates(task), task, stacks=list(np.arange(4)[:, None])).replies
    assert [together.report_of(r) for r in range(4)] == [alone.report_of(r) for r in range(4)]


@pytest.mark.parametrize(("where", "threads"), [("meta", False), ("cpu", True)])
def test_batches_leave_the_calling_thread_on_a_processor_alone(where: str, threads: bool) -> None:
    rows = [torch.empty(3, device=where)] * 4
    seen = evaluation._map(lambda _: threading.get_ident(), rows, workers=4)
    assert (threading.get_ident() not in seen) == threads
