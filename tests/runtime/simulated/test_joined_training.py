"""Joined training: who is trained together, over which samples, and whose result is whose."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from anyfleet.core.local_training import Extent, train
from anyfleet.core.slots import TrainingResult
from anyfleet.errors import AnyfleetWarning
from anyfleet.parts.train import Decaying, Gradient, Progressive
from anyfleet.runtime.simulated.joined_training import Call, JoinedTraining, packed
from anyfleet.tasks import Task
from tests.helpers import small
from tests.helpers.stacks import distance, same_bits, stack

CPU = torch.device("cpu")
PLAIN = Gradient(Decaying(0.1), batch_size=8)


def problem(**options: Any) -> Task:
    return small.task(equal=False, dtype=torch.float64, **options)


def call(task: Task, devices: list[int], trainer: Any = PLAIN, most: int = 100) -> Call:
    return Call(trainer, *stack(task, trainer, devices), vmap, 3, most)


def alone(given: Call) -> TrainingResult:
    return given.alone(train)


class Counting:
    """A runner that keeps how many devices it was given each time."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.tables: list[Tensor] = []

    def __call__(self, trainer: Any, context: Any, inputs: Any, *given: Any, **named: Any) -> Any:
        self.sizes.append(len(inputs.key) if inputs.key.ndim else 1)
        self.tables.append(inputs.x)
        return train(trainer, context, inputs, *given, **named)


def test_each_call_gets_its_own_rows() -> None:
    task, other = problem(), replace(problem())
    calls = [call(task, [0, 1, 2]), call(other, [5, 3]), call(task, [7, 6, 4])]
    runner = Counting()
    answers = JoinedTraining(runner, [task, other], CPU)(calls)
    assert runner.sizes == [8]
    for answer, given in zip(answers, calls, strict=True):
        assert distance(answer(), alone(given), given.inputs.params) < 1e-12


def test_a_call_alone_has_the_bits_of_training() -> None:
    given = call(problem(), [0, 1, 2])
    (answer,) = JoinedTraining(train, [problem()], CPU)([given])
    assert same_bits(answer(), alone(given))


def test_equal_samples_are_there_once_and_others_are_joined() -> None:
    task = problem()
    train_ = task.train
    copied = replace(task, train=replace(train_, x=train_.x.clone(), y=train_.y.clone()))
    unlike = replace(task, train=replace(train_, x=-train_.x))
    runner = Counting()
    joined = JoinedTraining(runner, [task, copied], CPU)
    joined([call(task, [0, 1]), call(copied, [2, 3])])
    assert runner.tables[0] is task.train.x
    calls = [call(copied, [0, 1]), call(unlike, [2, 3])]
    joined = JoinedTraining(runner, [task, copied, unlike], CPU)
    answers = joined(calls) and joined(calls)
    assert len(runner.tables[1]) == 2 * len(train_.x)
    assert runner.tables[1] is runner.tables[2]
    for answer, given in zip(answers, calls, strict=True):
        assert distance(answer(), alone(given), given.inputs.params) < 1e-12


def test_what_is_drawn_for_a_cohort_keeps_runs_apart() -> None:
    task, runner = problem(), Counting()
    calls = [call(task, devices, Progressive(PLAIN)) for devices in ([0, 1], [2, 3])]
    JoinedTraining(runner, [task], CPU)(calls)
    assert runner.sizes == [2, 2]


def test_what_fails_together_is_trained_one_by_one() -> None:
    task = problem()
    calls = [call(task, devices) for devices in ([0, 1], [2, 3], [4, 5])]
    keys = {int(calls[1].inputs.key[0])}

    def runner(trainer: Any, context: Any, inputs: Any, *given: Any, **named: Any) -> Any:
        if keys & set(inputs.key.tolist()):
            raise ArithmeticError("this one")
        return train(trainer, context, inputs, *given, **named)

    joined = JoinedTraining(runner, [task], CPU)
    with pytest.warns(AnyfleetWarning, match="not trained together.*ArithmeticError: this one"):
        first, second, third = joined(calls)
    assert same_bits(first(), alone(calls[0]))
    assert same_bits(third(), alone(calls[2]))
    with pytest.raises(ArithmeticError, match="this one"):
        second()
    keys.clear()
    joined(calls)  # and remembers it
    assert joined.joined == 0


def sized(devices: int, *, steps: int = 10, batch: int = 8, most: int = 100) -> Call:
    key: Any = torch.zeros(devices)
    given: Any = type("Given", (), {"key": key})()
    nothing: Any = None
    return Call(nothing, nothing, given, Extent(steps, steps, 1, batch), vmap, 0, most)


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([sized(10), sized(10), sized(10)], [[0, 1, 2]]),
        # As many as the smaller of two has room for, in the order given.
        ([sized(10, most=20)] * 3, [[0, 1], [2]]),
        ([sized(10), sized(10, most=15), sized(5)], [[0], [1, 2]]),
        # Padding a few steps or samples costs less than another stack; padding many does not.
        ([sized(10), sized(10, steps=11), sized(10, batch=9)], [[0, 1, 2]]),
        ([sized(10), sized(10, steps=50), sized(10)], [[0, 2], [1]]),
        ([sized(10), sized(10, batch=64), sized(10)], [[0, 2], [1]]),
    ],
)
def test_who_is_packed_together(calls: list[Call], expected: list[list[int]]) -> None:
    assert sorted(packed(calls, ["alike"] * len(calls))) == expected
    assert packed(calls, [None] * len(calls)) == [[i] for i in range(len(calls))]
