"""Local training of one device, or of a stack of devices of equal shape, by the same code.

A stack is padded to its largest device and masked, so that a device's result does not depend on who
else is in it. `lift` is the identity for one device and `torch.func.vmap` for a stack. Where
samples see each other (`padding.unpaddable`) nothing is padded, so that devices are trained one at
a time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import groupby
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_map

from anyfleet import rng
from anyfleet.arrays import Ints
from anyfleet.core.messages import Hyperparameters, Params
from anyfleet.core.objectives import Data, Task, augmented
from anyfleet.core.once_per_task import OncePerTask
from anyfleet.core.padding import unpaddable
from anyfleet.core.slots import (
    Minibatch,
    Norm,
    Train,
    TrainingContext,
    TrainingResult,
    TrainingStart,
    TrainingState,
)
from anyfleet.core.time_and_energy import processed, steps_of
from anyfleet.elastic import Blueprint, Slice
from anyfleet.errors import BadReturn
from anyfleet.tracebacks import quoted

Lift = Callable[[Callable[..., Any]], Callable[..., Any]]


class Inputs(NamedTuple):
    """What training starts from, of one device or stacked."""

    params: Params
    buffers: Params
    x: Tensor
    y: Tensor
    valid: Tensor
    seen: Tensor  # labels that occur in the device's data
    key: Tensor
    hyperparameters: dict[str, Tensor]
    # Where the samples lie in x and y, if these hold those of all devices, row by row; None where
    # they are the device's own, [samples, …], or stacked.
    rows: Tensor | None = None


@dataclass(frozen=True)
class Extent:
    """The loop bounds of a stack: those of its largest device."""

    local_steps: int
    shared_steps: int  # local steps that every device performs
    epochs: int
    batch_size: int  # rows of a minibatch, with padding


def training_context(task: Task, norm: Norm, slice_: Slice, width: float = 1.0) -> TrainingContext:
    """Return the context of every order with a slice of this shape, planned with this width."""
    return TrainingContext(*_sub_model(slice_, task.blueprint), norm, task, width)


@lru_cache(maxsize=4096)
def _sub_model(slice_: Slice, blueprint: Blueprint) -> tuple[Blueprint, tuple[str, ...]]:
    """Return the blueprint of a slice, and the names of the parameters that training changes."""
    return blueprint.local(slice_), slice_.sent(blueprint)


def local_steps(hyperparameters: Hyperparameters, samples: Sequence[int]) -> list[int]:
    """Return the local steps of each device: its epochs over its data, within its own limit."""
    steps: list[int] = steps_of(hyperparameters, np.array(samples)).tolist()
    return steps


def samples_processed(local_steps: int, samples: int, batch_size: int) -> int:
    """Return the samples used in so many local steps; the last of an epoch may have fewer."""
    return int(processed(np.array(local_steps), np.array(samples), np.array(batch_size)))


def extent(hyperparameters: Hyperparameters, samples: Sequence[int]) -> Extent:
    """Return the loop bounds of devices with so many samples, in one stack."""
    steps = steps_of(hyperparameters, np.array(samples))
    return _extents(steps, hyperparameters.batch_size, np.array(samples), np.zeros(1, np.int64))[0]


def _extents(steps: Ints, batch: Ints, samples: Ints, begins: Ints) -> list[Extent]:
    """Return the loop bounds of stacks that begin at these rows."""
    epochs = -(-steps // np.maximum(1, -(-samples // batch)))
    most = (np.maximum.reduceat(column, begins) for column in (steps, epochs, batch, samples))
    least = np.minimum.reduceat(steps, begins).tolist()
    return [
        Extent(steps, shared, max(1, epochs), min(batch, max(1, size)))
        for steps, epochs, batch, size, shared in zip(
            *(column.tolist() for column in most), least, strict=True
        )
    ]


def as_tensors(
    hyperparameters: Hyperparameters, samples: Sequence[int], like: Tensor
) -> dict[str, Tensor]:
    """Return hyperparameters as tensors, on the device and in the precision of the model."""
    steps = steps_of(hyperparameters, np.array(samples))
    # Rows that have one type travel to the device of the model together.
    numbers = torch.from_numpy(np.array([hyperparameters.lr, hyperparameters.sent_fraction]))
    counts = torch.from_numpy(np.array([hyperparameters.batch_size, steps]))
    lr, sent_fraction = numbers.to(like).unbind()
    return _named(lr, sent_fraction, *counts.to(like.device).unbind())


def _named(
    lr: Tensor, sent_fraction: Tensor, batch_size: Tensor, local_steps: Tensor
) -> dict[str, Tensor]:
    """Return hyperparameters by the names under which trainers know them."""
    return {
        "lr": lr,
        "sent_fraction": sent_fraction,
        "batch_size": batch_size,
        "local_steps": local_steps,
    }


def train(
    trainer: Train,
    context: TrainingContext,
    inputs: Inputs,
    bounds: Extent,
    *,
    lift: Lift,
    cohort_key: int,
) -> TrainingResult:
    """Return the result of running a trainer over the minibatches of one device, or of a stack.

    `lift` maps a function of one device over all of a stack; `cohort_key` addresses the draws that
    a cohort shares.
    """
    draws = trainer.shared_draws(bounds.local_steps, torch.tensor(cohort_key))
    return train_with(draws, trainer, context, inputs, bounds, lift=lift)


def train_with(
    draws: Sequence[Any],
    trainer: Train,
    context: TrainingContext,
    inputs: Inputs,
    bounds: Extent,
    *,
    lift: Lift,
    lift_step: Lift | None = None,
) -> TrainingResult:
    """Return what `train` does, given the draws of every local step that a cohort shares.

    `lift_step` maps a local step, as `lift` does unless it is given. Nothing here waits for the
    device that computes, nor copies anything to it, unless the trainer does or no padding may be
    there.
    """
    given = inputs.hyperparameters
    order = partial(_schedule, bounds=bounds)
    places, valid, keys = lift(order)(inputs.key, inputs.valid, given["batch_size"])
    x, y, rows = _flat(inputs)
    places = rows.gather(-1, places.flatten(-2)).view_as(places)
    begun = TrainingStart(inputs.params, inputs.buffers, inputs.seen)
    state = lift(partial(trainer.start, context))(begun)
    drawn = zip(places.unbind(-2), valid.unbind(-2), keys.unbind(-1), strict=True)
    alone = _counts(context, valid)
    # A CUDA graph has places of its own for what its steps read and leave.
    writing = _advanced if valid.device.type == "cpu" else _stepped
    for i, batch in enumerate(map(_Drawn._make, drawn)):
        # The guard holds the old state beside the new one: a device alone never needs it.
        step = _guarded if i >= bounds.shared_steps else writing if i else _stepped
        rows, *drawn_with = batch.only(alone[i]) if alone else batch
        # Outside the map: samples of all devices are copied once, and only those of this step.
        samples, targets = _taken(x, rows), _taken(y, rows)
        if context.task.augment:
            samples = lift(partial(_augmented, context.task))(samples, drawn_with[-1])
        for substep in trainer.substeps(context, draws[i]):
            one = (lift_step or lift)(partial(step, trainer, context, i, substep))
            state = one(state, samples, targets, *drawn_with, given)
        del samples, targets  # before those of the next step are there
    result: TrainingResult = lift(partial(_finished, trainer, context))(state)
    # Layers that are not trained run in training mode but keep their statistics (§1.3).
    layers = context.blueprint.layers
    own = {n for layer in layers if set(layer.params) & set(context.trained) for n in layer.buffers}
    kept = {n: v if n in own else inputs.buffers[n] for n, v in result.buffers.items()}
    return result._replace(buffers=kept)


def _flat(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return all samples and targets, row by row, and in which rows those of each device lie."""
    x, y, valid = inputs.x, inputs.y, inputs.valid
    if inputs.rows is not None:
        return x, y, inputs.rows
    rows = torch.arange(valid.numel(), device=valid.device).view_as(valid)
    stacked = valid.ndim > 1
    return (x.flatten(0, 1), y.flatten(0, 1), rows) if stacked else (x, y, rows)


