"""The work of a device on an order: the same in the simulator and on a real machine.

`work` takes orders of equal shape. One order is that of a real device; several are those of
simulated devices, which are trained together.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyfleet.arrays import join
from anyfleet.core.device_state import DeviceState
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
from anyfleet.core.messages import Kind, Params, Report, Trees
from anyfleet.core.method import Job
from anyfleet.core.objectives import Data, Task
from anyfleet.core.orders import Cohort
from anyfleet.core.padding import unpaddable
from anyfleet.core.reports import learned, reported
from anyfleet.core.residuals import SplitUpdate, after_sending, compress_updates
from anyfleet.core.return_checks import Caller, trained
from anyfleet.core.slots import Compressed, TrainingContext, TrainingResult
from anyfleet.core.stacks import Replies, Stack
from anyfleet.elastic import paste, within
from anyfleet.tracebacks import during

OWN = "own"  # names the device's own parameters and statistics in its state


@dataclass(frozen=True, eq=False)
class Completed:
    """Orders that are carried out: the replies, and the new state of every device."""

    replies: Replies
    states: tuple[DeviceState, ...]


def work(cohort: Cohort, states: tuple[DeviceState, ...], task: Task) -> Completed:
    """Return the replies to orders of one kind and one shape, and the states of their devices."""
    if cohort.kind in (Kind.TRAIN, Kind.HOLD):
        if len(cohort) > 1 and unpaddable(task):
            # Samples that see each other cannot be padded to the largest device of a stack.
            return _one_by_one(cohort, states, task)
        return _train(cohort, states, task)
    rows = [_reply_without_training(cohort, row, states[row], task) for row in range(len(cohort))]
    replies = [_replies(cohort, row, reply) for row, reply in enumerate(rows)]
    kept = tuple(
        replace(state, held=None) if cohort.kind == Kind.FETCH else state for state in states
    )
    return Completed(join(replies), kept)


def _one_by_one(cohort: Cohort, states: tuple[DeviceState, ...], task: Task) -> Completed:
    """Return what each device makes of its order when each is trained alone."""
    alone = [_train(cohort.take([row]), (states[row],), task) for row in range(len(cohort))]
    replies = join([each.replies for each in alone])
    return Completed(replies, tuple(each.states[0] for each in alone))


class _Reply(NamedTuple):
    """The reply of one device, before it becomes a row of `Replies`."""

    trees: Trees
    mask: Params
    bits: float
    samples: int
    report: Report
    symbols: Any = None
    kept: Params = {}  # noqa: RUF012 - never changed


def _reply_without_training(cohort: Cohort, row: int, state: DeviceState, task: Task) -> _Reply:
    """Return the reply to an order that does not train."""
    device, job = int(cohort.device[row]), cohort.job
    if cohort.kind == Kind.FETCH:
        if state.held is None or state.held.order[0] != cohort.held_order[row]:
            missing = {"missing": 1.0}
            return _Reply({}, {}, reply_extra_bits({}, 0.0, missing, cohort), 0, missing)
        held = state.held
        size, samples = float(held.bits[0]), int(held.samples[0])
        given = held.trees_of(0), held.masks_of(0), size, samples, held.report_of(0)
        return _Reply(*given, held.symbols_of(0), held.kept_of(0))
    slice_ = cohort.slice_of(row)
    local = task.blueprint.local(slice_)
    params, buffers = begin(cohort, row, state, task)
    data, own = task.data(device), task.own_test(device)
    if cohort.kind == Kind.STATISTICS:
        found = calibrate(local, params, buffers, data)
        trees: Trees = {"buffers": found}
        return _Reply(trees, {}, reply_extra_bits(trees, 0.0, {}, cohort), len(data), {})
    if job.norm.calibrated:
        buffers = {**buffers, **calibrate(local, params, buffers, data)}
    subject = own if cohort.kind == Kind.EVALUATE else data
    report = measure(task, local, params, buffers, subject, job.norm.evaluation)
    return _Reply({}, {}, reply_extra_bits({}, 0.0, report, cohort), len(subject), report)


def begin(
    cohort: Cohort, row: int, state: DeviceState, task: Task
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the parameters and buffers to start from.

    They are what came over the link, and else what the device has.
    """
    blueprint, slice_ = task.blueprint, cohort.slice_of(row)
    # From the bottom up: the initial model every device was installed with, then its own.
    own = {**task.params, **task.buffers, **state.tensors.get(OWN, {})}
    trees = cohort.trees_of(row)
    received = {**trees.get("model", {}), **trees.get("buffers", {})}
    width = float(cohort.delivered_width[row])
    padded = 0 < width < 1
    # What came whole need not be cut from the device's own: it would be a second model in memory.
    kept = own if padded else {name: own[name] for name in own if name not in received}
    small = dense(kept, slice_, blueprint)
    if padded:
        # Padding (specification §1.8): columns that came through replace the device's own.
        part = within(slice_, width, blueprint)
        received = paste(received, {n: small[n] for n in received}, part, blueprint.local(slice_))
    small |= received
    params = {name: small[name] for name in blueprint.params}
    return params, {name: small[name] for name in blueprint.buffers}


