"""Accuracy by class, by device and by group."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from anyfleet import methods
from anyfleet.analysis.breakdown import Breakdown, named
from anyfleet.errors import ConfigError
from anyfleet.experiment import Experiment, RoundResult, build, play, populate
from anyfleet.tasks import Split, Task
from anyfleet.tasks.losses import squared_error
from anyfleet.world import Fleet, Group
from tests.helpers import small

TASK = small.task(norm=False)
FLEET = Fleet((Group(name="phones", count=5), Group(count=3)))
EXPERIMENT = Experiment(
    TASK,
    methods.fedavg(count=4, lr=0.1),
    FLEET,
    rounds=2,
    widths=(1.0, 0.5),
    details=("classes", "devices", "groups"),
)


@pytest.fixture(scope="module")
def moment() -> RoundResult:
    *_, last = play(EXPERIMENT)
    return last


@torch.no_grad()
def hits(moment: RoundResult, x: Tensor, y: Tensor) -> Tensor:
    """By the module itself, without any of the code that is tested."""
    module = small.net(norm=False).eval()
    module.load_state_dict(dict(moment.round.params))
    right: Tensor = module(x).argmax(1) == y
    return right.double()


def test_classes_are_those_of_the_test_set(moment: RoundResult) -> None:
    right = hits(moment, TASK.test.x, TASK.test.y)
    expected = [float(right[TASK.test.y == label].mean()) for label in range(10)]
    assert moment.record.details[0].classes == pytest.approx(expected)
    assert len(set(expected)) > 3, "too alike to tell one class from another"


def test_devices_are_evaluated_on_their_own_test_data(moment: RoundResult) -> None:
    own = [TASK.own_test(device) for device in range(TASK.devices)]
    expected = [float(hits(moment, data.x, data.y).mean()) for data in own]
    assert moment.record.details[0].devices == pytest.approx(expected)
    assert len(set(expected)) > 2, "too alike to tell one device from another"


def test_groups_join_the_data_of_their_devices(moment: RoundResult) -> None:
    members = populate(EXPERIMENT, TASK).group
    found = moment.record.details[0].groups
    assert list(found) == ["phones", "group 1"]
    for number, share in enumerate(found.values()):
        own = [TASK.own_test(int(device)) for device in np.flatnonzero(members == number)]
        right = torch.cat([hits(moment, data.x, data.y) for data in own])
        assert share == pytest.approx(float(right.mean()))


def test_every_width_is_taken_apart(moment: RoundResult) -> None:
    whole, half = moment.record.details
    assert (whole.width, half.width) == (1.0, 0.5)
    assert whole.devices != half.devices
    label = np.bincount(TASK.test.y.numpy(), minlength=10) / len(TASK.test)
    for parts in (whole, half):
        mean = moment.record.at(parts.width)
        assert np.dot(label, parts.classes) == pytest.approx(mean)


def test_only_what_is_asked_for_is_measured() -> None:
    (moment,) = play(replace(EXPERIMENT, rounds=1, widths=(1.0,), details=("groups",)))
    (parts,) = moment.record.details
    assert (parts.classes, parts.devices, len(parts.groups)) == ((), (), 2)
    (moment,) = play(replace(EXPERIMENT, rounds=1, details=()))
    assert moment.record.details == ()


def test_the_spread_leaves_out_devices_without_data() -> None:
    fairness = Breakdown(1.0, devices=(0.2, math.nan, 0.4, 0.9)).fairness
    assert (fairness.mean, fairness.worst) == pytest.approx((0.5, 0.2))
    assert fairness.deviation == pytest.approx(math.sqrt((0.09 + 0.01 + 0.16) / 3))
    assert fairness.tenth == pytest.approx(0.2 + 0.2 * 0.2)  # a fifth of the way to the next
    assert math.isnan(Breakdown(1.0).fairness.worst)


def test_groups_are_told_apart() -> None:
    nobody = np.zeros(0, dtype=np.int64)
    assert named(["a", "", "a", "b"], nobody).names == ("a (0)", "group 1", "a (2)", "b")
    assert len(set(named(["group 1", ""], nobody).names)) == 2


def test_what_cannot_be_taken_apart_is_refused_all_at_once() -> None:
    numbers = small.patterns(60, 1)
    real = replace(numbers, y=torch.randn(60, 10))
    task = Task.of(
        small.net(), real, real, split=Split(devices=8, test_share=0), loss=squared_error
    )
    with pytest.raises(ConfigError) as caught:
        build(replace(EXPERIMENT, task=task))
    paths, messages = zip(*((p.path, p.message) for p in caught.value.problems), strict=True)
    assert set(paths) == {"details"}
    for text, message in zip(("accuracy", '"classes"', "test_share"), messages, strict=True):
        assert text in message


def test_a_class_that_is_not_tested_has_no_accuracy() -> None:
    few = replace(TASK, test=TASK.test.rows(torch.nonzero(TASK.test.y == 3).flatten()))
    (moment,) = play(replace(EXPERIMENT, task=few, rounds=1, details=("classes",)))
    known = [not math.isnan(share) for share in moment.record.details[0].classes]
    assert known == [label == 3 for label in range(10)]
