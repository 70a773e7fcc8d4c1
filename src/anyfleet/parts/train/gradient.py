"""Plain local training: minibatch gradients, one optimiser, the options of the first methods."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch._C import _functorch
from torch.func import vjp
from torch.utils._pytree import tree_map

from anyfleet import rng
from anyfleet.arrays import Ints
from anyfleet.core.messages import EVERYTHING, Hyperparameters, Params
from anyfleet.core.objectives import Task, losses
from anyfleet.core.slots import (
    Loose,
    Minibatch,
    Train,
    TrainingContext,
    TrainingResult,
    TrainingStart,
)
from anyfleet.core.time_and_energy import Work
from anyfleet.elastic import Blueprint, Priced, apply
from anyfleet.elastic.execution.random_operators import is_random
from anyfleet.papers import FEDDROP, FEDPROX, HETEROFL, Paper
from anyfleet.parts.train.inverted import inverted
from anyfleet.parts.train.learning_rates import Decaying, LearningRate
from anyfleet.parts.train.optimisers import Optimiser, Sgd, clipped

FLOAT_BYTES = 4
UPDATE_PASSES = 5  # lr × g: read, write; p − step: read both, write
_TEMPORARY = 2  # copies of one parameter, while an optimiser calculates its new value
Besides = TypeVar("Besides")


class Slope(NamedTuple):
    """What a pass over a minibatch found."""

    gradients: Params
    loss: Tensor  # mean over the valid samples
    buffers: Params  # after the pass


@dataclass(frozen=True)
class Gradient(Train):
    """Epochs of minibatch gradient descent, or a fixed number of iterations.

    `proximal` pulls towards the received model (FedProx, specification §1.2). Three are HeteroFL's
    (§1.5): `masked` sets training logits of locally absent classes to zero, `label_rows` reports
    the classifier rows of absent classes as not trained, `scaler` divides the output of cut layers
    that a normalisation follows by their share. `inverted` (FedDrop, §1.4) divides what the next
    layers take in from cut layers by the share of these, as inverted dropout does.
    """

    lr: LearningRate = field(default_factory=Decaying)
    optimiser: Optimiser = field(default_factory=Sgd)
    epochs: int = 1
    local_steps: int | None = None
    batch_size: int = 32
    clip: float | None = None
    proximal: float = 0.0
    masked: bool = False
    label_rows: bool = False
    scaler: bool = False
    inverted: bool = False

    def __post_init__(self) -> None:
        for name, value in (("epochs", self.epochs), ("batch_size", self.batch_size)):
            if value < 1:
                raise ValueError(f"Gradient.{name} must be at least 1, got {value}.")
        if self.local_steps is not None and self.local_steps < 1:
            raise ValueError(
                f"Gradient.local_steps must be at least 1, got {self.local_steps}. "
                "Leave it out to train by epochs."
            )
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"Gradient.clip must be positive, got {self.clip}.")
        if self.proximal < 0:
            raise ValueError(f"Gradient.proximal must not be negative, got {self.proximal}.")

    @property
    def papers(self) -> tuple[Paper, ...]:
        """Whose options are on."""
        hetero = self.masked or self.label_rows or self.scaler
        used = {FEDPROX: self.proximal > 0, HETEROFL: hetero, FEDDROP: self.inverted}
        return tuple(paper for paper, on in used.items() if on)

    def hyperparameters(self, round_index: int, samples: Ints) -> Hyperparameters:
        count = len(samples)
        by_iterations = self.local_steps is not None
        return Hyperparameters(
            lr=np.full(count, self.lr(round_index)),
            epochs=np.full(count, EVERYTHING if by_iterations else self.epochs),
            batch_size=np.full(count, self.batch_size),
            local_steps=np.full(count, self.local_steps if by_iterations else EVERYTHING),
            sent_fraction=np.full(count, np.nan),
            frequency=np.full(count, np.nan),
            target_seconds=np.full(count, np.nan),
        )

    def shared_draws(self, key: Tensor, local_steps: int) -> tuple[Any, ...]:
        return (None,) * local_steps

    def misfit(self, task: Task) -> str:
        return ""

    def work(self, priced: Priced, processed: int, local_steps: int) -> Work:
        sample, batch = priced.sample, priced.batch
        trained = FLOAT_BYTES * sample.sent_params
        state = self.state_bytes(priced)
        # All the time: the model as it came (what is sent is the difference) and the state.
        held = sample.nbytes + state
        # The new state is made beside the old one, while gradients and samples are still there.
        updating = trained + state + _TEMPORARY * sample.largest_bytes + batch.input_bytes
        memory = float(held + max(batch.pass_bytes, updating))
        return replace(self.effort(priced, processed, local_steps), memory=memory)

    def effort(self, priced: Priced, processed: int, steps: int, *, updates: bool = True) -> Work:
        """The work without its memory, which takes longer to find than all the rest."""
        sample, batch = priced.sample, priced.batch
        # Besides the passes: the update goes over gradient, step and parameter.
        updated = UPDATE_PASSES * self.state_bytes(priced) if updates else 0
        return Work(
            flops=float(processed * (sample.forward_flops + sample.backward_flops)),
            memory=0.0,
            calls=float(steps * batch.calls),
            moved=float(steps * (batch.moved + updated)),
        )

    def state_bytes(self, priced: Priced) -> int:
        """What is trained, and what the optimiser keeps of it."""
        return FLOAT_BYTES * priced.sample.sent_params * (1 + self.optimiser.copies)

    def start(self, context: TrainingContext, start: TrainingStart) -> Loose:
        zero = next(iter(start.params.values())).new_zeros(())
        return {
            "params": start.params,
            # Only the proximal term looks back.
            "start": start.params if self.proximal else {},
            "buffers": start.buffers,
            "seen": start.seen,
            "optimiser": self.optimiser.init({n: start.params[n] for n in context.trained}),
            "loss": zero,
            "count": zero,
        }

    def step(
        self,
        context: TrainingContext,
        state: Loose,
        batch: Minibatch,
        hyperparameters: Loose,
        draw: Any,
    ) -> Loose:
        trained = {name: state["params"][name] for name in context.trained}

        def objective(values: Params) -> tuple[Tensor, Params]:
            return self.loss(context, {**state["params"], **values}, state, batch)

        return self.descend(
            state, Slope(*differentiated(objective, trained)), batch, hyperparameters
        )

    def descend(self, state: Loose, slope: Slope, batch: Minibatch, numbers: Loose) -> Loose:
        """The state after a step of the optimiser down the slope."""
        gradients, loss, buffers = slope
        # Nobody needs gradients as they were: each goes as soon as there is a new one.
        del slope
        trained = {name: state["params"][name] for name in gradients}
        gradients = self.pulled(gradients, trained, state["start"])
        gradients = self.limited(gradients)
        new, optimiser = self.optimiser.update(
            trained, gradients, state["optimiser"], numbers["lr"]
        )
        count = batch.valid.sum().to(loss.dtype)
        return {
            **state,
            "params": {**state["params"], **new},
            "buffers": buffers,
            "optimiser": optimiser,
            "loss": state["loss"] + loss * count,
            "count": state["count"] + count,
        }

    def pulled(self, gradients: Params, at: Params, start: Params) -> Params:
        """With the gradient of the proximal term."""
        if not self.proximal:
            return gradients
        return {n: g + self.proximal * (at[n] - start[n]) for n, g in gradients.items()}

    def limited(self, gradients: Params) -> Params:
        """Clipped, if there is a limit."""
        return gradients if self.clip is None else clipped(gradients, self.clip)

    def loss(
        self, site: TrainingContext, params: Params, state: Loose, batch: Minibatch
    ) -> tuple[Tensor, Params]:
        """The mean loss of the valid samples, and the buffers after the pass."""
        output, buffers = self.output(site, params, state, batch)
        return averaged(losses(site.task, output, batch.y), batch.valid), buffers

    def output(
        self, site: TrainingContext, params: Params, state: Loose, batch: Minibatch
    ) -> tuple[Tensor, Params]:
        """What the model says of the samples, and the buffers after the pass."""
        if self.scaler:
            params = scaled(params, site.blueprint)
        if self.inverted:
            params = inverted(params, site.blueprint)
        output, buffers = apply(
            site.blueprint,
            params,
            state["buffers"],
            batch.x,
            site.norm.training,
            valid=batch.valid,
            # Hashing takes as long as a small layer: only for a network that draws.
            key=rng.fold(batch.key, "dropout") if is_random(site.blueprint) else None,
        )
        if self.masked:
            output = torch.where(state["seen"], output, 0.0)
        return output, buffers

    def finish(self, context: TrainingContext, state: Loose) -> TrainingResult:
        mask = row_masks(context, state["seen"]) if self.label_rows else {}
        # Not a number where nothing was trained: zero would pass for a perfect fit.
        loss = state["loss"] / state["count"]
        return TrainingResult(dict(state["params"]), dict(state["buffers"]), mask, {"loss": loss})


def averaged(values: Tensor, valid: Tensor) -> Tensor:
    """The mean over the samples that are not padding."""
    # In the dtype of the values: a quotient of two takes longer than the sum of a batch.
    count = valid.sum(dtype=values.dtype).clamp(min=1)
    return torch.where(valid, values, 0.0).sum() / count


def differentiated(
    objective: Callable[[Params], tuple[Tensor, Besides]], at: Params
) -> tuple[Params, Tensor, Besides]:
    """Gradients, value and by-product of an objective.

    `torch.func.grad` would keep all activations and their gradients, for a second derivative that
    nobody takes; here each goes as soon as the backward pass is through with it.
    """
    if _functorch.peek_interpreter_stack() is None:
        return _alone(objective, at)
    passed: tuple[Any, ...] = vjp(objective, at, has_aux=True)
    value, backward, besides = passed
    (gradients,) = backward(torch.ones_like(value), retain_graph=False, create_graph=False)
    return gradients, value, besides


def _alone(
    objective: Callable[[Params], tuple[Tensor, Besides]], at: Params
) -> tuple[Params, Tensor, Besides]:
    """The same for a device that is not in a stack: `vjp` would take longer than a small net."""
    leaves = {name: value.detach().requires_grad_() for name, value in at.items()}
    with torch.enable_grad():
        value, besides = objective(leaves)
    inputs = tuple(leaves.values())
    if value.requires_grad:
        found = torch.autograd.grad(value, inputs, materialize_grads=True)
    else:
        found = tuple(map(torch.zeros_like, inputs))
    gradients = dict(zip(leaves, found, strict=True))
    return gradients, value.detach(), tree_map(Tensor.detach, besides)


def scaled(params: Params, blueprint: Blueprint) -> dict[str, Tensor]:
    """Layers before a normalisation, divided by the share of their output axis that is left.

    Dividing the layer's weight and bias is the same function as dividing its output.
    """
    new = dict(params)
    for name in blueprint.scaled:
        for axis in (blueprint.axes[each] for each in blueprint.output_axes(name)):
            if axis.size < axis.whole:
                new[name] = new[name] * (axis.whole / axis.size)
    return new


def row_masks(site: TrainingContext, seen: Tensor) -> dict[str, Tensor]:
    """Ones in the classifier rows of present labels, zeros in the others (specification §1.5 a)."""
    masks = {}
    for name, dim in site.blueprint.output_rows:
        shape = site.blueprint.shape(name)
        # Elsewhere than on the last axis (segmentation) the output has no rows of labels.
        if name in site.trained and shape[dim] == len(seen):
            rows = seen.to(torch.float32).reshape(
                [-1 if d == dim else 1 for d in range(len(shape))]
            )
            masks[name] = rows.expand(shape)
    return masks
