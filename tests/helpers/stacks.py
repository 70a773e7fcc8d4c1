"""Stacks of devices as training gets them, for any trainer, on any device of torch."""

from typing import NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from anyfleet import rng
from anyfleet.core.local_training import (
    Extent,
    Inputs,
    as_tensors,
    extent,
    samples_of,
    training_context,
)
from anyfleet.core.messages import Params
from anyfleet.core.slots import Norm, Train, TrainingContext, TrainingResult
from anyfleet.elastic import WHOLE, Slice, cut
from anyfleet.parts.norm import BatchStatistics
from anyfleet.tasks import Task


class Stack(NamedTuple):
    """The arguments of `local_training.train`, after the trainer."""

    context: TrainingContext
    inputs: Inputs
    bounds: Extent


def stack(
    task: Task,
    trainer: Train,
    devices: list[int],
    *,
    norm: Norm | None = None,
    slice_: Slice = WHOLE,
    width: float = 1.0,
    round_index: int = 0,
) -> Stack:
    """Return a stack of these devices in a round; all of them start from the model of the task."""
    context = training_context(task, norm or BatchStatistics(), slice_, width)
    x, y, rows, valid = samples_of(task, devices)
    sizes = [task.size(device) for device in devices]
    numbers = trainer.hyperparameters(round_index, np.array(sizes))
    keys = rng.fold(rng.fold(rng.root(1, "devices"), round_index), torch.tensor(devices))

    def spread(tree: Params) -> dict[str, torch.Tensor]:
        small = cut(tree, slice_, task.blueprint)
        return {name: value.expand(len(devices), *value.shape) for name, value in small.items()}

    given = Inputs(
        params=spread(task.params),
        buffers=spread(task.buffers),
        x=x,
        y=y,
        valid=valid,
        seen=torch.stack([task.labels(device) for device in devices]).to(x.device),
        key=keys.to(x.device),
        hyperparameters=as_tensors(numbers, sizes, next(iter(task.params.values()))),
        rows=rows,
    )
    return Stack(context, given, extent(numbers, sizes))


def same_bits(a: TrainingResult, b: TrainingResult) -> bool:
    """Return whether two results are equal, bit for bit."""
    pairs = zip(tree_leaves(a), tree_leaves(b), strict=True)
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs)


def distance(a: TrainingResult, b: TrainingResult, start: Params) -> float:
    """Return how far apart two results lie, as a share of the way from the start to the second."""
    apart = sum(float((a.params[n] - b.params[n]).double().square().sum()) for n in start)
    way = sum(float((b.params[n] - start[n]).double().square().sum()) for n in start)
    return float((apart / way) ** 0.5)
