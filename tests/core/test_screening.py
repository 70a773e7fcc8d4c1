"""What the server asks of replies before they count, and of models before it keeps them."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from anyfleet.arrays import join
from anyfleet.core.client import work
from anyfleet.core.device_state import DeviceState
from anyfleet.core.messages import Kind
from anyfleet.core.orders import Cohort, IssuedOrders
from anyfleet.core.screening import Screen, believable
from anyfleet.core.stacks import Replies
from anyfleet.measure import Fisher
from anyfleet.methods import fedavg
from anyfleet.parts.norm import Tracked
from anyfleet.runtime import Limits
from anyfleet.world.quantities import When
from tests.core.test_local_training import orders
from tests.helpers import small
from tests.helpers.changed import with_contents

TASK = small.task()
ORDER = orders(replace(fedavg(lr=0.1, batch_size=8), norm=Tracked()), TASK, [3])
MEASURING = replace(ORDER, job=replace(ORDER.job, measures=(Fisher(),)))
UPDATE = work(ORDER, (DeviceState(),), TASK).replies
DECLARED = np.array([TASK.size(device) for device in range(TASK.devices)])


def refusal(update: Replies, limits: Limits | None = None, kind: Kind = Kind.TRAIN) -> str:
    return refusals(replace(MEASURING, kind=kind), update, limits)[0]


def refusals(order: Cohort, replies: Replies, limits: Limits | None = None) -> list[str]:
    screen = Screen.of(TASK, order.job, DECLARED, limits or Limits())
    return screen.check(IssuedOrders.of(order), replies).reasons


def spoilt(tree: str, name: str, value: float) -> Replies:
    """One number of one tensor is another."""
    trees = dict(UPDATE.trees_of(0))
    tensor = trees[tree][name].clone()
    tensor.view(-1)[-1] = value
    trees[tree] = {**trees[tree], name: tensor}
    return with_contents(UPDATE, trees=trees)


def told(report: Mapping[Any, Any]) -> Replies:
    return with_contents(UPDATE, report={**UPDATE.report_of(0), **report})


def length(update: Replies) -> float:
    return math.sqrt(
        sum(float(v.double().square().sum()) for v in update.trees_of(0)["delta"].values())
    )


def test_an_honest_reply_is_not_refused() -> None:
    assert refusal(UPDATE) == ""


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("tree", "name"), [("delta", "4.weight"), ("delta", "10.bias"), ("buffers", "1.running_var")]
)
def test_what_is_not_finite_is_refused_and_named(tree: str, name: str, value: float) -> None:
    assert refusal(spoilt(tree, name, value)) == f"not finite: {name}"


def test_large_numbers_are_finite_though_their_squares_are_not() -> None:
    """In single precision the square of 1e30 overflows."""
    large = spoilt("delta", "4.weight", 1e30)
    assert refusal(large) == ""
    assert refusal(large, Limits(norm=1e29)) == "norm: 1e+30 is above 1e+29"
    assert refusal(large, Limits(norm=1e31)) == ""


def test_the_limit_of_the_norm_is_that_of_the_update_alone() -> None:
    assert refusal(UPDATE, Limits(norm=length(UPDATE) * 1.001)) == ""
    assert refusal(UPDATE, Limits(norm=length(UPDATE) * 0.999)).startswith("norm: ")
    # Statistics may be as large as they are.
    assert refusal(spoilt("buffers", "1.running_var", 1e6), Limits(norm=1e3)) == ""


@pytest.mark.parametrize(
    ("samples", "kind", "reason"),
    [
        (DECLARED[3], Kind.TRAIN, ""),
        (0, Kind.TRAIN, ""),
        (-1, Kind.TRAIN, f"samples: -1 of {DECLARED[3]}"),
        (DECLARED[3] + 1, Kind.TRAIN, f"samples: {DECLARED[3] + 1} of {DECLARED[3]}"),
        (DECLARED[3] + 1, Kind.EVALUATE, ""),
        (-1, Kind.EVALUATE, f"samples: -1 of {DECLARED[3]}"),
    ],
)
def test_nobody_has_more_samples_than_it_declared(samples: int, kind: Kind, reason: str) -> None:
    report = UPDATE.report_of(0) if kind == Kind.TRAIN else {"loss": 1.0}
    update = replace(with_contents(UPDATE, report=report), samples=np.array([samples]))
    assert refusal(update, kind=kind) == reason


@pytest.mark.parametrize(
    ("report", "name"),
    [
        ({"loss": math.inf}, "loss"),
        ({"norm": math.nan}, "norm"),
        ({"distortion": math.nan}, "distortion"),
        ({"own": (1.0, -math.inf)}, "own"),
    ],
)
def test_numbers_that_no_honest_device_reports(report: dict[str, Any], name: str) -> None:
    assert refusal(told(report)) == f"not finite: {name}"


def test_what_was_not_measured_is_not_a_number() -> None:
    assert refusal(told({"loss": math.nan, "mine": math.nan, "own": (math.nan, 1.0)})) == ""


@pytest.mark.parametrize(
    ("report", "reason"),
    [
        ({"loss": 1e308}, "report: loss of 1e+308 is not in [-1e+30, 1e+30]"),
        ({"loss": -1e31}, "report: loss of -1e+31 is not in [-1e+30, 1e+30]"),
        ({"own": (0.0, 2e30)}, "report: own of 2e+30 is not in [-1e+30, 1e+30]"),
        ({"distortion": -0.1}, "report: distortion of -0.1 is not in [0, 1e+30]"),
        ({"distortion": 1e31}, "report: distortion of 1e+31 is not in [0, 1e+30]"),
        ({"norm": -1.0}, "report: norm of -1 is not in [0, 1e+30]"),
        ({"fisher": 1.0}, "report: fisher was not asked for"),
        ({"channels": (1.0,)}, "report: channels was not asked for"),
        ({"loss": (1.0, 2.0)}, "report: several numbers as loss"),
        ({"n" * 101: 1.0}, "report: a name of 101 characters; at most 100"),
        ({"loss": "1.0"}, "report: loss is no number"),
        ({"loss": None}, "report: loss is no number"),
        ({"own": (1.0, "2")}, "report: own is no number"),
        ({"own": [1.0]}, "report: own is no number"),
        ({"loss": 10**400}, "not finite: loss"),
        ({"own": 10**40}, "report: own of 1e+40 is not in [-1e+30, 1e+30]"),
        ({3: 1.0}, "report: a name that is no text"),
        ({"loss": -5.0, "n" * 100: 1e30, "own": (1.0, 2.0)}, ""),
    ],
)
def test_reports_have_bounds(report: dict[Any, Any], reason: str) -> None:
    assert refusal(told(report)) == reason


def test_a_report_has_few_names_and_numbers() -> None:
    most = Limits().for_model(TASK.blueprint).report
    assert refusal(told({f"own {i}": 1.0 for i in range(65)})).startswith("report: ")
    assert refusal(told({"own": (1.0,) * most})).startswith(f"report: {most + 2} numbers")
    assert refusal(told({"own": (1.0,) * (most - 10)})) == ""


def test_a_measurement_that_some_part_wants_may_be_reported() -> None:
    order = replace(ORDER, job=replace(MEASURING.job, report=("fisher",)))
    assert refusals(order, told({"fisher": 2.0})) == [""]
    assert refusals(order, told({"fisher": -2.0}))[0].startswith("report: fisher of -2")
    assert refusals(order, told({"fisher": (2.0,)})) == ["report: several numbers as fisher"]
    order = replace(ORDER, job=replace(MEASURING.job, report=("channels",)))
    assert refusals(order, told({"channels": (2.0,)})) == [""]
    assert refusals(order, told({"channels": 2.0})) == ["report: one number as channels"]


def test_where_nothing_is_measured_a_trainer_may_use_any_name() -> None:
    assert refusals(ORDER, told({"fisher": -1.0})) == [""]


def test_an_evaluation_reports_the_loss_and_the_metrics_of_the_task_and_nothing_else() -> None:
    def told_by(report: dict[str, Any]) -> str:
        return refusal(with_contents(UPDATE, trees={}, report=report), kind=Kind.EVALUATE)

    assert told_by({"loss": 1.0, "accuracy": 0.5}) == ""
    assert told_by({"loss": 1.0, "beauty": 0.5}) == "report: beauty was not asked for"
    assert told_by({"accuracy": (0.5, 0.6)}) == "report: several numbers as accuracy"


def test_a_variance_is_not_negative() -> None:
    assert refusal(spoilt("buffers", "1.running_var", -1e-3)) == (
        "variance: 1.running_var is negative"
    )
    assert refusal(spoilt("buffers", "1.running_mean", -1e-3)) == ""


def test_a_loss_at_check_in_that_no_device_can_have_is_not_known() -> None:
    task = small.task()
    told = small.world(task).conditions(np.arange(4), When(0.0, 0), 1)
    loss = np.array([1.0, -2.0, 1e31, np.inf])
    assert np.array_equal(
        believable(replace(told, loss=loss)).loss, [1.0, -2.0, np.nan, np.nan], equal_nan=True
    )


def test_each_reply_is_checked_for_itself() -> None:
    bad = spoilt("delta", "4.weight", math.nan)
    nothing = with_contents(UPDATE, trees={"delta": {}})
    found = refusals(ORDER.take([0] * 4), join([UPDATE, bad, UPDATE, nothing]))
    assert found == ["", "not finite: 4.weight", "", ""]


def test_sizes_are_those_of_the_updates_where_all_of_them_counts() -> None:
    tree = UPDATE.trees_of(0)["delta"]
    rows = {name: torch.zeros_like(value) for name, value in tree.items()}
    masked, whole = (
        with_contents(UPDATE, masks=rows),
        with_contents(UPDATE, trees={"weights": tree}),
    )
    asked = IssuedOrders.of(ORDER.take([0] * 4))
    screen = Screen.of(TASK, ORDER.job, DECLARED, Limits())
    found = screen.check(asked, join([UPDATE, masked, spoilt("delta", "4.weight", 1e30), whole]))
    entries = sum(value.numel() for value in tree.values())
    assert found.reasons == [""] * 4
    assert found.sizes[0] == pytest.approx(length(UPDATE) / math.sqrt(entries))
    assert found.sizes[2] == pytest.approx(1e30 / math.sqrt(entries))
    assert np.isnan(found.sizes).tolist() == [False, True, False, True]


def test_reports_of_several_forms_are_checked_each() -> None:
    replies = [
        told({"own": (1.0, 2.0)}),
        told({"own": 1.0}),
        UPDATE,
        told({"own": (1.0, -math.inf)}),
    ]
    found = refusals(MEASURING.take([0] * 5), join([*replies, told({"own": (3.0, 2e30)})]))
    above = "report: own of 2e+30 is not in [-1e+30, 1e+30]"
    assert found == ["", "", "", "not finite: own", above]


def test_half_precision_and_double_are_judged_alike() -> None:
    for dtype in (torch.float16, torch.float64):
        tree = {n: v.to(dtype) for n, v in UPDATE.trees_of(0)["delta"].items()}
        assert refusal(with_contents(UPDATE, trees={"delta": tree})) == ""
