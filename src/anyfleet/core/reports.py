"""The numbers that devices measured while they trained: reports, and what choosers learn."""

from collections.abc import Mapping
from functools import partial

import numpy as np
import torch
from torch import Tensor

from anyfleet import rng
from anyfleet.arrays import Floats
from anyfleet.core.device_states import DeviceStates
from anyfleet.core.messages import ChooserState
from anyfleet.core.method import Job
from anyfleet.core.objectives import Task
from anyfleet.core.orders import Cohort
from anyfleet.core.slots import Choose, Lesson, Measure, Minibatch, TrainingContext
from anyfleet.elastic import Slice, cut, width
from anyfleet.tracebacks import during


def reported(measured: Mapping[str, Tensor], job: Job) -> dict[str, Tensor]:
    """Return what devices report of a training result.

    These are all numbers of the trainer itself, and of the measures those that a part asked for.
    """
    private = {name for measure in job.measures for name in measure.names} - set(job.report)
    return {name: value for name, value in measured.items() if name not in private}


def learns(choose: Choose) -> bool:
    """Return whether a chooser has something to learn from what its device measured."""
    return type(choose).learn is not Choose.learn


def learned(
    cohort: Cohort,
    states: DeviceStates,
    context: TrainingContext,
    measured: Mapping[str, Floats],
) -> list[ChooserState | None]:
    """Return the states of the choosers of devices that have trained; None: as before.

    `measured` has single numbers, [devices].
    """
    choose, before = cohort.job.choose, states.choosers(cohort.device)
    lessons = _lessons(cohort, context, measured)
    with during("choose", choose):
        after = list(map(choose.learn, lessons, before))
    return [new if new is not old else None for old, new in zip(before, after, strict=True)]


def _lessons(
    cohort: Cohort, context: TrainingContext, measured: Mapping[str, Floats]
) -> list[Lesson]:
    """Return the lesson of every device of a stack."""
    numbers, blueprint = cohort.slice_index.tolist(), context.task.blueprint
    listed = {number: cohort.slices[number] for number in set(numbers)}
    sizes = {
        number: (width(slice_, blueprint), float(slice_.first_trained_layer))
        for number, slice_ in listed.items()
    }
    found = np.array(list(measured.values())).reshape(len(measured), len(cohort)).T.tolist()
    return [
        Lesson(
            width=planned,
            sub_model_size=sizes[number],
            measured=dict(zip(measured, values, strict=True)),
            initial=partial(_of_initial_model, cohort, row, context),
        )
        for row, (planned, number, values) in enumerate(
            zip(cohort.width.tolist(), numbers, found, strict=True)
        )
    ]


def _of_initial_model(
    cohort: Cohort, row: int, context: TrainingContext, measure: Measure
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
