"""The work of a device on an order: the same in the simulator and on a real machine.

Orders of equal shape are carried out together, as one stack: every tensor has a leading axis with
one place for each device. One order is that of a real device; several are those of simulated ones.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from anyfleet.arrays import Floats, Ints, alike, join
from anyfleet.core.device_state import DeviceState
from anyfleet.core.device_states import DeviceStates, Keepsakes, Remembered
from anyfleet.core.evaluation import calibrate, measure
from anyfleet.core.layout import dense
from anyfleet.core.local_training import (
    Inputs,
    as_tensors,
    extent,
    lifted,
    samples_of,
    sizes_of,
    train,
    training_context,
)
from anyfleet.core.message_size import requested, stack_extra_bits, stacked_mask_bits
from anyfleet.core.messages import Kind, Params, Report, Trees
from anyfleet.core.objectives import Task
from anyfleet.core.orders import Cohort
from anyfleet.core.padding import unpaddable
from anyfleet.core.reports import learned, learns, on_host, reported
from anyfleet.core.residuals import compress_updates
from anyfleet.core.return_checks import Caller, countable, trained
from anyfleet.core.slots import Compressed, TrainingContext, TrainingResult
from anyfleet.core.stacks import Replies, Stack
from anyfleet.elastic import cut_stack, paste_stack, within
from anyfleet.tracebacks import during

TRAINING = (Kind.TRAIN, Kind.HOLD)  # kinds of orders that train

Runner = Callable[..., TrainingResult]  # called as `local_training.train` is
_DISTORTION, _NORM = "distortion", "norm"  # in a report, beside what the trainer measures
_MODEL, _MASKS = "bits of the model", "bits of the masks"  # in no report


@dataclass(frozen=True, eq=False)
class Completed:
    """Orders that are carried out: the replies, and the new state of every device."""

    replies: Replies
    states: tuple[DeviceState, ...]


@dataclass(frozen=True, eq=False)
class Finished:
    """Orders that are carried out: the replies, and what their devices keep of them."""

    replies: Replies
    remembered: Remembered


@dataclass(frozen=True, eq=False)
class Launched:
    """Orders that are being trained: tensors that an accelerator may not have computed yet."""

    cohort: Cohort
    context: TrainingContext
    result: TrainingResult
    change: Params  # of the parameters that are sent, before compression; {}: nobody needs it
    compressed: Compressed
    samples: Ints


def work(cohort: Cohort, states: tuple[DeviceState, ...], task: Task) -> Completed:
    """Return the replies to orders of one kind and one shape, and the states of their devices."""
    kept, devices = DeviceStates(task), cohort.device.tolist()
    for device, state in zip(devices, states, strict=True):
        kept.adopt(device, state)
    done = carry_out(cohort, kept, task)
    kept.commit(done.remembered)
    return Completed(done.replies, tuple(kept.state(device) for device in devices))


def carry_out(cohort: Cohort, states: DeviceStates, task: Task, runner: Runner = train) -> Finished:
    """Return the replies to orders of one kind and one shape, and what their devices keep."""
    if len(cohort) > 1 and cohort.kind in TRAINING and unpaddable(task):
        # Samples that see each other cannot be padded to the largest device of a stack.
        alone = [carry_out(order, states, task, runner) for order in cohort.rows()]
        return Finished(join([a.replies for a in alone]), join([a.remembered for a in alone]))
    if cohort.kind in TRAINING:
        return collect(launch(cohort, states, task, runner), states)
    fetched = cohort.kind == Kind.FETCH
    replies = [
        _fetched(order, states) if fetched else _answered(order, states, task)
        for order in cohort.rows()
    ]
    return Finished(join(replies), Remembered.of(cohort, fetched=fetched))


# --- orders that do not train -------------------------------------------------------------------


def _fetched(order: Cohort, states: DeviceStates) -> Replies:
    """Return the result that a device holds, or the news that there is none."""
    held = states.held(int(order.device[0]))
    if held is None or held.order[0] != order.held_order[0]:
        return _reply(order, {}, {"missing": 1.0}, 0)
    return replace(held, order=order.id)


def _answered(order: Cohort, states: DeviceStates, task: Task) -> Replies:
    """Return what a device measures without training."""
    device, job = int(order.device[0]), order.job
    local = task.blueprint.local(order.slice_of(0))
    params, buffers = map(_alone, begin(order, states, task))
    data, own = task.data(device), task.own_test(device)
    if order.kind == Kind.STATISTICS:
        found = calibrate(local, params, buffers, data)
        return _reply(order, {"buffers": found}, {}, len(data))
    if job.norm.calibrated:
        buffers = {**buffers, **calibrate(local, params, buffers, data)}
    subject = own if order.kind == Kind.EVALUATE else data
    report = measure(task, local, params, buffers, subject, job.norm.evaluation)
    return _reply(order, {}, report, len(subject))


def _reply(order: Cohort, trees: Trees, report: Report, samples: int) -> Replies:
    """Return the reply to a single order; its bits are those of trees without a model."""
    stack = Stack.of_one(trees, report=report)
    bits = stack_extra_bits(stack, np.zeros(1), order)
    return _replies(order, stack, np.array([samples]), bits)


def _replies(cohort: Cohort, stack: Stack, samples: Ints, bits: Floats) -> Replies:
    """Return the replies to orders, place by place of a stack."""
    count = len(cohort)
    return Replies(
        order=cohort.id,
        device=cohort.device,
        samples=samples,
        bits=bits,
        delivered_width=np.ones(count),
        stack_index=np.zeros(count, dtype=np.int64),
        place=np.arange(count),
        stacks=(stack,),
    )


# --- what devices begin with --------------------------------------------------------------------


def begin(
    cohort: Cohort, states: DeviceStates, task: Task
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the parameters and buffers to start from, [devices, …].

    They are what came over the link, and else what the device has. What all devices have alike is
    one tensor, which is expanded.
    """
    groups = alike(cohort.slice_index, cohort.download_index, cohort.delivered_width)
    if len(groups) == 1:
        tree = _begin_alike(cohort, states, task)
    else:
        parts = [_begin_alike(cohort.take(rows), states, task) for rows in groups]
        order = torch.from_numpy(np.argsort(np.concatenate(groups)))
        tree = {
            name: _in_order(torch.cat([part[name] for part in parts]), order) for name in parts[0]
        }
    blueprint = task.blueprint
    params = {name: tree[name] for name in blueprint.params}
    return params, {name: tree[name] for name in blueprint.buffers}