def _train(cohort: Cohort, states: tuple[DeviceState, ...], task: Task) -> Completed:
    """Return what devices make of training orders that are carried out together."""
    context = training_context(task, cohort.job.norm, cohort.slice_of(0), float(cohort.width[0]))
    starts = [begin(cohort, row, states[row], task) for row in range(len(cohort))]
    with during("task", task):
        data = [task.data(int(device)) for device in cohort.device]
        samples = [len(d) for d in data]
        inputs = _stacked(cohort, starts, data, task)
    bounds = extent(cohort.hyperparameters, samples)
    caller = Caller("train", cohort.job.train, cohort.round_index)
    with during("train", cohort.job.train):
        result = train(
            cohort.job.trainer,
            context,
            inputs,
            bounds,
            lift=lifted(len(cohort)),
            cohort_key=cohort.cohort_key,
        )
    result = trained(result, caller, inputs.params, inputs.buffers)
    sent = _sent_names(context)
    update = {name: result.params[name] for name in sent}
    if cohort.job.send == "delta":
        update = {name: value - inputs.params[name] for name, value in update.items()}
    compressed = compress_updates(cohort, states, update, result.mask, task)
    change = update
    if cohort.job.send == "weights" and "norm" in cohort.job.report:
        change = {name: value - inputs.params[name] for name, value in update.items()}
    return _collect(
        cohort, states, _Trained(cohort.job, context, result, change, compressed, samples)
    )


def _sent_names(context: TrainingContext) -> tuple[str, ...]:
    """Return the names of the trained parameters that leave the device."""
    stays = context.norm.stays(context.blueprint)
    return tuple(name for name in context.trained if name not in stays)


def _stacked(
    cohort: Cohort,
    starts: list[tuple[dict[str, Tensor], dict[str, Tensor]]],
    data: list[Data],
    task: Task,
) -> Inputs:
    """Return what devices start from, stacked; that of a single device stays as it is."""
    x, y, valid = pad(data)
    seen = torch.stack([task.labels(int(device)) for device in cohort.device])
    like = next(iter(starts[0][0].values()))
    hyperparameters = as_tensors(cohort.hyperparameters, [len(d) for d in data], like)
    keys = cohort.key.to(like.device)
    if len(cohort) == 1:
        one = {name: value[0] for name, value in hyperparameters.items()}
        return Inputs(*starts[0], x[0], y[0], valid[0], seen[0], keys[0], one)
    params, buffers = (
        {name: torch.stack([start[i][name] for start in starts]) for name in starts[0][i]}
        for i in (0, 1)
    )
    return Inputs(params, buffers, x, y, valid, seen, keys, hyperparameters)


@dataclass(frozen=True, eq=False)
class _Trained:
    """What training orders together came to, before it is taken apart by device."""

    job: Job
    context: TrainingContext
    result: TrainingResult
    change: Params  # before compression, whatever is sent of it
    compressed: Compressed
    samples: list[int]


