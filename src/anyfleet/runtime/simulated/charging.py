"""What an order demands of its device, and what it is charged."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from anyfleet.arrays import Floats
from anyfleet.core.evaluation import EVALUATION_BATCH
from anyfleet.core.local_training import local_steps, samples_processed
from anyfleet.core.messages import Charges, ChooserState, Kind
from anyfleet.core.objectives import Task
from anyfleet.core.orders import Cohort
from anyfleet.core.time_and_energy import Amount, Counts, Demand, Effort, effort_of, training
from anyfleet.elastic import WHOLE, Blueprint, Slice, cost, width
from anyfleet.elastic.cost.operations import Counting, forward_operations
from anyfleet.runtime.simulated.phases import ROUNDING, Knot, Phase
from anyfleet.world.quantities import When

# The parts of an order, and what is done in them.
_AMOUNTS = {"download": "bits_down", "compute": "flops", "upload": "bits_up"}


def demand(order: Cohort, task: Task, counting: Counting, chooser: ChooserState) -> Demand:
    """The work of one order on its device, whose chooser has these notes."""
    device, blueprint, slice_ = int(order.device[0]), task.blueprint, order.slices[0]
    if order.kind == Kind.FETCH:
        return Demand(effort_of(Counts(0, 0, 0), 1.0, steps=0, calls=0, moved=0), np.zeros(1))
    if order.kind not in (Kind.TRAIN, Kind.HOLD):
        return _measuring(slice_, _looked_at(order, task), blueprint, counting)
    samples = task.size(device)
    (steps,) = local_steps(order.hyperparameters, [samples])
    batch = int(order.hyperparameters.batch_size[0])
    share = float(order.width[0])
    amount = Amount(batch, samples_processed(steps, samples, batch), steps, share)
    needed = training(order.job.trainer, blueprint, slice_, amount, counting)
    # Once for every width: its chooser measures the initial model on one minibatch.
    choose, first = order.job.choose, slice_.first_trained_layer
    for measure in choose.initial_measures(chooser, share, first) if steps else ():
        once = Amount(batch, min(batch, samples), 1)
        needed = needed.then(training(measure, blueprint, slice_, once, counting))
    return needed


def _looked_at(order: Cohort, task: Task) -> list[int]:
    """How many samples a device goes through, one number for each pass over its data."""
    device = int(order.device[0])
    own, test = task.size(device), len(task.own_test(device))
    subject = test if order.kind == Kind.EVALUATE else own
    if order.kind == Kind.STATISTICS or not order.job.norm.calibrated or not task.blueprint.norms:
        return [subject]
    # Statistics that are measured before a test are measured on all training data.
    return [own, subject]


def _measuring(
    slice_: Slice, passes: Sequence[int], blueprint: Blueprint, counting: Counting
) -> Demand:
    """Forward passes only, in batches of the size that `evaluate` uses."""
    samples = sum(passes)
    own, whole = (float(cost(blueprint, e).forward_flops * samples) for e in (slice_, WHOLE))
    if counting != "flops":
        own, whole = (
            forward_operations(blueprint, each, EVALUATION_BATCH, counting)
            * (samples / EVALUATION_BATCH)
            for each in (slice_, WHOLE)
        )
    batches = sum(-(-count // EVALUATION_BATCH) for count in passes)
    batch = cost(blueprint, slice_, EVALUATION_BATCH)
    effort = effort_of(
        Counts(own, own, whole),
        width(slice_, blueprint),
        steps=batches,
        calls=batches * batch.forward_calls,
        moved=batches * batch.forward_moved,
    )
    return Demand(effort, np.array([float(batch.nbytes)]))


def charged(order: Cohort, effort: Effort, parts: Sequence[Phase], when: When) -> Charges:
    """What is known of an order when it is submitted: download and compute."""
    download, compute = parts
    nothing = np.zeros(1)
    return Charges(
        order=order.id,
        flops=effort.flops,
        bits_down=order.bits,
        bits_up=nothing,
        download_seconds=np.array([download.seconds]),
        compute_seconds=np.array([compute.seconds]),
        upload_seconds=nothing,
        download_joules=np.array([download.joules]),
        compute_joules=np.array([compute.joules]),
        upload_joules=nothing,
        began=np.array([when.now]),
        delivered_down=np.ones(1),
        delivered_up=np.zeros(1),
    )


def sending(planned: Charges, bits: Floats, upload: Phase) -> Charges:
    """The same with the upload, now that the size of the answer is known."""
    return replace(
        planned,
        bits_up=bits,
        upload_seconds=np.array([upload.seconds]),
        upload_joules=np.array([upload.joules]),
    )


def spent(planned: Charges, parts: Sequence[Phase], passed: float) -> Charges:
    """What an order has cost after `passed` seconds: as much of each part as was done by then."""
    found: dict[str, Any] = {}
    start, done = 0.0, {"download": False, "compute": False, "upload": False}
    for (part, amount), course in zip(_AMOUNTS.items(), parts, strict=False):
        seconds, share, joules = _reached(course, start, passed)
        found[f"{part}_seconds"], found[f"{part}_joules"] = np.array([seconds]), np.array([joules])
        found[amount] = getattr(planned, amount) * share
        start, done[part] = start + course.seconds, share == 1
    return replace(
        planned,
        # Half of a message is no message: what it has of the model cannot be used.
        delivered_down=planned.delivered_down * done["download"],
        delivered_up=planned.delivered_up * done["upload"],
        **found,
    )


def _reached(course: Phase, start: float, passed: float) -> Knot:
    """How far a part is, `passed` seconds after the first of all parts began."""
    if passed >= (start + course.seconds) * (1 - ROUNDING):
        return course.knots[-1]
    return course.at(passed - start) if passed > start else course.knots[0]