def _begin_alike(cohort: Cohort, states: DeviceStates, task: Task) -> dict[str, Tensor]:
    """Return the tensors to start from, of devices that were sent the same and received as much."""
    blueprint, slice_, count = task.blueprint, cohort.slice_of(0), len(cohort)
    trees, width = cohort.trees_of(0), float(cohort.delivered_width[0])
    received = {**trees.get("model", {}), **trees.get("buffers", {})}
    padded = 0 < width < 1
    initial = {**task.params, **task.buffers}
    # What came whole need not be cut from the device's own: it would be a second model in memory.
    kept = [name for name in initial if padded or name not in received]
    theirs = states.own(kept, cohort.device)
    # Until a device has trained, its own is the model that every device was installed with.
    installed = dense({n: initial[n] for n in kept if n not in theirs}, slice_, blueprint)
    small = {
        name: value.contiguous() for name, value in cut_stack(theirs, slice_, blueprint).items()
    }
    small |= {name: _expanded(value, count) for name, value in installed.items()}
    if padded:
        # Padding (specification §1.8): columns that came through replace the device's own.
        part, local = within(slice_, width, blueprint), blueprint.local(slice_)
        return small | paste_stack(received, {n: small[n] for n in received}, part, local)
    return small | {name: _expanded(value, count) for name, value in received.items()}


def _expanded(value: Tensor, count: int) -> Tensor:
    return value.expand(count, *value.shape)


def _in_order(value: Tensor, order: Tensor) -> Tensor:
    return value.index_select(0, order.to(value.device))


def _alone(tree: Params) -> dict[str, Tensor]:
    return {name: value[0] for name, value in tree.items()}


# --- training -----------------------------------------------------------------------------------


def launch(cohort: Cohort, states: DeviceStates, task: Task, runner: Runner = train) -> Launched:
    """Train devices with orders of equal shape, and compress their updates.

    Nothing here waits for an accelerator; `collect` does.
    """
    job = cohort.job
    context = training_context(task, job.norm, cohort.slice_of(0), float(cohort.width[0]))
    params, buffers = begin(cohort, states, task)
    with during("task", task):
        samples = sizes_of(task)[cohort.device]
        inputs = _inputs(cohort, params, buffers, samples, task)
    bounds = extent(cohort.hyperparameters, samples.tolist())
    with during("train", job.train):
        result = runner(
            job.trainer,
            context,
            inputs,
            bounds,
            lift=lifted(len(cohort)),
            cohort_key=cohort.cohort_key,
        )
    caller = Caller("train", job.train, cohort.round_index)
    result = trained(result, caller, inputs.params, inputs.buffers)
    if len(cohort) == 1:
        result = TrainingResult(*({n: v[None] for n, v in tree.items()} for tree in result))
    update = {name: result.params[name] for name in _sent_names(context)}
    needed = job.send == "delta" or _NORM in job.report
    change = {name: value - params[name] for name, value in update.items()} if needed else {}
    sent = change if job.send == "delta" else update
    compressed = compress_updates(cohort, states, sent, result.mask, task)
    return Launched(cohort, context, result, change, compressed, samples)


def _sent_names(context: TrainingContext) -> tuple[str, ...]:
    """Return the names of the trained parameters that leave the device."""
    stays = context.norm.stays(context.blueprint)
    return tuple(name for name in context.trained if name not in stays)