def _collect(cohort: Cohort, states: tuple[DeviceState, ...], trained: _Trained) -> Completed:
    """Return the reply and the new state of every device that was trained."""
    replies, kept = [], []
    for row in range(len(cohort)):
        result = _row(trained.result, row, len(cohort))
        reply = _training_reply(trained, row, result)
        state = _kept_state(states[row], cohort.take([row]), trained, row)
        chooser = learned(cohort, row, state, trained.context, result.report)
        state = state if chooser is state.chooser else replace(state, chooser=chooser)
        order, masked = cohort.take([row]), mask_bits(reply.mask)
        if cohort.kind == Kind.HOLD:
            # As it will be fetched: the report goes ahead of it.
            fetch = replace(order, kind=Kind.FETCH)
            later = reply_extra_bits(reply.trees, masked, {}, fetch)
            held = reply._replace(bits=reply.bits + later)
            state = replace(state, held=_replies(cohort, row, held))
            brief = requested(reply.report, cohort.job.report)
            bits = reply_extra_bits({}, 0.0, brief, order)
            reply = _Reply({}, {}, bits, reply.samples, brief)
        else:
            extra = reply_extra_bits(reply.trees, masked, reply.report, order)
            reply = reply._replace(bits=reply.bits + extra)
        replies.append(_replies(cohort, row, reply))
        kept.append(state)
    return Completed(join(replies), tuple(kept))


def _training_reply(trained: _Trained, row: int, result: TrainingResult) -> _Reply:
    """Return the update of one device, and what it reports."""
    job, compressed = trained.job, trained.compressed
    buffers = _sent_statistics(trained.context, result)
    sent, kept = ({n: v[row] for n, v in t.items()} for t in (compressed.received, compressed.kept))
    trees: Trees = {job.send: sent} | ({"buffers": buffers} if buffers else {})
    bits = float(compressed.bits[row].sum())  # of the model alone
    report = reported(result.report, job)
    report["distortion"] = float(compressed.distortion[row])
    if "norm" in job.report:
        report["norm"] = _update_norm(trained, row)
    given = trees, result.mask, bits, trained.samples[row], report
    return _Reply(*given, compressed.symbols.row(row), kept)


def _update_norm(trained: _Trained, row: int) -> float:
    """Return the Euclidean norm of the update of one device, before compression."""
    stacked = len(trained.samples) > 1
    rows = [value[row] if stacked else value for value in trained.change.values()]
    return math.sqrt(sum(float(value.double().square().sum()) for value in rows))


def _row(result: TrainingResult, row: int, count: int) -> TrainingResult:
    """Return the result of one of the `count` devices that were trained together."""
    if count == 1:
        return result
    return TrainingResult(*({name: value[row] for name, value in tree.items()} for tree in result))


def _sent_statistics(context: TrainingContext, result: TrainingResult) -> dict[str, Tensor]:
    """Return the statistics that are sent: only those of layers this device trained."""
    travels = context.norm.travels(context.blueprint)
    trained = set(context.trained)
    layers = [layer for layer in context.blueprint.layers if trained & set(layer.params)]
    return {n: result.buffers[n] for layer in layers for n in layer.buffers if n in travels}


def _kept_state(state: DeviceState, order: Cohort, trained: _Trained, row: int) -> DeviceState:
    """Return what the device keeps.

    That is its model if the method caches it, what never leaves it, and what a codec owes.
    """
    context, result = trained.context, _row(trained.result, row, len(trained.samples))
    task, job, slice_ = context.task, order.job, order.slice_of(0)
    everything = {**result.params, **result.buffers}
    stays = job.norm.stays(context.blueprint)
    kept = everything if job.cache else {name: everything[name] for name in stays}
    if kept:
        # Until a device has trained, its own is the initial model.
        initial = {**task.params, **task.buffers}
        onto = {**{n: initial[n] for n in kept}, **state.tensors.get(OWN, {})}
        own = paste(kept, onto, slice_, task.blueprint)
        state = replace(state, tensors={**state.tensors, OWN: own})
    compressed = trained.compressed
    if not job.uplink.state_name:
        return state
    left, sent = (
        {n: v[row] for n, v in t.items()} for t in (compressed.state, compressed.received)
    )
    sent = {n: v * result.mask[n].to(v) if n in result.mask else v for n, v in sent.items()}
    return after_sending(state, job.uplink.state_name, SplitUpdate(left, sent), order, task)


def _replies(cohort: Cohort, row: int, reply: _Reply) -> Replies:
    """Return the reply to one order, as a batch of one."""
    stack = Stack.of_one(
        reply.trees,
        symbols=reply.symbols,
        masks=reply.mask,
        kept=reply.kept,
        report=reply.report,
    )
    return Replies.of_one(
        stack,
        order=int(cohort.id[row]),
        device=int(cohort.device[row]),
        samples=reply.samples,
        bits=reply.bits,
    )
