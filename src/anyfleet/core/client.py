"""The work of a device on an order: the same in the simulator and on a real machine.

Orders of equal shape are carried out together, as one stack: every tensor has a leading axis with
one place for each device. One order is that of a real device; several are those of simulated ones.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anyfleet import rng
from anyfleet.arrays import Floats, Ints, alike, join
from anyfleet.core.arriving import Transfer, on_host
from anyfleet.core.codec_calls import compress
from anyfleet.core.device_state import DeviceState
from anyfleet.core.device_states import DeviceStates, Keepsakes, Remembered
from anyfleet.core.evaluation import (
    EVALUATION_BATCH,
    calibrate,
    calibrate_stack,
    measure,
    measure_stack,
    stackable,
)
from anyfleet.core.layout import MessageLayout, dense, tensor_layouts
from anyfleet.core.local_training import (
    Inputs,
    Prepared,
    lifted,
    prepare,
    samples_of,
    train,
    training_context,
)
from anyfleet.core.message_size import (
    mask_variation,
    requested,
    stack_extra_bits,
    stacked_mask_bits,
)
from anyfleet.core.messages import TRAINING, ChooserState, Kind, Params
from anyfleet.core.objectives import Task
from anyfleet.core.orders import Cohort, grid
from anyfleet.core.padding import unpaddable
from anyfleet.core.reports import learned, learns, reported
from anyfleet.core.residuals import compress_updates
from anyfleet.core.return_checks import Caller, countable, same_masks, trained
from anyfleet.core.slots import Compressed, Norm, Train, TrainingContext, TrainingResult
from anyfleet.core.stacks import Replies, Stack
from anyfleet.elastic import Blueprint, cut_stack, paste_stack, within
from anyfleet.tracebacks import during

_BLOCK = 64  # devices that measure without training whose models are read together
_SAMPLES = 2048  # of such devices that are measured as one stack
Runner = Callable[..., TrainingResult]  # called as `local_training.train` is
_DISTORTION, _NORM = "distortion", "norm"  # in a report, beside what the trainer measures
_MODEL, _MASKS = "bits of the model", "variation of the masks"  # in no report
_LENGTH = "length of "  # and the name of a tree: in no report


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
    """A stack that is being trained: tensors that an accelerator may not have computed yet."""

    cohort: Cohort
    context: TrainingContext
    stack: Stack  # what is sent, without the report
    measured: Mapping[str, Tensor]  # all numbers that training brings: [devices, …]
    reported: Sequence[str]  # which of them are in the report
    learned: Sequence[str]  # from which of them a chooser learns
    kept: Keepsakes
    samples: Ints
    masks: Params  # as the reply counts them: those that labels decide, or of the result
    variation: Transfer | None  # of these masks, if it is known before training


# What maps a function over stacks, as `map` does; an engine may do so in threads or on streams.
Mapper = Callable[[Callable[[int], Any], Iterable[int]], Iterable[Any]]


def work(cohort: Cohort, states: tuple[DeviceState, ...], task: Task) -> Completed:
    """Return the replies to orders of one kind and one shape, and the states of their devices."""
    kept, devices = DeviceStates(task), cohort.device.tolist()
    for device, state in zip(devices, states, strict=True):
        kept.adopt(device, state)
    done = carry_out(cohort, kept, task)
    kept.commit(done.remembered)
    return Completed(done.replies, tuple(kept.state(device) for device in devices))


def carry_out(
    cohort: Cohort,
    states: DeviceStates,
    task: Task,
    runner: Runner = train,
    *,
    stacks: Sequence[Ints] | None = None,
    run: Mapper = map,
) -> Finished:
    """Return the replies to orders of one kind, and what their devices keep.

    `stacks` has the rows of orders of equal shape that are trained together; without it all are.
    `run` trains stack after stack. What they bring is fetched when all of them have been launched.
    Devices that measure without training do so one by one where `stacks` are given, since engines
    give them for training alone, and else as stacks.
    """
    if cohort.kind in TRAINING:
        rows = [np.arange(len(cohort))] if stacks is None else stacks
        if len(rows) < len(cohort) and unpaddable(task):
            # Samples that see each other cannot be padded to the largest device of a stack.
            rows = list(np.arange(len(cohort))[:, None])
        parts = _parts(cohort, rows)
        given = _prepared(parts, task)

        def begun(number: int) -> Launched:
            return launch(parts[number], given[number], states, task, runner)

        return collect(cohort, rows, list(run(begun, range(len(parts)))), states)
    if cohort.kind == Kind.FETCH:
        return Finished(_fetched(cohort, states), Remembered.of(cohort, fetched=True))
    # Those that begin alike are read together, but not all: models would fill the memory.
    groups = alike(cohort.slice_index, cohort.download_index, cohort.delivered_width)
    blocks = [rows[i : i + _BLOCK] for rows in groups for i in range(0, len(rows), _BLOCK)]
    if stacks is None:
        blocks = [some for rows in blocks for some in _measurable(cohort, rows, task)]
        parts = [cohort.take(rows) for rows in blocks]
        found = list(run(lambda number: _answered(parts[number], states, task), range(len(parts))))
    else:
        found = [_answered_singly(cohort.take(rows), states, task, run) for rows in blocks]
    answered = join(found).take(np.argsort(np.concatenate(blocks)))
    return Finished(answered, Remembered.of(cohort))


def _parts(cohort: Cohort, rows: Sequence[Ints]) -> list[Cohort]:
    """Return the orders of every stack."""
    if len(rows) < len(cohort):
        return [cohort.take(some) for some in rows]
    alone = cohort.rows()
    return [alone[int(row)] for (row,) in rows]


# --- orders that do not train -------------------------------------------------------------------


def _fetched(orders: Cohort, states: DeviceStates) -> Replies:
    """Return the results that devices hold, or the news that there is none."""
    there, held = states.held(orders)
    found = held.having(order=orders.id[there])
    if there.all():
        return found
    absent = orders.take(~there)
    news = _reply(absent, Stack(report={"missing": np.ones(len(absent))}), [0] * len(absent))
    return join([found, news]).take(np.argsort(np.argsort(~there, kind="stable")))


def _measurable(orders: Cohort, rows: Ints, task: Task) -> list[Ints]:
    """Return rows in parts whose samples fit into memory together, padded to the largest device."""
    devices = orders.device[rows].tolist()
    sizes = [len(task.own_test(d)) for d in devices] if orders.kind == Kind.EVALUATE else []
    if not sizes or orders.job.norm.calibrated:
        sizes += [task.size(device) for device in devices]
    most = max(1, min(max(sizes), EVALUATION_BATCH))
    size = max(1, _SAMPLES // most)
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def _answered(orders: Cohort, states: DeviceStates, task: Task) -> Replies:
    """Return what devices that begin alike measure without training, as one stack."""
    job, local = orders.job, task.blueprint.local(orders.slice_of(0))
    alone = len(orders) == 1 or orders.kind == Kind.STATISTICS
    if alone or not stackable(task, local):
        return _answered_singly(orders, states, task)
    params, buffers = begin(orders, states, task)
    devices = orders.device.tolist()
    data = [task.data(device) for device in devices]
    if job.norm.calibrated:
        buffers = {**buffers, **calibrate_stack(local, params, buffers, data)}
    subject = list(map(task.own_test, devices)) if orders.kind == Kind.EVALUATE else data
    report = measure_stack(task, local, params, buffers, subject, job.norm.evaluation)
    return _reply(orders, Stack(report=report), list(map(len, subject)))


def _answered_singly(
    orders: Cohort, states: DeviceStates, task: Task, run: Mapper = map
) -> Replies:
    """Return what devices that begin alike measure without training, each for itself."""
    params, buffers = (_apart(tree, len(orders)) for tree in begin(orders, states, task))
    devices = orders.device.tolist()
    if orders.kind == Kind.STATISTICS:
        return _calibrated(orders, zip(devices, params, buffers, strict=True), task)
    job, local = orders.job, task.blueprint.local(orders.slice_of(0))
    subject = [
        task.own_test(device) if orders.kind == Kind.EVALUATE else task.data(device)
        for device in devices
    ]

    def measured(row: int) -> dict[str, float]:
        mine, data = (params[row], buffers[row]), task.data(devices[row])
        found = calibrate(local, *mine, data) if job.norm.calibrated else {}
        own = {**buffers[row], **found}
        return measure(task, local, params[row], own, subject[row], job.norm.evaluation)

    reports = list(run(measured, range(len(orders))))
    columns = {name: np.array([report[name] for report in reports]) for name in reports[0]}
    return _reply(orders, Stack(report=columns), list(map(len, subject)))


def _calibrated(orders: Cohort, work: Iterable[tuple[int, Params, Params]], task: Task) -> Replies:
    """Return the normalisation statistics of devices, of which one without data has none."""
    local = task.blueprint.local(orders.slice_of(0))
    replies = []
    for order, (device, params, buffers) in zip(orders.rows(), work, strict=True):
        data = task.data(device)
        stack = Stack.of_one({"buffers": calibrate(local, params, buffers, data)})
        replies.append(_reply(order, stack, [len(data)]))
    return join(replies)


def _reply(orders: Cohort, stack: Stack, samples: Sequence[int]) -> Replies:
    """Return replies that are one stack; their bits are those of trees without a model."""
    bits = stack_extra_bits(stack, np.zeros(len(orders)), orders)
    counts = np.array(samples, dtype=np.int64)
    return _replies(orders, [np.arange(len(orders))], [stack], counts, bits)


def _replies(
    cohort: Cohort, rows: Sequence[Ints], stacks: Sequence[Stack], samples: Ints, bits: Floats
) -> Replies:
    """Return the replies to orders; each stack holds those of its rows, place by place."""
    count = len(cohort)
    index, place = np.zeros(count, dtype=np.int64), np.arange(count)
    for number, some in enumerate(rows if len(rows) > 1 else ()):
        index[some], place[some] = number, np.arange(len(some))
    return Replies(
        order=cohort.id,
        device=cohort.device,
        samples=samples,
        bits=bits,
        delivered_width=np.ones(count),
        stack_index=index,
        place=place,
        stacks=tuple(stacks),
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
    small = _own(kept, cohort, states, initial, task) if kept else {}
    if padded:
        # Padding (specification §1.8): columns that came through replace the device's own.
        part, local = within(slice_, width, blueprint), blueprint.local(slice_)
        return small | paste_stack(received, {n: small[n] for n in received}, part, local)
    return small | {name: _expanded(value, count) for name, value in received.items()}


def _own(
    names: Sequence[str], cohort: Cohort, states: DeviceStates, initial: Params, task: Task
) -> dict[str, Tensor]:
    """Return what devices with one slice have themselves of some tensors, [devices, …].

    Until a device has trained, its own is the `initial` model, with which all were installed.
    """
    blueprint, slice_ = task.blueprint, cohort.slice_of(0)
    theirs = states.own(names, cohort.device)
    installed = dense({n: initial[n] for n in names if n not in theirs}, slice_, blueprint)
    small = {
        name: value.contiguous() for name, value in cut_stack(theirs, slice_, blueprint).items()
    }
    return small | {name: _expanded(value, len(cohort)) for name, value in installed.items()}


def _expanded(value: Tensor, count: int) -> Tensor:
    return value.expand(count, *value.shape)


def _in_order(value: Tensor, order: Tensor) -> Tensor:
    return value.index_select(0, order.to(value.device))


def _apart(tree: Params, count: int) -> list[dict[str, Tensor]]:
    """Return the tensors of each of so many devices of a stack."""
    columns = [value.unbind() for value in tree.values()]
    rows = zip(*columns, strict=True) if columns else [()] * count
    return [dict(zip(tree, row, strict=True)) for row in rows]


def _alone(tree: Params) -> dict[str, Tensor]:
    return {name: value[0] for name, value in tree.items()}


# --- training -----------------------------------------------------------------------------------


def _prepared(cohorts: Sequence[Cohort], task: Task) -> list[Prepared]:
    """Return what the devices of stacks train with beside their models."""
    key = torch.cat([each.key for each in cohorts])
    with during("task", task):
        return prepare(
            task,
            np.concatenate([each.device for each in cohorts]),
            (key, rng.fold(key, "uplink")),
            join([each.hyperparameters for each in cohorts]),
            list(map(len, cohorts)),
        )


def launch(
    cohort: Cohort, given: Prepared, states: DeviceStates, task: Task, runner: Runner = train
) -> Launched:
    """Train devices with orders of equal shape, and compress their updates.

    Nothing here waits for an accelerator; `collect` does.
    """
    job = cohort.job
    context = training_context(task, job.norm, cohort.slice_of(0), float(cohort.width[0]))
    params, buffers = begin(cohort, states, task)
    inputs = _inputs(cohort, given, params, buffers, task)
    early = _early_masks(job.train, context, given.seen)
    variation = _variation(early)
    with during("train", job.train):
        result = runner(
            job.trainer,
            context,
            inputs,
            given.bounds,
            lift=lifted(len(cohort)),
            cohort_key=cohort.cohort_key,
        )
    caller = Caller("train", job.train, cohort.round_index)
    result = trained(result, caller, inputs.params, inputs.buffers)
    if len(cohort) == 1:
        result = TrainingResult(*({n: v[None] for n, v in tree.items()} for tree in result))
    if early:
        same_masks(early, result.mask, caller)
    names, statistics = _sent(context.blueprint, context.trained, job.norm)
    update = {name: result.params[name] for name in names}
    needed = job.send == "delta" or _NORM in job.report
    change = _minus(update, params) if needed else {}
    sent = change if job.send == "delta" else update
    compressed = _compressed(cohort, given, states, sent, result.mask, task)
    told = {name: result.buffers[name] for name in statistics}
    measured = reported(result.report, job)
    stack = Stack(
        trees={job.send: compressed.received} | ({"buffers": told} if told else {}),
        symbols=compressed.symbols,
        masks=result.mask,
        kept=compressed.kept,
    )
    return Launched(
        cohort,
        context,
        stack,
        {
            # Vectors that nobody asked for stay where they are.
            **{n: v for n, v in result.report.items() if v.ndim == 1 or n in measured},
            _MODEL: compressed.bits.double().sum(1),
            _DISTORTION: compressed.distortion,
            **({_MASKS: mask_variation(result.mask)} if result.mask and not early else {}),
            **({_NORM: _norms(change)} if _NORM in job.report else {}),
            # The server will ask for them: fetched with the others, they cost no wait of their own.
            **{_LENGTH + name: value for name, value in stack.lengths.items()},
        },
        [*measured, _DISTORTION, *((_NORM,) if _NORM in job.report else ())],
        [name for name, value in result.report.items() if value.ndim == 1],
        _keepsakes(cohort, context, result, compressed),
        given.counts,
        early or result.mask,
        variation,
    )


def _early_masks(train: Train, context: TrainingContext, seen: Tensor) -> Params:
    """Return the masks [devices, …] of results that labels decide; {} if there are none."""
    with during("train", train):
        first = train.mask(context, seen[0]) or {}
        if not first or len(seen) == 1 or not seen.stride(0):  # or all have the same labels
            return {name: _expanded(mask, len(seen)) for name, mask in first.items()}
        return torch.vmap(partial(train.mask, context))(seen) or {}


def _variation(early: Params) -> Transfer | None:
    """Send on its way along which dimensions masks vary; None without masks.

    Before training begins, so that whoever asks for it need not wait for that.
    """
    return Transfer(mask_variation(early).reshape(-1)) if early else None


@lru_cache(maxsize=4096)
def _sent(
    local: Blueprint, trained: tuple[str, ...], norm: Norm
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the parameters and of the statistics that leave the device.

    These are those that it trained, and the statistics of layers that it trained.
    """
    stays, travels = norm.stays(local), norm.travels(local)
    layers = [layer for layer in local.layers if set(trained) & set(layer.params)]
    statistics = tuple(n for layer in layers for n in layer.buffers if n in travels)
    return tuple(name for name in trained if name not in stays), statistics


