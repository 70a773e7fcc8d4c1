"""Plain local training: minibatch gradients, one optimiser, the options of the first methods."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._C import _functorch
from torch.func import vjp
from torch.utils._pytree import tree_map

from anyfleet import rng
from anyfleet.arrays import Ints
from anyfleet.core.messages import Hyperparameters, Params
from anyfleet.core.objectives import losses
from anyfleet.core.slots import (
    Minibatch,
    Train,
    TrainingContext,
    TrainingResult,
    TrainingStart,
    TrainingState,
)
from anyfleet.core.training_work import Counted, Work, descent_work
from anyfleet.elastic import Blueprint, Priced, apply
from anyfleet.elastic.execution.random_operators import is_random
from anyfleet.papers import FEDDROP, FEDPROX, HETEROFL, Paper
from anyfleet.parts.train.inverted import inverted
from anyfleet.parts.train.learning_rates import Decaying, LearningRate
from anyfleet.parts.train.optimisers import Optimiser, OptimiserState, Sgd, clipped

ByProduct = TypeVar("ByProduct")
Update = Callable[
    [Params, Params, OptimiserState, Tensor], tuple[dict[str, Tensor], OptimiserState]
]  # as `Optimiser.update` is


class MinibatchGradient(NamedTuple):
    """What a forward and a backward pass over a minibatch found.

    `gradients` are those of the mean loss, by the name of every trained parameter; `loss` is the
    mean over the valid samples; `buffers` are those of the model after the pass.
    """

    gradients: Params
    loss: Tensor
    buffers: Params


@dataclass(frozen=True)
class Gradient(Train):
    """Minibatch gradient descent, for a number of epochs or of local steps.

    `proximal` pulls towards the received model (FedProx, specification §1.2). Three options are
    HeteroFL's (§1.5): `masked` sets the training logits of locally absent classes to zero,
    `label_rows` reports the classifier rows of absent classes as not trained, `scaler` divides the
    output of cut layers that a normalisation follows by the share of their channels that is left.
    `inverted` (FedDrop, §1.4) divides what the next layers take in from cut layers by that share,
    as inverted dropout does.

    A trainer that differs in one point derives from this class and overrides one method: `output`
    (the forward pass), `loss` (the objective), `gradient` (a `MinibatchGradient`: what is descended
    along) or `descend` (the update). If it computes more than one forward and one backward pass for
    each local step, it overrides `work` too, for example with `return 2 * super().work(...)`.
    """

    lr: LearningRate = field(default_factory=Decaying)  # learning rate of each round
    optimiser: Optimiser = field(default_factory=Sgd)  # of a local step
    epochs: int = 1  # passes over a device's samples in each order
    local_steps: int | None = None  # instead of epochs
    batch_size: int = 32  # samples of a minibatch
    clip: float | None = None  # largest norm of a gradient; none: any
    proximal: float = 0.0  # weight of the proximal term (FedProx)
    masked: bool = False  # HeteroFL's masked logits
    label_rows: bool = False  # HeteroFL's rows of absent classes
    scaler: bool = False  # HeteroFL's scaler
    inverted: bool = False  # FedDrop's scaling

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
        """The papers whose options are on."""
        hetero = self.masked or self.label_rows or self.scaler
        used = {FEDPROX: self.proximal > 0, HETEROFL: hetero, FEDDROP: self.inverted}
        return tuple(paper for paper, on in used.items() if on)

    def hyperparameters(self, round_index: int, samples: Ints) -> Hyperparameters:
        lr, batch_size = self.lr(round_index), self.batch_size
        if self.local_steps is None:
            return Hyperparameters.alike(
                len(samples), lr=lr, batch_size=batch_size, epochs=self.epochs
            )
        return Hyperparameters.alike(
            len(samples), lr=lr, batch_size=batch_size, local_steps=self.local_steps
        )

    def without_hyperparameters(self) -> Train:
        if type(self) is not Gradient:
            return self  # a class that derives from this one may read them elsewhere
        return replace(self, lr=Decaying(), epochs=1, local_steps=None, batch_size=1)

    def work(self, priced: Priced, processed: Counted, local_steps: Counted) -> Work:
        return descent_work(priced, processed, local_steps, copies=self.optimiser.copies)

    def start(self, context: TrainingContext, start: TrainingStart) -> TrainingState:
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
        state: TrainingState,
        batch: Minibatch,
        hyperparameters: Mapping[str, Tensor],
        draw: Any,
    ) -> TrainingState:
        # Not kept in a variable here: `descend` lets gradients go one by one.
        return self.descend(
            context,
            state,
            self.gradient(context, state["params"], state, batch),
            batch,
            hyperparameters,
        )

    def gradient(
        self, context: TrainingContext, params: Params, state: TrainingState, batch: Minibatch
    ) -> MinibatchGradient:
        """Return the gradient of the loss at `params`, which need not be those of the state.

        The proximal term and clipping are not in it: `descend` applies them. The buffers that it
        returns are those after this pass, and become those of the model.
        """
        trained = {name: params[name] for name in context.trained}

        def objective(values: Params) -> tuple[Tensor, Params]:
            return self.loss(context, {**params, **values}, state, batch)

        return MinibatchGradient(*differentiated(objective, trained))

    def descend(
        self,
        context: TrainingContext,
        state: TrainingState,
        found: MinibatchGradient,
        batch: Minibatch,
        hyperparameters: Mapping[str, Tensor],
    ) -> TrainingState:
        """Return the state after a step of the optimiser along a gradient.

        The proximal term is added to the gradient and the sum is clipped first, where they are on.
        """
        return self._descended(state, found, batch, hyperparameters["lr"], self.optimiser.update)

    def advance(
        self,
        context: TrainingContext,
        state: TrainingState,
        batch: Minibatch,
        hyperparameters: Mapping[str, Tensor],
        substep: Any,
    ) -> TrainingState:
        kind, optimiser = type(self), self.optimiser
        own = (kind.substep, kind.step, kind.descend)
        # A class that derives from this one may look back at the state before its step.
        if own != (Gradient.substep, Gradient.step, Gradient.descend) or type(optimiser) is not Sgd:
            return self.substep(context, state, batch, hyperparameters, substep)
        found = self.gradient(context, state["params"], state, batch)
        return self._descended(state, found, batch, hyperparameters["lr"], optimiser.overwrite)

    def _descended(
        self,
        state: TrainingState,
        found: MinibatchGradient,
        batch: Minibatch,
        lr: Tensor,
        update: Update,
    ) -> TrainingState:
        """Return the state after `update`, along a gradient with the proximal term and clipped."""
        gradients, loss, buffers = found
        # Nobody needs gradients as they were: each goes as soon as there is a new one.
        del found
        trained = {name: state["params"][name] for name in gradients}
        gradients = self.pulled(gradients, trained, state["start"])
        gradients = self.limited(gradients)
        new, optimiser = update(trained, gradients, state["optimiser"], lr)
        count = batch.valid.sum().to(loss.dtype)
        return {
            **state,
            "params": {**state["params"], **new},
            "buffers": buffers,
            "optimiser": optimiser,
            "loss": state["loss"] + loss * count,
            "count": state["count"] + count,
        }

    def pulled(self, gradients: Params, params: Params, start: Params) -> Params:
        """Return the gradients with that of the proximal term added."""
        if not self.proximal:
            return gradients
        return {n: g + self.proximal * (params[n] - start[n]) for n, g in gradients.items()}

    def limited(self, gradients: Params) -> Params:
        """Return the gradients, clipped if there is a limit."""
        return gradients if self.clip is None else clipped(gradients, self.clip)

    def loss(
        self, context: TrainingContext, params: Params, state: TrainingState, batch: Minibatch
    ) -> tuple[Tensor, Params]:
        """Return the mean loss of the valid samples, and the buffers after the pass."""
        output, buffers = self.output(context, params, state, batch)
        return averaged(losses(context.task, output, batch.y), batch.valid), buffers

    def output(
        self, context: TrainingContext, params: Params, state: TrainingState, batch: Minibatch
    ) -> tuple[Tensor, Params]:
        """Return the model's output for the samples, and the buffers after the pass."""
        if self.scaler:
            params = scaled(params, context.blueprint)
        if self.inverted:
            params = inverted(params, context.blueprint)
        output, buffers = apply(
            context.blueprint,
            params,
            state["buffers"],
            batch.x,
            context.norm.training,
            valid=batch.valid,
            # Hashing takes as long as a small layer: only for a network that draws.
            key=rng.fold(batch.key, "dropout") if is_random(context.blueprint) else None,
        )
        if self.masked:
            output = torch.where(state["seen"], output, 0.0)
        return output, buffers

    def mask(self, context: TrainingContext, seen: Tensor) -> Params:
        return row_masks(context, seen) if self.label_rows else {}

    def finish(self, context: TrainingContext, state: TrainingState) -> TrainingResult:
        mask = self.mask(context, state["seen"])
        # NaN where nothing was trained: zero would pass for a perfect fit.
        loss = state["loss"] / state["count"]
        return TrainingResult(dict(state["params"]), dict(state["buffers"]), mask, {"loss": loss})


