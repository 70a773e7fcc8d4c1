"""The work that orders demand of their devices."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from anyfleet.arrays import Ints, alike, join
from anyfleet.core.device_states import DeviceStates
from anyfleet.core.evaluation import EVALUATION_BATCH
from anyfleet.core.messages import TRAINING, Kind
from anyfleet.core.objectives import Task
from anyfleet.core.orders import Cohort
from anyfleet.core.slots import Choose, Measure
from anyfleet.core.time_and_energy import Counts, Demand, TrainingAmounts, effort_of, trainings
from anyfleet.elastic import WHOLE, Blueprint, Slice, cost, width
from anyfleet.elastic.cost.operations import Counting, forward_operations


def demand(
    orders: Cohort, own: Ints, task: Task, counting: Counting, states: DeviceStates
) -> Demand:
    """Return the work of orders on devices that have so many samples of their `own`."""
    count = len(orders)
    if orders.kind == Kind.FETCH:
        none = np.zeros(count)
        effort = effort_of(Counts(none, none, none), 1.0, local_steps=0, calls=0.0, moved=0.0)
        return Demand(effort, none)
    if orders.kind not in TRAINING:
        groups = alike(orders.slice_index)
        passes = _samples_per_pass(orders, own, task)
        parts = [
            _forward_demand(
                orders.slice_of(rows[0]), [p[rows] for p in passes], task.blueprint, counting
            )
            for rows in groups
        ]
        return join(parts).take(np.argsort(np.concatenate(groups)))
    amounts = TrainingAmounts.of(orders.hyperparameters, own, orders.width)
    needed = trainings(
        orders.job.trainer, task.blueprint, orders.slices, orders.slice_index, amounts, counting
    )
    if type(orders.job.choose).initial_measures is Choose.initial_measures:
        return needed
    return _with_measures(needed, orders, own, task, counting, states)


def _with_measures(
    needed: Demand,
    orders: Cohort,
    own: Ints,
    task: Task,
    counting: Counting,
    states: DeviceStates,
) -> Demand:
    """Return the demand with what choosers measure of the initial model, once for every width."""
    alone: dict[tuple[Measure, ...], list[int]] = {}
    works = needed.effort.local_steps > 0
    if not works.all():
        alone[()] = np.flatnonzero(~works).tolist()
    some = orders.take(works)
    first = np.array([slice_.first_trained_layer for slice_ in orders.slices])[some.slice_index]
    sizes = some.width.tolist(), first.tolist()
    found = map(orders.job.choose.initial_measures, *sizes, states.choosers(some.device))
    for row, measures in zip(np.flatnonzero(works).tolist(), found, strict=True):
        alone.setdefault(measures, []).append(row)
    parts = []
    for measures, rows in alone.items():
        part, batch = needed.take(rows), orders.hyperparameters.batch_size[rows]
        # On one minibatch.
        once = TrainingAmounts(
            batch,
            np.minimum(batch, own[rows]),
            np.ones(len(rows), dtype=np.int64),
            np.full(len(rows), np.nan),
        )
        slices = task.blueprint, orders.slices, orders.slice_index[rows]
        for measure in measures:
            part = part.then(trainings(measure, *slices, once, counting))
        parts.append(part)
    return join(parts).take(np.argsort(np.concatenate(list(alone.values()))))


def _samples_per_pass(orders: Cohort, own: Ints, task: Task) -> list[Ints]:
    """Return how many samples each device goes through in each pass over its data."""
    subject = own
    if orders.kind == Kind.EVALUATE:
        subject = np.array([_test_size(task, device) for device in orders.device.tolist()])
    if orders.kind == Kind.STATISTICS or not orders.job.norm.calibrated or not task.blueprint.norms:
        return [subject]
    # Norm statistics are calibrated on all training data before the test.
    return [own, subject]


@lru_cache(maxsize=1 << 16)
def _test_size(task: Task, device: int) -> int:
    return len(task.own_test(device))


def _forward_demand(
    slice_: Slice, passes: Sequence[Ints], blueprint: Blueprint, counting: Counting
) -> Demand:
    """Return the work of forward passes alone, in batches of the size that evaluation uses."""
    samples = np.sum(passes, axis=0)
    own, whole = (float(cost(blueprint, e).forward_flops) * samples for e in (slice_, WHOLE))
    if counting != "flops":
        own, whole = (
            forward_operations(blueprint, each, EVALUATION_BATCH, counting)
            * (samples / EVALUATION_BATCH)
            for each in (slice_, WHOLE)
        )
    batches = np.sum([-(-count // EVALUATION_BATCH) for count in passes], axis=0)
    batch = cost(blueprint, slice_, EVALUATION_BATCH)
    effort = effort_of(
        Counts(own, own, whole),
        width(slice_, blueprint),
        local_steps=batches,
        calls=batches * float(batch.forward_calls),
        moved=batches * float(batch.forward_moved),
    )
    return Demand(effort, np.full(len(effort), float(batch.nbytes)))
