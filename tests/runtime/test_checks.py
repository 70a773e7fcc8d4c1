"""What a server asks of answers before they count."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from anyfleet.client import work
from anyfleet.methods import fedavg
from anyfleet.runtime.checks import screened
from anyfleet.runtime.engines import Assigned, Outcome
from anyfleet.runtime.limits import Limits
from anyfleet.train import Tracked
from anyfleet.types import Kind, Memory, Updates
from tests import small
from tests.test_local import orders

TASK = small.task()
ORDER = orders(replace(fedavg(lr=0.1, batch=8), norm=Tracked()), TASK, [3])
UPDATE = work(ORDER, (Memory(),), TASK).updates
DECLARED = np.array([TASK.size(device) for device in range(TASK.devices)])


def refusal(update: Updates, limits: Limits | None = None, kind: Kind = Kind.TRAIN) -> str:
    asked = replace(ORDER, kind=kind)
    outcomes, assigned = [Outcome(update, Memory())], [Assigned(asked, asked, Memory())]
    return screened(outcomes, assigned, DECLARED, limits or Limits())[0].refused


def spoilt(tree: str, name: str, value: float) -> Updates:
    """One number of one tensor is another."""
    trees = dict(UPDATE.trees[0])
    tensor = trees[tree][name].clone()
    tensor.view(-1)[-1] = value
    trees[tree] = {**trees[tree], name: tensor}
    return replace(UPDATE, trees=(trees,))


def told(report: Mapping[str, Any]) -> Updates:
    return replace(UPDATE, report=({**UPDATE.report[0], **report},))


def length(update: Updates) -> float:
    return math.sqrt(
        sum(float(v.double().square().sum()) for v in update.trees[0]["delta"].values())
    )


def test_an_honest_answer_is_not_refused() -> None:
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
    assert refusal(replace(UPDATE, samples=np.array([samples])), kind=kind) == reason


@pytest.mark.parametrize(
    ("report", "name"),
    [
        ({"loss": math.inf}, "loss"),
        ({"norm": math.nan}, "norm"),
        ({"distortion": math.nan}, "distortion"),
        ({"channels": (1.0, -math.inf)}, "channels"),
    ],
)
def test_numbers_that_no_honest_device_reports(report: dict[str, Any], name: str) -> None:
    assert refusal(told(report)) == f"not finite: {name}"


def test_what_was_not_measured_is_not_a_number() -> None:
    assert refusal(told({"loss": math.nan, "fisher": math.nan, "channels": (math.nan, 1.0)})) == ""


def test_each_answer_is_judged_for_itself_and_an_earlier_refusal_stays() -> None:
    bad = spoilt("delta", "4.weight", math.nan)
    outcomes = [Outcome(each, Memory()) for each in (UPDATE, bad, UPDATE)]
    outcomes[2] = outcomes[2]._replace(refused="checksum: of something")
    nothing = replace(UPDATE, trees=({"delta": {}},))
    outcomes.append(Outcome(nothing, Memory()))
    assigned = [Assigned(ORDER, ORDER, Memory())] * 4
    found = screened(outcomes, assigned, DECLARED, Limits())
    assert [each.refused for each in found] == [
        "",
        "not finite: 4.weight",
        "checksum: of something",
        "",
    ]
    assert all(one.update is two.update for one, two in zip(found, outcomes, strict=True))


def test_half_precision_and_double_are_judged_alike() -> None:
    for dtype in (torch.float16, torch.float64):
        tree = {n: v.to(dtype) for n, v in UPDATE.trees[0]["delta"].items()}
        assert refusal(replace(UPDATE, trees=({"delta": tree},))) == ""
