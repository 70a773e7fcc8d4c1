"""What a device does with an order: the same in the simulator and on a real machine.

`work` takes a batch of orders of equal shape. A batch of one is a device; a larger batch is a stack
of simulated ones.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from anyfleet.arrays import join
from anyfleet.core.evaluation import calibrate, measure
from anyfleet.core.layout import dense
from anyfleet.core.local_training import (
    Inputs,
    as_tensors,
    extent,
    lifted,
    pad,
    train,
    training_context,
)
from anyfleet.core.message_size import mask_bits, reply_extra_bits, requested
from anyfleet.core.messages import DeviceState, Kind, Params, Replies, Report, Trees
from anyfleet.core.method import Job
from anyfleet.core.objectives import Data, Task
from anyfleet.core.orders import Cohort
from anyfleet.core.padding import mixed
from anyfleet.core.reports import learned, reported
from anyfleet.core.residuals import Left, sending, squeeze
from anyfleet.core.return_checks import Caller, trained
from anyfleet.core.slots import Compressed, TrainingContext, TrainingResult
from anyfleet.elastic import paste, within
from anyfleet.tracebacks import during

OWN = "own"  # the memory slot with the device's own parameters and statistics


@dataclass(frozen=True, eq=False)
class Done:
    """Answers, and what each device keeps."""

    replies: Replies
    states: tuple[DeviceState, ...]


def work(cohort: Cohort, states: tuple[DeviceState, ...], task: Task) -> Done:
    """Carries out orders of one kind and one shape."""
    if cohort.kind in (Kind.TRAIN, Kind.HOLD):
        if len(cohort) > 1 and mixed(task):
            # Samples that see each other cannot be padded to the largest device of a stack.
            return _one_by_one(cohort, states, task)
        return _train(cohort, states, task)
    rows = [_single(cohort, row, states[row], task) for row in range(len(cohort))]
    updates = [_update(cohort, row, answer) for row, answer in enumerate(rows)]
    kept = tuple(
        replace(memory, held=None) if cohort.kind == Kind.FETCH else memory for memory in states
    )
    return Done(join(updates), kept)


def _one_by_one(orders: Cohort, memories: tuple[DeviceState, ...], task: Task) -> Done:
    """Train each device by itself, also those that were ordered together."""
    done = [_train(orders.take([row]), (memories[row],), task) for row in range(len(orders))]
    return Done(join([each.replies for each in done]), tuple(each.states[0] for each in done))


class _Answer(NamedTuple):
    """One device's answer, before it becomes a row of `Updates`."""

    trees: Trees
    mask: Params
    bits: float
    samples: int
    report: Report
    symbols: Any = None
    kept: Params = {}  # noqa: RUF012 - never changed


def _single(orders: Cohort, row: int, memory: DeviceState, task: Task) -> _Answer:
    """The answer to an order that does not train."""
    device, job = int(orders.device[row]), orders.job
    if orders.kind == Kind.FETCH:
        if memory.held is None or memory.held.order[0] != orders.held_order[row]:
            missing = {"missing": 1.0}
            return _Answer({}, {}, reply_extra_bits({}, 0.0, missing, orders), 0, missing)
        held = memory.held
        size, samples = float(held.bits[0]), int(held.samples[0])
        given = held.trees[0], held.masks[0], size, samples, held.report[0]
        return _Answer(*given, held.symbols[0], held.kept[0])
    slice_ = orders.slices[row]
    local = task.blueprint.local(slice_)
    params, buffers = begin(orders, row, memory, task)
    data, own = task.data(device), task.own_test(device)
    if orders.kind == Kind.STATISTICS:
        found = calibrate(local, params, buffers, data)
        trees: Trees = {"buffers": found}
        return _Answer(trees, {}, reply_extra_bits(trees, 0.0, {}, orders), len(data), {})
    if job.norm.calibrated:
        buffers = {**buffers, **calibrate(local, params, buffers, data)}
    subject = own if orders.kind == Kind.EVALUATE else data
    report = measure(task, local, params, buffers, subject, job.norm.evaluation)
    return _Answer({}, {}, reply_extra_bits({}, 0.0, report, orders), len(subject), report)


