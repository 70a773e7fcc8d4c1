"""The numbers that a device measured while it trained: what it reports, what its chooser learns."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from anyfleet import rng
from anyfleet.core.device_state import DeviceState
from anyfleet.core.messages import ChooserState
from anyfleet.core.method import Job
from anyfleet.core.objectives import Task
from anyfleet.core.orders import Cohort
from anyfleet.core.slots import Lesson, Measure, Minibatch, TrainingContext
from anyfleet.elastic import Slice, cut, width
from anyfleet.tracebacks import during


def reported(measured: Mapping[str, Tensor], job: Job) -> dict[str, Any]:
    """Return what a device reports of a training result.

    These are all numbers of the trainer itself, and of the measures those that a part asked for.
    """
    private = {name for measure in job.measures for name in measure.names} - set(job.report)
    return {
        name: float(value) if value.ndim == 0 else tuple(value.tolist())
        for name, value in measured.items()
        if name not in private
    }


def learned(
    cohort: Cohort,
    row: int,
    state: DeviceState,
    context: TrainingContext,
    measured: Mapping[str, Tensor],
) -> ChooserState:
    """Return the state of a device's chooser after it has trained for the order in this row."""
    slice_ = cohort.slice_of(row)
    lesson = Lesson(
        width=float(cohort.width[row]),
        sub_model_size=(width(slice_, context.task.blueprint), float(slice_.first_trained_layer)),
        measured={n: float(v) for n, v in measured.items() if v.ndim == 0},
        initial=lambda measure: _of_initial_model(measure, cohort, row, context),
    )
    choose = cohort.job.choose
    with during("choose", choose):
        return choose.learn(lesson, state.chooser)


def _of_initial_model(
    measure: Measure, cohort: Cohort, row: int, context: TrainingContext
) -> float:
    """Return a measure of the initial model, as wide as the order, on one own minibatch.

    NaN where the device has no samples.
    """
    task, key = context.task, rng.fold(cohort.key[row], "birth")
    data = task.data(int(cohort.device[row]))
    count = min(int(cohort.hyperparameters.batch_size[row]), len(data))
    if not count:
        return float("nan")
    rows = rng.sample(key.cpu(), len(data), count).to(data.x.device)
    valid = torch.ones(count, dtype=torch.bool, device=data.x.device)
    batch = Minibatch(data.x[rows], data.y[rows], valid, key.to(data.x.device))
    leading = _leading(context, task)
    buffers = cut(task.buffers, leading, task.blueprint)
    params = cut(task.params, leading, task.blueprint)
    return measure.initial(context, params, buffers, batch)


def _leading(context: TrainingContext, task: Task) -> Slice:
    """Return the leading channels of the initial model, as many as the device's model has."""
    sizes = context.blueprint.sizes
    return Slice.of({a: range(sizes[a]) for a in task.blueprint.counts(1.0)}, task.blueprint)
