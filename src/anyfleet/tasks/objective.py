"""Losses and metrics: (output, target) to one value per sample.

Classes lie on the last axis of the output; further axes between (the positions of a sequence) are
averaged within a sample. A user's own function of that signature serves as well.
"""

from collections.abc import Callable

from torch import Tensor

Objective = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Of logits [B, …, C] and class indices [B, …]."""
    chosen = output.log_softmax(-1).gather(-1, target.long().unsqueeze(-1))
    return _per_sample(-chosen.squeeze(-1))


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
