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
    def x(self) -> Tensor: ...
    @property
    def y(self) -> Tensor: ...
    def __len__(self) -> int: ...


class Task(Protocol):
    """What is to be learned, and on whose data."""

    @property
    def blueprint(self) -> Blueprint: ...
    @property
    def params(self) -> Params: ...
    @property
    def buffers(self) -> Params: ...
    @property
    def devices(self) -> int: ...
    @property
    def classes(self) -> int: ...
    @property
    def classified(self) -> bool: ...
    @property
    def loss(self) -> Callable[[Tensor, Tensor], Tensor]: ...
    @property
    def metrics(self) -> Mapping[str, Callable[[Tensor, Tensor], Tensor]]: ...
    @property
    def augment(self) -> Callable[[Tensor, Tensor], Tensor] | None: ...
    @property
    def owners(self) -> tuple[str, ...]: ...
    @property
    def assignment(self) -> str: ...
    @property
    def test(self) -> Data: ...
    @property
    def server(self) -> Data: ...
    def data(self, device: int) -> Data: ...
    def size(self, device: int) -> int: ...
    def own_test(self, device: int) -> Data: ...
    def labels(self, device: int) -> Tensor: ...
    def __hash__(self) -> int: ...


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
