"""Losses and metrics: (output, target) to one value per sample.

Classes lie on the last axis of the output; further axes between (the positions of a sequence) are
averaged within a sample. A user's own function of that signature serves as well.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Objective = Callable[[Tensor, Tensor], Tensor]
_NO_CLASS = -(2**62)  # torch would pass over -100: no target is left out here


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Of logits [B, …, C] and class indices [B, …]."""
    values = torch.nn.functional.cross_entropy(
        output.flatten(0, -2), target.long().flatten(), ignore_index=_NO_CLASS, reduction="none"
    )
    return _per_sample(values.reshape(target.shape))


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """Share of positions whose largest logit is the target's; 0 or 1 for a single one."""
    return _per_sample((output.argmax(-1) == target).to(output.dtype))


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    """Mean squared difference; a target [B] may meet an output [B, 1]."""
    return _per_sample((output - target.reshape(output.shape)) ** 2)


def absolute_error(output: Tensor, target: Tensor) -> Tensor:
    """Mean absolute difference; a target [B] may meet an output [B, 1]."""
    return _per_sample((output - target.reshape(output.shape)).abs())


def _per_sample(values: Tensor) -> Tensor:
    return values if values.ndim == 1 else values.flatten(1).mean(1)


@dataclass(frozen=True)
class Goal:
    """What a model is trained by and judged by, and whether its targets are classes.

    `classified` says that targets are classes where the loss is one's own: nobody can see whether
    its whole numbers are classes, counts or yes and no. Without `metrics`, `cross_entropy` goes
    with accuracy, and another loss stands alone: it may leave out targets, say, where accuracy
    would call them missed.
    """

    loss: Objective = cross_entropy
    metrics: Mapping[str, Objective] | None = None
    classified: bool = False

    @property
    def of_classes(self) -> bool:
        """Whether targets are classes on the last axis of the output."""
        return self.classified or self.loss is cross_entropy

    @property
    def judges(self) -> dict[str, Objective]:
        """The metrics, chosen or given."""
        if self.metrics is not None:
            return dict(self.metrics)
        return {"accuracy": accuracy} if self.loss is cross_entropy else {}
