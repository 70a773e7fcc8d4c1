"""What devices say of themselves, and what asking them costs."""

import math
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from anyfleet.core.device_states import DeviceStates
from anyfleet.core.loop import run
from anyfleet.core.messages import Kind
from anyfleet.core.slots import Norm
from anyfleet.elastic import WHOLE, cost
from anyfleet.methods import fedavg
from anyfleet.parts.norm import Static, Tracked
from anyfleet.parts.schedule import Surveyed, Synchronous
from anyfleet.runtime import Simulated
from anyfleet.runtime.simulated.charging import demand
from tests.core.test_local_training import orders
from tests.helpers import small


def test_devices_report_the_loss_of_their_last_answer() -> None:
    """What policies may choose by: not a number before the first answer."""
    task = small.task()
    runtime = Simulated(task, small.world(task))
    steps = run(fedavg(count=3, lr=0.1), task, runtime, 0)
    everybody = np.arange(task.devices)
    assert np.isnan(runtime.conditions(everybody).loss).all()
    said: dict[int, float] = {}
    for step in islice(steps, 3):
        said |= dict(zip(step.ledger.device.tolist(), step.ledger.loss.tolist(), strict=True))
        found = runtime.conditions(everybody).loss
        assert [said.get(device, math.nan) for device in range(task.devices)] == pytest.approx(
            found.tolist(), nan_ok=True
        )
    assert 3 <= len(said) < task.devices
    again = Simulated(task, small.world(task))
    again.restore(runtime.save())
    assert np.array_equal(again.conditions(everybody).loss, found, equal_nan=True)


def test_statistics_before_a_test_are_paid_for() -> None:
    """The static norm goes through all training data before tests (specification §1.5 d)."""
    task = small.task()
    forward = cost(task.blueprint).forward_flops
    for norm, passes in ((Static(), 2), (Tracked(), 1)):
        method = replace(fedavg(lr=0.1), norm=norm, schedule=Surveyed(Synchronous()))
        (step,) = small.steps(method, task, 1)
        asked = [row for row in small.rows(step) if row.kind == "evaluate"]
        assert len(asked) == 8
        for row in asked:
            own, test = len(task.data(row.device)), len(task.own_test(row.device))
            assert row.flops == forward * (test + own * (passes - 1))


@pytest.mark.parametrize("norm", [Static(), Tracked()], ids=["two passes", "one pass"])
def test_looking_at_data_costs_what_its_batches_cost(
    norm: Norm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps, operator calls and bytes moved, for every batch of every pass."""
    monkeypatch.setattr("anyfleet.runtime.simulated.charging.EVALUATION_BATCH", 20)
    task = small.task()
    order = replace(orders(replace(fedavg(lr=0.1), norm=norm), task, [2]), kind=Kind.EVALUATE)
    batch, own, test = cost(task.blueprint, WHOLE, 20), task.size(2), len(task.own_test(2))
    assert (own, test) == (30, 7)  # together two batches, one after the other three
    batches = 1 + (2 if norm == Static() else 0)
    found = demand(order, np.array([own]), task, "flops", DeviceStates(task))
    assert found.effort.local_steps.tolist() == [batches]
    assert found.effort.calls.tolist() == [batches * batch.forward_calls]
    assert found.effort.moved.tolist() == [batches * batch.forward_moved]
    assert found.memory.tolist() == [batch.nbytes]


@pytest.mark.parametrize("ask", [Kind.STATISTICS, Kind.EVALUATE])
def test_a_survey_does_not_change_what_devices_say_of_their_training(ask: Kind) -> None:
    task = small.task()
    runtime = Simulated(task, small.world(task))
    method = replace(fedavg(lr=0.1), schedule=Surveyed(Synchronous(), ask))
    step = next(run(method, task, runtime, 0))
    trained = [row for row in small.rows(step) if row.kind == "train"]
    asked = [row for row in small.rows(step) if row.kind == str(ask)]
    assert len(asked) == 8
    found = runtime.conditions(np.array([row.device for row in trained])).loss
    assert found.tolist() == [row.loss for row in trained]