def _taken(samples: Tensor, rows: Tensor) -> Tensor:
    """Return the samples in those rows, [rows, …] or [devices, rows, …]."""
    if rows.ndim == 1:
        return samples.index_select(0, rows)
    return samples.index_select(0, rows.flatten()).reshape(*rows.shape, *samples.shape[1:])


def lifted(count: int) -> Lift:
    """Return what maps a function of one device over `count` of them."""
    return (lambda function: function) if count == 1 else vmap


class _Drawn(NamedTuple):
    """Rows [steps, batch size] of every minibatch, which of them are valid, and keys [steps].

    All at once: hashing key by key takes as long as a small network.
    """

    rows: Tensor
    valid: Tensor
    key: Tensor

    def only(self, count: int) -> "_Drawn":
        """Return the first rows of a minibatch: padding comes last."""
        return _Drawn(self.rows[:count], self.valid[:count], self.key)


def _counts(context: TrainingContext, valid: Tensor) -> list[int]:
    """Return the number of samples of every step if no padding may be there, or []."""
    reason = unpaddable(context.task)
    if not reason:
        return []
    if valid.ndim > 2:
        raise ValueError(f"These devices cannot be stacked: {reason}. Train one at a time.")
    counts: list[int] = valid.sum(-1).tolist()
    return counts


