"""A task as the core sees it, and the calls of a user's functions: loss, metrics, augmentation.

An error in one of them says which it was, and what it returns is checked.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

from anyfleet.elastic import Blueprint, Params
from anyfleet.errors import BadReturn
from anyfleet.tracebacks import during, quoted

__all__ = ["Data", "Task", "augmented", "losses", "scores"]


class Data(Protocol):
    """Samples and targets, row by row."""

    @property
    def x(self) -> Tensor:
        """The samples, one in each row."""

    @property
    def y(self) -> Tensor:
        """The targets of the samples."""

    def __len__(self) -> int:
        """Return the number of samples."""


class Task(Protocol):
    """What is to be learned, and on whose data."""

    @property
    def blueprint(self) -> Blueprint:
        """The traced model."""

    @property
    def params(self) -> Params:
        """The initial parameters of the whole model."""

    @property
    def buffers(self) -> Params:
        """The initial buffers of the whole model."""

    @property
    def devices(self) -> int:
        """The number of devices."""

    @property
    def classes(self) -> int:
        """The size of the last axis of the model's output."""

    @property
    def classified(self) -> bool:
        """Whether targets are class indices on that axis."""

    @property
    def loss(self) -> Callable[[Tensor, Tensor], Tensor]:
        """The loss of each sample, from outputs and targets."""

    @property
    def metrics(self) -> Mapping[str, Callable[[Tensor, Tensor], Tensor]]:
        """What else is measured of each sample, by name; empty without any."""

    @property
    def augment(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        """What changes the samples of a minibatch, given a key; None without any."""

    @property
    def owners(self) -> tuple[str, ...]:
        """The owner of the data of each device; "" where there is no single one."""

    @property
    def assignment(self) -> str:
        """A sentence that says how devices came to their data."""

    @property
    def test(self) -> Data:
        """The common test data."""

    @property
    def server(self) -> Data:
        """The samples of the server; empty without a server split."""

    def data(self, device: int) -> Data:
        """Return the training data of a device."""

    def size(self, device: int) -> int:
        """Return the number of training samples of a device."""

    def own_test(self, device: int) -> Data:
        """Return the test data of a device."""

    def labels(self, device: int) -> Tensor:
        """Return which classes occur in a device's training data: bool [classes]."""

    def __hash__(self) -> int:
        """Return a hash, so that what follows from a task is computed once."""


def losses(task: Task, output: Tensor, target: Tensor) -> Tensor:
    """Return the loss of every sample."""
    return _per_sample("loss", task.loss, output, target)


def scores(task: Task, metric: str, output: Tensor, target: Tensor) -> Tensor:
    """Return a metric of every sample."""
    return _per_sample(f"metric {metric}", task.metrics[metric], output, target)


def augmented(task: Task, x: Tensor, key: Tensor) -> Tensor:
    """Return the samples of a minibatch as the task augments them; unchanged without `augment`."""
    if task.augment is None:
        return x
    with during("augment", task.augment):
        varied: Any = task.augment(x, key)
    if not isinstance(varied, Tensor) or len(varied) != len(x):
        raise BadReturn(
            f"augment={quoted(task.augment)} returned {_described(varied)}; due is a tensor with "
            f"the {len(x)} samples that it was given."
        )
    return varied


def _per_sample(
    slot: str, function: Callable[[Tensor, Tensor], Tensor], output: Tensor, target: Tensor
) -> Tensor:
    """Return what a user's function returns, checked to be one value for each sample."""
    with during(slot, function):
        values: Any = function(output, target)
    if not isinstance(values, Tensor) or values.shape != output.shape[:1]:
        raise BadReturn(
            f"{slot}={quoted(function)} returned {_described(values)}; due is a tensor with one "
            f'value for each of {len(output)} samples. Leave out the mean (reduction="none").'
        )
    return values


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return f"a {type(value).__name__}"
