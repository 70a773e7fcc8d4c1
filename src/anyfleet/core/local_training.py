"""Local training of one device, or of a stack of devices of equal shape: the same code for both.

A stack is padded to its largest member and masked, so that a device's result does not depend on who
ran with it. `lift` is the identity for one device and `torch.func.vmap` for a stack. Where samples
see each other (`padding.mixed`) nothing is padded, so that devices are trained one at a time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_map

from anyfleet import rng
from anyfleet.core.messages import EVERYTHING, Hyperparameters, Params
from anyfleet.core.objectives import Data, Task, augmented
from anyfleet.core.padding import mixed
from anyfleet.core.slots import (
    Minibatch,
    Norm,
    Train,
    TrainingContext,
    TrainingResult,
    TrainingStart,
    TrainingState,
)
from anyfleet.elastic import Slice
from anyfleet.errors import BadReturn
from anyfleet.tracebacks import quoted

Lift = Callable[[Callable[..., Any]], Callable[..., Any]]


class Inputs(NamedTuple):
    """What training starts from, one device or stacked."""

    params: Params
    buffers: Params
    x: Tensor
    y: Tensor
    valid: Tensor
    seen: Tensor  # labels that occur in the device's data
    key: Tensor
    hyperparameters: dict[str, Tensor]


@dataclass(frozen=True)
class Extent:
    """Static loop bounds of a stack: those of its largest member."""

    local_steps: int
    shared_steps: int  # so many steps nobody has finished before
    epochs: int
    batch_size: int  # samples per minibatch


def training_context(task: Task, norm: Norm, slice_: Slice, share: float = 1.0) -> TrainingContext:
    """The site of every order with a slice of this shape, planned with this share."""
    trained = tuple(n for n in slice_.sent(task.blueprint) if n not in task.blueprint.frozen)
    return TrainingContext(task.blueprint.local(slice_), trained, norm, task, share)


def local_steps(numbers: Hyperparameters, samples: Sequence[int]) -> list[int]:
    """Local steps of each device: its epochs over its data, within its own limit."""
    found = []
    for row, n in enumerate(samples):
        own = int(numbers.epochs[row]) * -(-n // int(numbers.batch_size[row]))
        most = int(numbers.local_steps[row])
        # A fixed number of iterations is given as a limit with epochs = EVERYTHING.
        if numbers.epochs[row] == EVERYTHING:
            own = most if n else 0
        found.append(own if most == EVERYTHING else min(own, most))
    return found


def samples_processed(limit: int, samples: int, batch: int) -> int:
    """Samples used in `limit` steps; the last batch of an epoch may be short."""
    per_epoch = max(1, -(-samples // batch))
    return (limit // per_epoch) * samples + min((limit % per_epoch) * batch, samples)


def extent(numbers: Hyperparameters, samples: Sequence[int]) -> Extent:
    """Bounds that hold for every device of the stack."""
    steps = local_steps(numbers, samples)
    per_epoch = [max(1, -(-n // int(b))) for n, b in zip(samples, numbers.batch_size, strict=True)]
    epochs = max(-(-s // e) for s, e in zip(steps, per_epoch, strict=True))
    width = min(max(int(b) for b in numbers.batch_size), max(1, *samples))
    return Extent(max(steps), min(steps), max(1, epochs), width)


def as_tensors(numbers: Hyperparameters, samples: Sequence[int], like: Tensor) -> dict[str, Tensor]:
    """The numbers of a stack, where and in the precision in which the model is."""
    return {
        "lr": torch.tensor(numbers.lr).to(like),
        "sent_fraction": torch.tensor(numbers.sent_fraction).to(like),
        "batch_size": torch.tensor(numbers.batch_size, device=like.device),
        "local_steps": torch.tensor(local_steps(numbers, samples), device=like.device),
    }


def train(
    trainer: Train,
    where: TrainingContext,
    inputs: Inputs,
    bounds: Extent,
    *,
    lift: Lift,
    cohort: int,
) -> TrainingResult:
    """Runs the trainer over the device's minibatches."""
    order = partial(_schedule, bounds=bounds)
    rows, valid, keys = lift(order)(inputs.key, inputs.valid, inputs.hyperparameters["batch_size"])
    given = TrainingStart(inputs.params, inputs.buffers, inputs.seen)
    state = lift(partial(trainer.start, where))(given)
    choices = trainer.shared_draws(torch.tensor(cohort), bounds.local_steps)
    drawn = zip(rows.unbind(-2), valid.unbind(-2), keys.unbind(-1), strict=True)
    alone = _counts(where, valid)
    for i, batch in enumerate(map(_Drawn._make, drawn)):
        # The guard holds the old state beside the new one: a device alone never needs it.
        one = partial(
            _stepped if i < bounds.shared_steps else _guarded, trainer, where, i, choices[i]
        )
        state = lift(one)(state, inputs, batch.only(alone[i]) if alone else batch)
    result: TrainingResult = lift(partial(_finished, trainer, where))(state)
    # Layers that are not trained run in training mode but keep their statistics (specification §1.3).
    layers = where.blueprint.layers
    own = {n for layer in layers if set(layer.params) & set(where.trained) for n in layer.buffers}
    kept = {n: v if n in own else inputs.buffers[n] for n, v in result.buffers.items()}
    return result._replace(buffers=kept)


