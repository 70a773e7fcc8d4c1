"""What an order demands of its device, and what it is charged."""

import math
from dataclasses import replace

import numpy as np

from anyfleet.columns import Floats
from anyfleet.elastic import Blueprint, Slice, cost
from anyfleet.elastic.counting import Counting, forward_operations
from anyfleet.evaluate import EVALUATION_BATCH
from anyfleet.local import limits, processed
from anyfleet.timing import Amount, Demand, Effort, effort_of, training
from anyfleet.types import Charges, Conditions, Kind, Orders, Task
from anyfleet.world.quantities import When

_EVERYTHING = Slice()


def demand(order: Orders, task: Task, counting: Counting) -> Demand:
    """The work of one order on its device."""
    device, blueprint, slice_ = int(order.device[0]), task.blueprint, order.slices[0]
    if order.kind == Kind.FETCH:
        return Demand(effort_of(0, 0, steps=0, calls=0, moved=0), np.zeros(1))
    if order.kind not in (Kind.TRAIN, Kind.HOLD):
        subject = task.own_test(device) if order.kind == Kind.EVALUATE else task.data(device)
        return _measuring(slice_, len(subject), blueprint, counting)
    samples = len(task.data(device))
    (steps,) = limits(order.numbers, [samples])
    batch = int(order.numbers.batch[0])
    amount = Amount(batch, processed(steps, samples, batch), steps)
    return training(order.job.train, blueprint, slice_, amount, counting)


def _measuring(slice_: Slice, samples: int, blueprint: Blueprint, counting: Counting) -> Demand:
    """Forward passes only, in batches of the size that `evaluate` uses."""
    own, whole = cost(blueprint, slice_), cost(blueprint, _EVERYTHING)
    batches = -(-samples // EVALUATION_BATCH)
    batch = cost(blueprint, slice_, EVALUATION_BATCH)
    flops = [float(each.forward_flops * samples) for each in (own, whole)]
    if counting != "flops":
        flops = [
            forward_operations(blueprint, each, EVALUATION_BATCH, counting)
            * (samples / EVALUATION_BATCH)
            for each in (slice_, _EVERYTHING)
        ]
    effort = effort_of(
        *flops,
        steps=batches,
        calls=batches * batch.forward_calls,
        moved=batches * batch.forward_moved,
    )
    return Demand(effort, np.array([float(own.nbytes)]))


def charged(order: Orders, effort: Effort, own: Conditions, download: float, when: When) -> Charges:
    """What is known of an order when it is submitted: all but the upload."""
    nothing, frequency = np.zeros(1), order.numbers.frequency
    return Charges(
        order=order.id,
        flops=effort.flops,
        down=order.bits,
        up=nothing,
        download=np.array([download]),
        compute=effort.seconds(own, frequency),
        upload=nothing,
        download_joules=own.receive * download if math.isfinite(download) else nothing,
        compute_joules=effort.joules(own, frequency),
        upload_joules=nothing,
        began=np.array([when.now]),
        delivered_down=np.ones(1),
        delivered_up=np.zeros(1),
    )


def sending(planned: Charges, bits: Floats, seconds: float, power: Floats) -> Charges:
    """The same with the upload, now that the size of the answer is known."""
    return replace(
        planned,
        up=bits,
        upload=np.array([seconds]),
        # Over a link that carries nothing, nothing is sent.
        upload_joules=power * seconds if math.isfinite(seconds) else np.zeros(1),
    )


def spent(planned: Charges, passed: float) -> Charges:
    """What an order has cost after `passed` seconds: the parts of it that time has reached."""
    times, shares, start = {}, {}, 0.0
    for name in ("download", "compute", "upload"):
        whole = float(getattr(planned, name)[0])
        share = _share(start, whole, passed)
        times[name] = np.array([whole if share == 1 else max(0.0, passed - start)])
        shares[name], start = share, start + whole
    return replace(
        planned,
        flops=planned.flops * shares["compute"],
        down=planned.down * shares["download"],
        up=planned.up * shares["upload"],
        download_joules=planned.download_joules * shares["download"],
        compute_joules=planned.compute_joules * shares["compute"],
        upload_joules=planned.upload_joules * shares["upload"],
        # Half of a message is no message: what it has of the model cannot be used.
        delivered_down=planned.delivered_down * (shares["download"] == 1),
        delivered_up=planned.delivered_up * (shares["upload"] == 1),
        **times,
    )


def _share(start: float, whole: float, passed: float) -> float:
    """How much of a phase is done, `passed` seconds after the first of all phases began."""
    if passed >= (start + whole) * (1 - 1e-12):
        return 1.0  # sums of seconds round: a hair less than the whole is the whole
    return (passed - start) / whole if passed > start and math.isfinite(whole) else 0.0