def _minus(update: Params, params: Params) -> dict[str, Tensor]:
    """Return the change of all parameters, in one call."""
    if not update:
        return {}
    begun = [params[name] for name in update]
    found = torch._foreach_sub(list(update.values()), begun)  # noqa: SLF001 - it has no other name
    return dict(zip(update, found, strict=True))


def _inputs(cohort: Cohort, given: Prepared, params: Params, buffers: Params, task: Task) -> Inputs:
    """Return what devices train from, stacked; that of a single device is not."""
    samples = given.samples
    if samples is None:
        with during("task", task):
            samples = samples_of(task, cohort.device.tolist())
    x, y, rows, valid = samples
    asked, seen, key = given.hyperparameters, given.seen, given.key
    if len(cohort) > 1:
        return Inputs(params, buffers, x, y, valid, seen, key, asked, rows)
    alone = _alone(params), _alone(buffers), x, y, valid[0], seen[0], key[0], _alone(asked)
    return Inputs(*alone, rows[0])


def _compressed(
    cohort: Cohort, given: Prepared, states: DeviceStates, sent: Params, mask: Params, task: Task
) -> Compressed:
    """Return the updates of a stack as its uplink codec compresses them."""
    codec, like = cohort.job.uplink, next(iter(task.params.values()))
    if codec.state_name:
        return compress_updates(cohort, states, sent, mask, task)
    tensors = tensor_layouts(tuple(sent), cohort.slice_of(0), grid(cohort), task.blueprint)
    layout = MessageLayout(tensors, like.dtype, given.uplink_key)
    # What was not trained does not count, so it must not be sent.
    tree = {n: v * mask[n].to(v) if n in mask else v for n, v in sent.items()}
    caller = Caller("uplink", codec, cohort.round_index)
    return compress(tree, {}, given.sent_fraction, layout, caller)