def lifted(count: int) -> Lift:
    """How to run functions of one device on `count` of them."""
    return (lambda function: function) if count == 1 else vmap


class _Drawn(NamedTuple):
    """Rows [steps, width] of every minibatch, which of them are real, and the keys [steps].

    All at once: hashing key by key takes as long as a small network.
    """

    rows: Tensor
    valid: Tensor
    key: Tensor

    def only(self, count: int) -> "_Drawn":
        """Return the first rows of a minibatch: padding comes last."""
        return _Drawn(self.rows[:count], self.valid[:count], self.key)


def _counts(where: TrainingContext, valid: Tensor) -> list[int]:
    """Return the samples of every step, if the network may not see anything else; else nothing."""
    reason = mixed(where.task)
    if not reason:
        return []
    if valid.ndim > 2:
        raise ValueError(f"These devices cannot be stacked: {reason}. Train one at a time.")
    counts: list[int] = valid.sum(-1).tolist()
    return counts


def _schedule(key: Tensor, valid: Tensor, batch: Tensor, bounds: Extent) -> _Drawn:
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
    where: TrainingContext,
    i: int,
    choice: Any,
    state: TrainingState,
    inputs: Inputs,
    drawn: _Drawn,
) -> TrainingState:
    """One step."""
    rows, valid, key = drawn
    x, y = inputs.x.index_select(0, rows), inputs.y.index_select(0, rows)
    x = augmented(where.task, x, rng.fold(key, "augment")) if where.task.augment else x
    batch = Minibatch(x, y, valid, key, i)
    return trainer.step(where, state, batch, inputs.hyperparameters, choice)


def _finished(trainer: Train, where: TrainingContext, state: TrainingState) -> TrainingResult:
    """What training leaves behind; looked at here, as a stack can only be made of such."""
    found: Any = trainer.finish(where, state)
    if not isinstance(found, TrainingResult):
        train = quoted(trainer)
        raise BadReturn(
            f"train={train} returned {type(found).__name__} from `finish`; due is "
            "anyfleet.core.slots.Result."
        )
    return found


def _guarded(
    trainer: Train,
    where: TrainingContext,
    i: int,
    choice: Any,
    state: TrainingState,
    inputs: Inputs,
    drawn: _Drawn,
) -> TrainingState:
    """One step, undone where the device has already finished: no branching on values."""
    new = _stepped(trainer, where, i, choice, state, inputs, drawn)
    live = i < inputs.hyperparameters["local_steps"]
    kept: TrainingState = tree_map(
        lambda a, b: a if a is b else torch.where(live, a, b), new, state
    )
    return kept


def pad(data: Sequence[Data]) -> tuple[Tensor, Tensor, Tensor]:
    """Stacks samples of several devices: x, y and which rows are real."""
    most = max(1, *(len(d) for d in data))
    x = _stack([_lengthen(d.x, most) for d in data])
    y = _stack([_lengthen(d.y, most) for d in data])
    sizes = torch.tensor([len(d) for d in data], device=x.device)
    return x, y, torch.arange(most, device=x.device) < sizes[:, None]


def _stack(tensors: list[Tensor]) -> Tensor:
    """A device alone needs no second copy of its data."""
    return tensors[0][None] if len(tensors) == 1 else torch.stack(tensors)


def _lengthen(rows: Tensor, count: int) -> Tensor:
    """Pad by repeating the last row: zeros may have no gradient, and NaN × 0 is NaN."""
    if len(rows) == count:
        return rows
    shape = (count - len(rows), *rows.shape[1:])
    return torch.cat([rows, rows[-1:].expand(shape) if len(rows) else rows.new_zeros(shape)])
