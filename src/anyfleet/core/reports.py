"""What a device measured while it trained: what it reports, and what only its chooser learns."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from anyfleet import rng
from anyfleet.core.messages import ChooserState, DeviceState
from anyfleet.core.objectives import Task
from anyfleet.core.orders import Cohort
from anyfleet.core.slots import Lesson, Minibatch, TrainingContext
from anyfleet.elastic import Slice, cut, width
from anyfleet.measure.fisher import MEASURED
from anyfleet.tracebacks import during


def reported(measures: Mapping[str, Tensor], wanted: tuple[str, ...]) -> dict[str, Any]:
    """What travels: all that a trainer says by itself, and of the measurements what is wanted."""
    return {
        name: float(value) if value.ndim == 0 else tuple(value.tolist())
        for name, value in measures.items()
        if name not in MEASURED or name in wanted
    }


def learned(
    orders: Cohort,
    row: int,
    memory: DeviceState,
    where: TrainingContext,
    measures: Mapping[str, Tensor],
) -> ChooserState:
    """The notes of a device's chooser after an order."""
    slice_ = orders.slices[row]
    lesson = Lesson(
        width=float(orders.width[row]),
        sub_model_size=(width(slice_, where.task.blueprint), float(slice_.first_trained_layer)),
        measured={n: float(v) for n, v in measures.items() if v.ndim == 0},
        initial_fisher=lambda: _birth(orders, row, where),
    )
    choose = orders.job.choose
    with during("choose", choose):
        return choose.learn(memory.chooser, lesson)


def _birth(orders: Cohort, row: int, where: TrainingContext) -> float:
    """Fisher information of the initial model, as wide as this order, on one own mini-batch."""
    task, key = where.task, rng.fold(orders.key[row], "birth")
    data = task.data(int(orders.device[row]))
    count = min(int(orders.hyperparameters.batch_size[row]), len(data))
    if not count:
        return float("nan")
    rows = rng.sample(key.cpu(), len(data), count).to(data.x.device)
    valid = torch.ones(count, dtype=torch.bool, device=data.x.device)
    batch = Minibatch(data.x[rows], data.y[rows], valid, key.to(data.x.device))
    leading = _leading(where, task)
    buffers = cut(task.buffers, leading, task.blueprint)
    params = cut(task.params, leading, task.blueprint)
    return float(orders.job.fisher(where, params, buffers, batch).trace)


def _leading(where: TrainingContext, task: Task) -> Slice:
    """The leading channels of the initial model, as many as the device's model has."""
    cut_axes = task.blueprint.counts(1.0)
    sizes = where.blueprint.sizes
    return Slice.of({axis: range(sizes[axis]) for axis in cut_axes}, task.blueprint)