def collect(
    cohort: Cohort, rows: Sequence[Ints], launched: Sequence[Launched], states: DeviceStates
) -> Finished:
    """Return the replies of devices that were trained in stacks, and what they keep.

    `rows` are the orders of the cohort that each stack carries out.
    """
    job, fetched = cohort.job, on_host([each.measured for each in launched])
    model, samples = np.empty(len(cohort)), np.empty(len(cohort), dtype=np.int64)
    stacks, masked = [], []
    chooser: list[ChooserState | None] = [None] * len(cohort)
    for some, each, found in zip(rows, launched, fetched, strict=True):
        model[some], samples[some] = found[_MODEL], each.samples
        lengths = found.named({name: _LENGTH + name for name in each.stack.lengths})
        report = found.named({name: name for name in each.reported})
        stacks.append(replace(each.stack, report=report, known_lengths=lengths))
        masked.append(_mask_bits(each, found))
        if learns(job.choose):
            measured = {name: found[name] for name in each.learned}
            after = learned(each.cohort, states, each.context, measured)
            for row, state in zip(some.tolist(), after, strict=True):
                chooser[row] = state
    countable(model, Caller("uplink", job.uplink, cohort.round_index))

    def beside(stacks: Sequence[Stack], masked: Sequence[Floats], kind: Kind) -> Floats:
        """Return the bits of replies beside their models, were the orders of this kind."""
        bits = np.empty(len(cohort))
        for some, each, stack, own in zip(rows, launched, stacks, masked, strict=True):
            bits[some] = stack_extra_bits(stack, own, each.cohort, kind)
        return bits

    held: Replies | None = None
    if cohort.kind == Kind.HOLD:
        # As it will be fetched: the report goes ahead of it.
        later = beside([replace(stack, report={}) for stack in stacks], masked, Kind.FETCH)
        held = _replies(cohort, rows, stacks, samples, model + later)
        brief = [Stack(report=requested(stack.report, job.report)) for stack in stacks]
        bits = beside(brief, [np.zeros(len(some)) for some in rows], cohort.kind)
        replies = _replies(cohort, rows, brief, samples, bits)
    else:
        bits = model + beside(stacks, masked, cohort.kind)
        replies = _replies(cohort, rows, stacks, samples, bits)
    remembered = Remembered.of(cohort, chooser=chooser, held=held)
    kept = tuple(each.kept for each in launched)
    if any(each.own or each.purpose for each in kept):
        index, place = replies.stack_index, replies.place
        remembered = remembered.having(stacks=kept, stack_index=index, place=place)
    return Finished(replies, remembered)


