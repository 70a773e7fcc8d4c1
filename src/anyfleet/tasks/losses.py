"""Losses and metrics: functions of (output, target) with one value per sample.

Classes are on the last axis of the output. Axes between the first and the last (the positions of a
sequence) are averaged within a sample. A user's own function may have the same signature.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Objective = Callable[[Tensor, Tensor], Tensor]
_NO_CLASS = -(2**62)  # torch would ignore targets of -100; here no target is ignored


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Return the cross entropy of logits [B, …, C] and class indices [B, …]."""
    values = torch.nn.functional.cross_entropy(
        output.flatten(0, -2), target.long().flatten(), ignore_index=_NO_CLASS, reduction="none"
    )
    return _per_sample(values.reshape(target.shape))


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """Return the share of positions whose largest logit is the target's; 0 or 1 for a class."""
    return _per_sample((output.argmax(-1) == target).to(output.dtype))


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean squared difference; a target [B] may meet an output [B, 1]."""
    return _per_sample((output - target.reshape(output.shape)) ** 2)


def absolute_error(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean absolute difference; a target [B] may meet an output [B, 1]."""
    return _per_sample((output - target.reshape(output.shape)).abs())


def _per_sample(values: Tensor) -> Tensor:
    return values if values.ndim == 1 else values.flatten(1).mean(1)


@dataclass(frozen=True)
class Objectives:
    """The loss of a task, its metrics, and whether its targets are classes.

    With a loss of the user's own, `classified` must say that targets are classes: whole numbers
    may also be counts, or yes and no. Without `metrics`, accuracy is measured with
    `cross_entropy`, and nothing with another loss: such a loss may ignore some targets, which
    accuracy would count as missed.
    """

    loss: Objective = cross_entropy
    metrics: Mapping[str, Objective] | None = None
    classified: bool = False

    @property
    def targets_are_classes(self) -> bool:
        """True if targets are classes on the last axis of the output."""
        return self.classified or self.loss is cross_entropy

    @property
    def all_metrics(self) -> dict[str, Objective]:
        """The metrics that are measured: those given, or the default."""
        if self.metrics is not None:
            return dict(self.metrics)
        return {"accuracy": accuracy} if self.loss is cross_entropy else {}