def begin(
    orders: Cohort, row: int, memory: DeviceState, task: Task
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Parameters and buffers to start from: what came over the link, else what the device has."""
    blueprint, slice_ = task.blueprint, orders.slices[row]
    # From the bottom up: the initial state every device was installed with, then its memory.
    own = {**task.params, **task.buffers, **memory.tensors.get(OWN, {})}
    trees = orders.trees[row]
    received = {**trees.get("model", {}), **trees.get("buffers", {})}
    width = float(orders.delivered_width[row])
    padded = 0 < width < 1
    # What came whole need not be cut from the device's own: it would be a second model in memory.
    kept = own if padded else {name: own[name] for name in own if name not in received}
    small = dense(kept, slice_, blueprint)
    if padded:
        # Padding (specification §1.8): columns that came through overwrite, the others stay its own.
        part = within(slice_, width, blueprint)
        received = paste(received, {n: small[n] for n in received}, part, blueprint.local(slice_))
    small |= received
    params = {name: small[name] for name in blueprint.params}
    return params, {name: small[name] for name in blueprint.buffers}


def _train(orders: Cohort, memories: tuple[DeviceState, ...], task: Task) -> Done:
    where = training_context(task, orders.job.norm, orders.slices[0], float(orders.width[0]))
    count = len(orders)
    lift = lifted(count)
    starts = [begin(orders, row, memories[row], task) for row in range(count)]
    with during("task", task):
        data = [task.data(int(device)) for device in orders.device]
        samples = [len(d) for d in data]
        inputs = _stacked(orders, starts, data, task)
    bounds, caller = (
        extent(orders.hyperparameters, samples),
        Caller("train", orders.job.train, orders.round_index),
    )
    with during("train", orders.job.train):
        result = train(
            orders.job.trainer, where, inputs, bounds, lift=lift, cohort=orders.cohort_key
        )
    result = trained(result, caller, inputs.params, inputs.buffers)
    sent = _sent_names(where)
    update = {name: result.params[name] for name in sent}
    if orders.job.send == "delta":
        update = {name: value - inputs.params[name] for name, value in update.items()}
    squeezed = squeeze(orders, memories, update, result.mask, task)
    change = update
    if orders.job.send == "weights" and "norm" in orders.job.report:
        change = {name: value - inputs.params[name] for name, value in update.items()}
    return _collect(
        orders, memories, _Trained(orders.job, where, result, change, squeezed, samples)
    )


def _sent_names(where: TrainingContext) -> tuple[str, ...]:
    stays = where.norm.stays(where.blueprint)
    return tuple(name for name in where.trained if name not in stays)


def _stacked(
    orders: Cohort,
    starts: list[tuple[dict[str, Tensor], dict[str, Tensor]]],
    data: list[Data],
    task: Task,
) -> Inputs:
    """Stacks what the devices start from; a single device stays as it is."""
    x, y, valid = pad(data)
    seen = torch.stack([task.labels(int(device)) for device in orders.device])
    like = next(iter(starts[0][0].values()))
    numbers = as_tensors(orders.hyperparameters, [len(d) for d in data], like)
    keys = orders.key.to(like.device)
    if len(orders) == 1:
        one = {name: value[0] for name, value in numbers.items()}
        return Inputs(*starts[0], x[0], y[0], valid[0], seen[0], keys[0], one)
    params, buffers = (
        {name: torch.stack([start[i][name] for start in starts]) for name in starts[0][i]}
        for i in (0, 1)
    )
    return Inputs(params, buffers, x, y, valid, seen, keys, numbers)


@dataclass(frozen=True, eq=False)
class _Trained:
    job: Job
    where: TrainingContext
    result: TrainingResult
    change: Params  # before compression, whatever is sent of it
    squeezed: Compressed
    samples: list[int]


def _collect(orders: Cohort, memories: tuple[DeviceState, ...], trained: _Trained) -> Done:
    """Takes a stack apart into one answer and one memory per device."""
    updates, kept = [], []
    for row in range(len(orders)):
        result = _row(trained.result, row, len(orders))
        answer = _answer(trained, row, result)
        memory = _remember(memories[row], orders.take([row]), trained, row)
        notes = learned(orders, row, memory, trained.where, result.report)
        memory = memory if notes is memory.chooser else replace(memory, chooser=notes)
        order, masked = orders.take([row]), mask_bits(answer.mask)
        if orders.kind == Kind.HOLD:
            # As it will be fetched: the report goes ahead of it.
            fetch = replace(order, kind=Kind.FETCH)
            later = reply_extra_bits(answer.trees, masked, {}, fetch)
            held = answer._replace(bits=answer.bits + later)
            memory = replace(memory, held=_update(orders, row, held))
            brief = requested(answer.report, orders.job.report)
            bits = reply_extra_bits({}, 0.0, brief, order)
            answer = _Answer({}, {}, bits, answer.samples, brief)
        else:
            extra = reply_extra_bits(answer.trees, masked, answer.report, order)
            answer = answer._replace(bits=answer.bits + extra)
        updates.append(_update(orders, row, answer))
        kept.append(memory)
    return Done(join(updates), tuple(kept))


def _answer(trained: _Trained, row: int, result: TrainingResult) -> _Answer:
    job, squeezed = trained.job, trained.squeezed
    buffers = _travelling(trained.where, result)
    sent, kept = ({n: v[row] for n, v in t.items()} for t in (squeezed.received, squeezed.kept))
    trees: Trees = {job.send: sent} | ({"buffers": buffers} if buffers else {})
    bits = float(squeezed.bits[row].sum())  # of the model alone
    report = reported(result.report, job)
    report["distortion"] = float(squeezed.distortion[row])
    if "norm" in job.report:
        report["norm"] = _length(trained, row)
    given = trees, result.mask, bits, trained.samples[row], report
    return _Answer(*given, squeezed.symbols.row(row), kept)


def _length(trained: _Trained, row: int) -> float:
    """The Euclidean norm of one update, whatever the trainer."""
    stacked = len(trained.samples) > 1
    rows = [value[row] if stacked else value for value in trained.change.values()]
    return math.sqrt(sum(float(value.double().square().sum()) for value in rows))


def _row(result: TrainingResult, row: int, count: int) -> TrainingResult:
    if count == 1:
        return result
    return TrainingResult(*({name: value[row] for name, value in tree.items()} for tree in result))


def _travelling(where: TrainingContext, result: TrainingResult) -> dict[str, Tensor]:
    """Statistics that are sent: only those of layers this device trained."""
    travels = where.norm.travels(where.blueprint)
    trained = set(where.trained)
    layers = [layer for layer in where.blueprint.layers if trained & set(layer.params)]
    return {n: result.buffers[n] for layer in layers for n in layer.buffers if n in travels}


def _remember(memory: DeviceState, order: Cohort, trained: _Trained, row: int) -> DeviceState:
    """What the device keeps: its model where the method says so, and what never leaves it."""
    where, result = trained.where, _row(trained.result, row, len(trained.samples))
    task, job, slice_ = where.task, order.job, order.slices[0]
    everything = {**result.params, **result.buffers}
    stays = job.norm.stays(where.blueprint)
    kept = everything if job.cache else {name: everything[name] for name in stays}
    if kept:
        # Born as the initial model.
        birth = {**task.params, **task.buffers}
        onto = {**{n: birth[n] for n in kept}, **memory.tensors.get(OWN, {})}
        own = paste(kept, onto, slice_, task.blueprint)
        memory = replace(memory, tensors={**memory.tensors, OWN: own})
    squeezed = trained.squeezed
    if not job.uplink.state_name:
        return memory
    left, sent = ({n: v[row] for n, v in t.items()} for t in (squeezed.state, squeezed.received))
    sent = {n: v * result.mask[n].to(v) if n in result.mask else v for n, v in sent.items()}
    return sending(memory, job.uplink.state_name, Left(left, sent), order, task)


def _update(orders: Cohort, row: int, answer: _Answer) -> Replies:
    return Replies(
        order=orders.id[[row]],
        device=orders.device[[row]],
        samples=np.array([answer.samples]),
        trees=(answer.trees,),
        symbols=(answer.symbols,),
        masks=(answer.mask,),
        kept=(answer.kept,),
        bits=np.array([answer.bits]),
        delivered_width=np.ones(1),
        report=(answer.report,),
    )