def _mask_bits(launched: Launched, found: Mapping[str, NDArray[Any]]) -> Floats:
    """Return the bits of the masks of every device of a stack."""
    known, count = launched.variation, len(launched.cohort)
    if not launched.masks:
        return np.zeros(count)
    variation = found[_MASKS] if known is None else known.values().reshape(count, -1)
    return stacked_mask_bits(launched.masks, variation)


def _norms(change: Params) -> Tensor:
    """Return the Euclidean norm of the update of every device, before compression."""
    norms = [
        torch.linalg.vector_norm(value.flatten(1), dim=1, dtype=torch.float64)
        for value in change.values()
    ]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), dim=0)
    return total


def _keepsakes(
    cohort: Cohort, context: TrainingContext, result: TrainingResult, compressed: Compressed
) -> Keepsakes:
    """Return what devices keep of their tensors.

    That is their model if the method caches it, what never leaves it, and what a codec owes.
    """
    job, mask, everything = cohort.job, result.mask, {**result.params, **result.buffers}
    stays = job.norm.stays(context.blueprint)
    own = everything if job.cache else {name: everything[name] for name in stays}
    purpose = job.uplink.state_name
    if not purpose:
        return Keepsakes(job.norm, own)
    sent = {n: v * mask[n].to(v) if n in mask else v for n, v in compressed.received.items()}
    return Keepsakes(job.norm, own, purpose, compressed.state, sent)