def _schedule(key: Tensor, valid: Tensor, batch: Tensor, bounds: Extent) -> _Drawn:
    """Return which samples a device sees in which step: every epoch shuffles them anew."""
    epochs = rng.fold(rng.fold(key, "order"), torch.arange(bounds.epochs, device=key.device))
    orders = torch.stack([rng.permutation(epoch, valid) for epoch in epochs.unbind(-1)])
    count = valid.sum()
    per_epoch = ((count + batch - 1) // batch).clamp(min=1)
    step = torch.arange(bounds.local_steps, device=valid.device)
    column = torch.arange(bounds.batch_size, device=valid.device)
    epoch = (step // per_epoch).clamp(max=bounds.epochs - 1)
    position = (step % per_epoch)[:, None] * batch + column
    real = (column < batch) & (position < count)
    rows = orders[epoch[:, None], position.clamp(max=valid.shape[0] - 1)]
    return _Drawn(rows, real, rng.fold(rng.fold(key, "step"), step))


def _augmented(task: Task, x: Tensor, key: Tensor) -> Tensor:
    """Return the samples of a local step as its key varies them."""
    return augmented(task, x, rng.fold(key, "augment"))


def _advanced(
    trainer: Train,
    context: TrainingContext,
    i: int,
    substep: Any,
    state: TrainingState,
    x: Tensor,
    y: Tensor,
    valid: Tensor,
    key: Tensor,
    hyperparameters: Mapping[str, Tensor],
) -> TrainingState:
    """Return the state after a substep, which may be written over the given one."""
    return trainer.advance(context, state, Minibatch(x, y, valid, key, i), hyperparameters, substep)


def _stepped(
    trainer: Train,
    context: TrainingContext,
    i: int,
    substep: Any,
    state: TrainingState,
    x: Tensor,
    y: Tensor,
    valid: Tensor,
    key: Tensor,
    hyperparameters: Mapping[str, Tensor],
) -> TrainingState:
    """Return the state after a substep of a local step."""
    return trainer.substep(context, state, Minibatch(x, y, valid, key, i), hyperparameters, substep)


def _finished(trainer: Train, context: TrainingContext, state: TrainingState) -> TrainingResult:
    """Return the result of training; checked here, as a stack can only be made of such."""
    found: Any = trainer.finish(context, state)
    if not isinstance(found, TrainingResult):
        train = quoted(trainer)
        raise BadReturn(
            f"train={train} returned {type(found).__name__} from `finish`; due is "
            "anyfleet.core.slots.TrainingResult."
        )
    return found


def _guarded(
    trainer: Train,
    context: TrainingContext,
    i: int,
    substep: Any,
    state: TrainingState,
    x: Tensor,
    y: Tensor,
    valid: Tensor,
    key: Tensor,
    hyperparameters: Mapping[str, Tensor],
) -> TrainingState:
    """Return the state after a substep; unchanged if the device has already finished.

    Without branching on values, which a stack could not do. What only later substeps of the same
    step need was not there before, and does not matter to a device that has finished.
    """
    new = _stepped(trainer, context, i, substep, state, x, y, valid, key, hyperparameters)
    working = i < hyperparameters["local_steps"]

    def chosen(after: Tensor, before: Tensor) -> Tensor:
        return after if after is before else torch.where(working, after, before)

    return {
        name: tree_map(chosen, value, state[name]) if name in state else value
        for name, value in new.items()
    }


class Samples(NamedTuple):
    """The samples of several devices: all that are resident, and each device's rows of them.

    `valid` marks the rows that are not padding.
    """

    x: Tensor
    y: Tensor
    rows: Tensor
    valid: Tensor


@runtime_checkable
class Resident(Protocol):
    """A task whose devices have rows of one table of samples, so that nothing need be copied."""

    @property
    def train(self) -> Data:
        """The samples of all devices."""

    @property
    def train_rows(self) -> Sequence[Tensor]:
        """The rows of each device."""


class Prepared(NamedTuple):
    """What the devices of a stack train with beside their models, where training computes."""

    samples: Samples | None  # None: they are not resident, and joined when the stack is trained
    seen: Tensor  # labels that occur in the data of each device
    key: Tensor
    uplink_key: Tensor
    hyperparameters: dict[str, Tensor]
    sent_fraction: Tensor  # in double precision, for the codec
    bounds: Extent
    counts: Ints  # of samples


def prepare(
    task: Task,
    devices: Ints,
    keys: tuple[Tensor, Tensor],
    hyperparameters: Hyperparameters,
    stacks: list[int],
) -> list[Prepared]:
    """Return what stacks of so many devices train with; it travels to an accelerator at once.

    Rows of a stack lie together. `keys` are those of the orders and those of their uplinks.
    """
    like, begins = next(iter(task.params.values())), np.cumsum([0, *stacks[:-1]])
    counts, batch = sizes_of(task)[devices], hyperparameters.batch_size
    steps = steps_of(hyperparameters, counts)
    whole = np.array([batch, steps, *(key.numpy() for key in keys)], dtype=np.int64)
    real = np.array([hyperparameters.lr, hyperparameters.sent_fraction], dtype=np.float64)
    table = _table(task)
    places = np.empty((0, len(devices)), dtype=np.int64) if table is None else table.places(devices)
    # Numbers of both types go in one transfer, as the bits that they are; nobody waits for it.
    numbers = torch.from_numpy(np.concatenate([whole, real.view(np.int64), places]))
    there = numbers.to(like.device, non_blocking=True)
    exact = there[4:6].view(torch.float64)
    most = np.maximum.reduceat(counts, begins).tolist()
    each = zip(
        _padded(table, there[6:], stacks, most) if table else [None] * len(stacks),
        _stacked([task.labels(device) for device in devices.tolist()]).split_with_sizes(stacks),
        there[:4].split_with_sizes(stacks, 1),
        exact.to(like.dtype).split_with_sizes(stacks, 1),
        exact[1].split_with_sizes(stacks),
        _extents(steps, batch, counts, begins),
        np.split(counts, begins[1:]),
        strict=True,
    )
    found = []
    for samples, seen, own, rounded, asked, bounds, count in each:
        batch_size, most_steps, key, uplink_key = own.unbind()
        lr, sent_fraction = rounded.unbind()
        given = _named(lr, sent_fraction, batch_size, most_steps)
        found.append(Prepared(samples, seen, key, uplink_key, given, asked, bounds, count))
    return found


def _stacked(labels: list[Tensor]) -> Tensor:
    """Return tensors as a stack; one that all devices share is expanded."""
    if all(each is labels[0] for each in labels):
        return labels[0].expand(len(labels), *labels[0].shape)
    return torch.stack(labels)


def samples_of(task: Task, devices: Sequence[int]) -> Samples:
    """Return the samples of some devices, padded to the largest of them.

    Padding repeats the last row of a device: zeros may have no gradient, and NaN × 0 is NaN.
    """
    table = _table(task)
    some = np.asarray(devices)
    if table is None:
        table, some = _joined(task, devices), np.arange(len(devices))
    places = torch.from_numpy(table.places(some)).to(table.x.device)
    return _padded(table, places, [len(some)], [int(table.sizes[some].max())])[0]


class _Rows(NamedTuple):
    """Samples, and the rows of devices: one device after the other, with begins and sizes."""

    x: Tensor
    y: Tensor
    rows: Tensor
    begins: Ints
    sizes: Ints

    def places(self, devices: Ints) -> Ints:
        """Return where the rows of devices begin, where the last one is, and how many they are."""
        begin, size = self.begins[devices], self.sizes[devices]
        # A device without samples has whatever row is there: all of it is padding.
        last = np.minimum(begin + np.maximum(size, 1), len(self.rows)) - 1
        return np.array([begin, last, size])


def _padded(
    table: _Rows, places: Tensor, stacks: Sequence[int], most: Sequence[int]
) -> list[Samples]:
    """Return the samples of stacks of so many devices, of which the largest have `most`.

    Stacks that are next to each other and equally wide are made at once.
    """
    found: list[Samples] = []
    end = 0
    for width, run in groupby(zip(stacks, most, strict=True), key=lambda stack: max(1, stack[1])):
        sizes = [count for count, _ in run]
        begin, end = end, end + sum(sizes)
        first, last, size = places[:, begin:end].unsqueeze(-1).unbind()
        place = torch.arange(width, device=places.device)
        at = torch.minimum(first + place, last)
        rows = table.rows.index_select(0, at.flatten()).view_as(at)
        pairs = zip(
            rows.split_with_sizes(sizes), (place < size).split_with_sizes(sizes), strict=True
        )
        found += [Samples(table.x, table.y, *pair) for pair in pairs]
    return found


@OncePerTask
def _table(task: Task) -> _Rows | None:
    """Return the rows of all devices beside the samples, or None if these are not resident."""
    if not isinstance(task, Resident):
        return None
    own = [*task.train_rows]
    return _rows(task.train.x, task.train.y, torch.cat(own), [len(each) for each in own])


def _joined(task: Task, devices: Sequence[int]) -> _Rows:
    """Return the samples of some devices as one table."""
    data = [task.data(device) for device in devices]
    x, y = torch.cat([each.x for each in data]), torch.cat([each.y for each in data])
    return _rows(x, y, torch.arange(len(x)), [len(each) for each in data])


def _rows(x: Tensor, y: Tensor, rows: Tensor, sizes: list[int]) -> _Rows:
    if not len(rows):
        # Without any sample there still has to be a row, for padding.
        rows = rows.new_zeros(1)
        x, y = (t if len(t) else t.new_zeros((1, *t.shape[1:])) for t in (x, y))
    count = np.array(sizes, dtype=np.int64)
    return _Rows(x, y, rows.to(x.device), np.cumsum(count) - count, count)


@OncePerTask
def sizes_of(task: Task) -> Ints:
    """Return the number of training samples of every device, counted once for a task."""
    return np.array([task.size(device) for device in range(task.devices)], dtype=np.int64)