def averaged(values: Tensor, valid: Tensor) -> Tensor:
    """Return the mean over the samples that are not padding; 0 if there are none."""
    # In the dtype of the values: a quotient of two takes longer than the sum of a batch.
    count = valid.sum(dtype=values.dtype).clamp(min=1)
    return torch.where(valid, values, 0.0).sum() / count


def differentiated(
    objective: Callable[[Params], tuple[Tensor, ByProduct]], params: Params
) -> tuple[Params, Tensor, ByProduct]:
    """Return the gradients of an objective at `params`, its value and its by-product.

    `torch.func.grad` would keep all activations and their gradients, for a second derivative that
    nobody takes; here each goes as soon as the backward pass is through with it.
    """
    if _functorch.peek_interpreter_stack() is None:
        return _differentiated_alone(objective, params)
    passed: tuple[Any, ...] = vjp(objective, params, has_aux=True)
    value, backward, by_product = passed
    (gradients,) = backward(torch.ones_like(value), retain_graph=False, create_graph=False)
    return gradients, value, by_product


def _differentiated_alone(
    objective: Callable[[Params], tuple[Tensor, ByProduct]], params: Params
) -> tuple[Params, Tensor, ByProduct]:
    """Return the same for a device that is trained alone.

    There `vjp` would take longer than a small network.
    """
    leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
    with torch.enable_grad():
        value, by_product = objective(leaves)
    inputs = tuple(leaves.values())
    if value.requires_grad:
        found = torch.autograd.grad(value, inputs, materialize_grads=True)
    else:
        found = tuple(map(torch.zeros_like, inputs))
    gradients = dict(zip(leaves, found, strict=True))
    return gradients, value.detach(), tree_map(Tensor.detach, by_product)


def scaled(params: Params, blueprint: Blueprint) -> dict[str, Tensor]:
    """Return the parameters; layers before a normalisation are divided by their share of channels.

    The share is that of the output axis that is left in the sub-model. Dividing the layer's weight
    and bias is the same function as dividing its output.
    """
    new = dict(params)
    for name in blueprint.scaled:
        for axis in (blueprint.axes[each] for each in blueprint.output_axes(name)):
            if axis.size < axis.whole:
                new[name] = new[name] * (axis.whole / axis.size)
    return new


def row_masks(context: TrainingContext, seen: Tensor) -> dict[str, Tensor]:
    """Return masks with ones in the classifier rows of present labels, zeros in the others.

    specification §1.5 (a).
    """
    masks = {}
    for name, dim in context.blueprint.output_rows:
        shape = context.blueprint.shape(name)
        # Elsewhere than on the last axis (segmentation) the output has no rows of labels.
        if name in context.trained and shape[dim] == len(seen):
            rows = seen.to(torch.float32).reshape(
                [-1 if d == dim else 1 for d in range(len(shape))]
            )
            masks[name] = rows.expand(shape)
    return masks