def _inputs(cohort: Cohort, params: Params, buffers: Params, samples: Ints, task: Task) -> Inputs:
    """Return what devices train from, stacked; that of a single device is not."""
    devices = cohort.device.tolist()
    x, y, rows, valid = samples_of(task, devices)
    seen = _stacked([task.labels(device) for device in devices])
    like = next(iter(params.values()))
    given = as_tensors(cohort.hyperparameters, samples.tolist(), like)
    keys = cohort.key.to(like.device)
    if len(cohort) > 1:
        return Inputs(params, buffers, x, y, valid, seen, keys, given, rows)
    alone = _alone(params), _alone(buffers), x, y, valid[0], seen[0], keys[0], _alone(given)
    return Inputs(*alone, rows[0])


def _stacked(labels: list[Tensor]) -> Tensor:
    """Return tensors as a stack; one that all devices share is expanded."""
    alike = len(set(map(id, labels))) == 1
    return _expanded(labels[0], len(labels)) if alike else torch.stack(labels)


def collect(launched: Launched, states: DeviceStates) -> Finished:
    """Return the replies of devices that were trained together, and what they keep."""
    cohort, result, compressed = launched.cohort, launched.result, launched.compressed
    job, found = cohort.job, _numbers(launched)
    countable(found[_MODEL], Caller("uplink", job.uplink, cohort.round_index))
    statistics = _sent_statistics(launched.context, result)
    names = [*reported(result.report, job), _DISTORTION, *((_NORM,) if _NORM in job.report else ())]
    stack = Stack(
        trees={job.send: compressed.received} | ({"buffers": statistics} if statistics else {}),
        symbols=compressed.symbols,
        masks=result.mask,
        kept=compressed.kept,
        report={name: found[name] for name in names},
    )
    replies = _replies(cohort, stack, launched.samples, found[_MODEL])
    held: tuple[Replies, ...] = ()
    if cohort.kind == Kind.HOLD:
        # As it will be fetched: the report goes ahead of it.
        fetch = replace(cohort, kind=Kind.FETCH)
        later = stack_extra_bits(replace(stack, report={}), found[_MASKS], fetch)
        held = tuple(replace(replies, bits=found[_MODEL] + later).rows())
        brief = Stack(report=requested(stack.report, job.report))
        bits = stack_extra_bits(brief, np.zeros(len(cohort)), cohort)
        replies = _replies(cohort, brief, launched.samples, bits)
    else:
        extra = stack_extra_bits(stack, found[_MASKS], cohort)
        replies = replace(replies, bits=found[_MODEL] + extra)
    measured = {name: found[name] for name, value in result.report.items() if value.ndim == 1}
    chooser = learned(cohort, states, launched.context, measured) if learns(job.choose) else ()
    kept = _keepsakes(launched)
    return Finished(replies, Remembered.of(cohort, stack=kept, chooser=chooser, held=held))


def _numbers(launched: Launched) -> dict[str, Floats]:
    """Return all numbers that training brings, by name: [devices], or [devices, …] of a vector."""
    job, mask, compressed = launched.cohort.job, launched.result.mask, launched.compressed
    measured = launched.result.report
    # Vectors that nobody asked for stay where they are.
    asked = {n: v for n, v in measured.items() if v.ndim == 1} | reported(measured, job)
    columns = {
        **asked,
        _MODEL: compressed.bits.double().sum(1),
        _DISTORTION: compressed.distortion,
        **({_MASKS: stacked_mask_bits(mask)} if mask else {}),
        **({_NORM: _norms(launched.change)} if _NORM in job.report else {}),
    }
    return {_MASKS: np.zeros(len(launched.cohort)), **on_host(columns)}


def _norms(change: Params) -> Tensor:
    """Return the Euclidean norm of the update of every device, before compression."""
    norms = [
        torch.linalg.vector_norm(value.flatten(1), dim=1, dtype=torch.float64)
        for value in change.values()
    ]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), dim=0)
    return total


def _sent_statistics(context: TrainingContext, result: TrainingResult) -> dict[str, Tensor]:
    """Return the statistics that are sent: only those of layers this device trained."""
    travels = context.norm.travels(context.blueprint)
    trained = set(context.trained)
    layers = [layer for layer in context.blueprint.layers if trained & set(layer.params)]
    return {n: result.buffers[n] for layer in layers for n in layer.buffers if n in travels}


def _keepsakes(launched: Launched) -> Keepsakes | None:
    """Return what devices keep of their tensors, or None.

    That is their model if the method caches it, what never leaves it, and what a codec owes.
    """
    job, result, compressed = launched.cohort.job, launched.result, launched.compressed
    everything = {**result.params, **result.buffers}
    stays = job.norm.stays(launched.context.blueprint)
    own = everything if job.cache else {name: everything[name] for name in stays}
    purpose = job.uplink.state_name
    if not own and not purpose:
        return None
    if not purpose:
        return Keepsakes(job.norm, own)
    mask = result.mask
    sent = {n: v * mask[n].to(v) if n in mask else v for n, v in compressed.received.items()}
    return Keepsakes(job.norm, own, purpose, compressed.state, sent)
