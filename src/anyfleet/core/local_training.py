"""Local training of one device, or of a stack of devices of equal shape, by the same code.

A stack is padded to its largest device and masked, so that a device's result does not depend on who
else is in it. `lift` is the identity for one device and `torch.func.vmap` for a stack. Where
samples see each other (`padding.unpaddable`) nothing is padded, so that devices are trained one at
a time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
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
from anyfleet.core.time_and_energy import TrainingAmounts, processed
from anyfleet.elastic import Slice
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
    trained = tuple(n for n in slice_.sent(task.blueprint) if n not in task.blueprint.frozen)
    return TrainingContext(task.blueprint.local(slice_), trained, norm, task, width)


def local_steps(hyperparameters: Hyperparameters, samples: Sequence[int]) -> list[int]:
    """Return the local steps of each device: its epochs over its data, within its own limit."""
    steps: list[int] = TrainingAmounts.of(hyperparameters, np.array(samples)).local_steps.tolist()
    return steps


def samples_processed(local_steps: int, samples: int, batch_size: int) -> int:
    """Return the samples used in so many local steps; the last of an epoch may have fewer."""
    return int(processed(np.array(local_steps), np.array(samples), np.array(batch_size)))


def extent(hyperparameters: Hyperparameters, samples: Sequence[int]) -> Extent:
    """Return the loop bounds of devices with so many samples, in one stack."""
    steps, batch = np.array(local_steps(hyperparameters, samples)), hyperparameters.batch_size
    per_epoch = np.maximum(1, -(-np.array(samples) // batch))
    epochs = int((-(-steps // per_epoch)).max())
    rows = min(int(batch.max()), max(1, *samples))
    return Extent(int(steps.max()), int(steps.min()), max(1, epochs), rows)


def as_tensors(
    hyperparameters: Hyperparameters, samples: Sequence[int], like: Tensor
) -> dict[str, Tensor]:
    """Return hyperparameters as tensors, on the device and in the precision of the model."""
    steps = TrainingAmounts.of(hyperparameters, np.array(samples)).local_steps
    # Rows that have one type travel to the device of the model together.
    numbers = torch.from_numpy(np.array([hyperparameters.lr, hyperparameters.sent_fraction]))
    counts = torch.from_numpy(np.array([hyperparameters.batch_size, steps]))
    lr, sent_fraction = numbers.to(like).unbind()
    batch_size, most = counts.to(like.device).unbind()
    return {
        "lr": lr,
        "sent_fraction": sent_fraction,
        "batch_size": batch_size,
        "local_steps": most,
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
    for i, batch in enumerate(map(_Drawn._make, drawn)):
        # The guard holds the old state beside the new one: a device alone never needs it.
        one = partial(
            _stepped if i < bounds.shared_steps else _guarded, trainer, context, i, draws[i]
        )
        rows, *drawn_with = batch.only(alone[i]) if alone else batch
        # Outside the map: samples of all devices are copied once, and only those of this step.
        step = (lift_step or lift)(one)
        state = step(state, _taken(x, rows), _taken(y, rows), *drawn_with, given)
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


def _stepped(
    trainer: Train,
    context: TrainingContext,
    i: int,
    draw: Any,
    state: TrainingState,
    x: Tensor,
    y: Tensor,
    valid: Tensor,
    key: Tensor,
    hyperparameters: Mapping[str, Tensor],
) -> TrainingState:
    """Return the state after one local step."""
    x = augmented(context.task, x, rng.fold(key, "augment")) if context.task.augment else x
    return trainer.step(context, state, Minibatch(x, y, valid, key, i), hyperparameters, draw)


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
    draw: Any,
    state: TrainingState,
    x: Tensor,
    y: Tensor,
    valid: Tensor,
    key: Tensor,
    hyperparameters: Mapping[str, Tensor],
) -> TrainingState:
    """Return the state after one local step; unchanged if the device has already finished.

    Without branching on values, which a stack could not do.
    """
    new = _stepped(trainer, context, i, draw, state, x, y, valid, key, hyperparameters)
    working = i < hyperparameters["local_steps"]
    kept: TrainingState = tree_map(
        lambda a, b: a if a is b else torch.where(working, a, b), new, state
    )
    return kept


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


def samples_of(task: Task, devices: Sequence[int]) -> Samples:
    """Return the samples of some devices, padded to the largest of them.

    Padding repeats the last row of a device: zeros may have no gradient, and NaN × 0 is NaN.
    """
    table = _table(task)
    x, y, rows, begins, sizes = table or _joined(task, devices)
    some = np.asarray(devices) if table else np.arange(len(devices))
    most = max(1, int(sizes[some].max()))
    columns = torch.from_numpy(np.array([begins[some], sizes[some]])).to(x.device)
    begin, size = columns.unsqueeze(-1).unbind(0)
    place = torch.arange(most, device=x.device)
    last = torch.minimum(place, (size - 1).clamp(min=0))
    # A device without samples has whatever row is there: all of it is padding.
    own = rows.index_select(0, (begin + last).clamp(max=len(rows) - 1).flatten())
    return Samples(x, y, own.view_as(last), place < size)


class _Rows(NamedTuple):
    """Samples, and the rows of devices: one device after the other, with begins and sizes."""

    x: Tensor
    y: Tensor
    rows: Tensor
    begins: Ints
    sizes: Ints


@lru_cache(maxsize=4)
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


@lru_cache(maxsize=1)
def sizes_of(task: Task) -> Ints:
    """Return the number of training samples of every device, counted once for a task."""
    return np.array([task.size(device) for device in range(task.devices)], dtype=np.int64)
