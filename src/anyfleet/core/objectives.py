"""Calls of a task's own functions: its loss, its metrics, its augmentation.

They are a user's. An error in one says which it was, and what it returns is checked.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from anyfleet.core.messages import Task
from anyfleet.errors import BadReturn
from anyfleet.tracebacks import during, quoted

__all__ = ["augmented", "losses", "scores"]


def losses(task: Task, output: Tensor, target: Tensor) -> Tensor:
    """Return the loss of every sample."""
    return _per_sample("loss", task.loss, output, target)


def scores(task: Task, metric: str, output: Tensor, target: Tensor) -> Tensor:
    """Return a metric of every sample."""
    return _per_sample(f"metric {metric}", task.metrics[metric], output, target)


def augmented(task: Task, x: Tensor, key: Tensor) -> Tensor:
    """Return a minibatch as the task varies it, or as it is."""
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
