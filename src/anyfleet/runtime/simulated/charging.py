"""The work that an order demands of its device, and the charges for what was done of it."""

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
from anyfleet.runtime.simulated.phases import ROUNDING, Phase, Progress
from anyfleet.world.quantities import When

# The phases of an order, and the charge for the work that is done in them.
_AMOUNTS = {"download": "bits_down", "compute": "flops", "upload": "bits_up"}


def demand(order: Cohort, task: Task, counting: Counting, chooser: ChooserState) -> Demand:
    """Return the work of one order on its device; `chooser` is the state of its chooser."""
    device, blueprint, slice_ = int(order.device[0]), task.blueprint, order.slice_of(0)
    if order.kind == Kind.FETCH:
        return Demand(effort_of(Counts(0, 0, 0), 1.0, local_steps=0, calls=0, moved=0), np.zeros(1))
    if order.kind not in (Kind.TRAIN, Kind.HOLD):
        return _forward_demand(slice_, _samples_per_pass(order, task), blueprint, counting)
    samples = task.size(device)
    (steps,) = local_steps(order.hyperparameters, [samples])
    batch = int(order.hyperparameters.batch_size[0])
    width_ = float(order.width[0])
    amount = Amount(batch, samples_processed(steps, samples, batch), steps, width_)
    needed = training(order.job.trainer, blueprint, slice_, amount, counting)
    # Once for every width: its chooser measures the initial model on one minibatch.
    choose, first = order.job.choose, slice_.first_trained_layer
    for measure in choose.initial_measures(width_, first, chooser) if steps else ():
        once = Amount(batch, min(batch, samples), 1)
        needed = needed.then(training(measure, blueprint, slice_, once, counting))
    return needed


def _samples_per_pass(order: Cohort, task: Task) -> list[int]:
    """Return how many samples a device goes through in each pass over its data."""
    device = int(order.device[0])
    own, test = task.size(device), len(task.own_test(device))
    subject = test if order.kind == Kind.EVALUATE else own
    if order.kind == Kind.STATISTICS or not order.job.norm.calibrated or not task.blueprint.norms:
        return [subject]
    # Norm statistics are calibrated on all training data before the test.
    return [own, subject]


def _forward_demand(
    slice_: Slice, passes: Sequence[int], blueprint: Blueprint, counting: Counting
) -> Demand:
    """Return the work of forward passes alone, in batches of the size that evaluation uses."""
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
        local_steps=batches,
        calls=batches * batch.forward_calls,
        moved=batches * batch.forward_moved,
    )
    return Demand(effort, np.array([float(batch.nbytes)]))


def charges_before_upload(
    order: Cohort, effort: Effort, phases: Sequence[Phase], when: When
) -> Charges:
    """Return what an order costs as far as is known at submission: download and compute."""
    download, compute = phases
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


def charges_with_upload(planned: Charges, bits: Floats, upload: Phase) -> Charges:
    """Return the charges with the upload, once the size of the reply is known."""
    return replace(
        planned,
        bits_up=bits,
        upload_seconds=np.array([upload.seconds]),
        upload_joules=np.array([upload.joules]),
    )


def charges_until(planned: Charges, phases: Sequence[Phase], elapsed: float) -> Charges:
    """Return what an order has cost after `elapsed` seconds: the work done by then."""
    found: dict[str, Any] = {}
    start, complete = 0.0, {"download": False, "compute": False, "upload": False}
    for (name, amount), phase in zip(_AMOUNTS.items(), phases, strict=False):
        seconds, done, joules = _progress(phase, start, elapsed)
        found[f"{name}_seconds"], found[f"{name}_joules"] = np.array([seconds]), np.array([joules])
        found[amount] = getattr(planned, amount) * done
        start, complete[name] = start + phase.seconds, done == 1
    return replace(
        planned,
        # A message that was cut off cannot be used at all.
        delivered_down=planned.delivered_down * complete["download"],
        delivered_up=planned.delivered_up * complete["upload"],
        **found,
    )


def _progress(phase: Phase, start: float, elapsed: float) -> Progress:
    """Return how far a phase is `elapsed` seconds into the order; it begins after `start`."""
    if elapsed >= (start + phase.seconds) * (1 - ROUNDING):
        return phase.points[-1]
    return phase.progress_at(elapsed - start) if elapsed > start else phase.points[0]
