"""Speeds may count operations of a rule: plans, choices and the clock then count alike."""

from dataclasses import replace

import numpy as np
import pytest

from anyfleet.core.evaluation import EVALUATION_BATCH
from anyfleet.elastic.cost.operations import Counting, forward_operations, operations
from anyfleet.methods import fedavg
from anyfleet.parts.choose import LargestInTime
from anyfleet.parts.plan import LocalStepsWithin, WidthMenu
from anyfleet.parts.schedule import Surveyed, Synchronous
from anyfleet.world import Fleet, Group
from tests.helpers import small

FEDAVG = fedavg(count=8, lr=0.1, batch_size=8, epochs=2)
RULES: list[Counting] = ["flops", "declared", "per_batch"]


@pytest.mark.parametrize("counting", ["flops", "declared", "per_batch"])
def test_planners_count_as_the_clock_does(counting: Counting) -> None:
    """What fits a plan exactly arrives in time, whatever the speeds count."""
    fleet = Fleet((Group(speed=2e8), Group(speed=5e7)), counting=counting)
    task = small.task(norm=False)
    whole = small.steps(FEDAVG, task, 1, fleet=fleet)[0].ledger.seconds.max()
    method = replace(FEDAVG, plan=LocalStepsWithin(0.6 * whole))
    (step,) = small.steps(method, task, 1, fleet=fleet)
    told = step.ledger
    slow = told.level == 1
    assert np.all(told.seconds <= 0.6 * whole * (1 + 1e-9))
    # One more step would not have fitted: time is linear in steps.
    per_step = told.compute_seconds[slow] / told.local_steps[slow]
    assert np.all(told.seconds[slow] + per_step > 0.6 * whole)


@pytest.mark.parametrize("counting", RULES)
def test_devices_choose_as_the_clock_counts(counting: Counting) -> None:
    fleet = Fleet((Group(speed=2e8), Group(speed=2e7)), counting=counting)
    task = small.task(norm=False)
    limit = 0.5 * small.steps(FEDAVG, task, 1, fleet=fleet)[0].ledger.seconds.max()
    method = replace(FEDAVG, plan=WidthMenu((1.0, 0.5, 0.25)), choose=LargestInTime(limit))
    (step,) = small.steps(method, task, 1, fleet=fleet)
    assert np.all(step.ledger.seconds <= limit * (1 + 1e-9))
    strong, weak = (step.ledger.slice_width[step.ledger.level == level] for level in (0, 1))
    assert strong.min() >= weak.max()
    assert weak.max() < 1


def test_a_survey_is_charged_its_forward_operations() -> None:
    fleet = Fleet((Group(speed=5e7),), counting="per_batch")
    task = small.task(norm=False)
    method = replace(FEDAVG, schedule=Surveyed(Synchronous()))
    (step,) = small.steps(method, task, 1, fleet=fleet)
    asked = [row for row in small.rows(step) if row.kind == "evaluate"]
    whole = task.blueprint.prefix(1.0)
    batch = forward_operations(task.blueprint, whole, EVALUATION_BATCH, "per_batch")
    assert 0 < batch < operations(task.blueprint, whole, EVALUATION_BATCH, "per_batch")
    for row in asked:
        expected = batch * len(task.own_test(row.device)) / EVALUATION_BATCH
        assert row.flops == pytest.approx(expected)
        assert row.compute_seconds == pytest.approx(expected / 5e7)
    assert len(asked) == 8
