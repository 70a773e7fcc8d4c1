"""Plain local training: minibatch gradients, one optimiser, the options of the first methods."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import vjp

from anyfleet import rng
from anyfleet.columns import Ints
from anyfleet.elastic import Blueprint, Priced, apply
from anyfleet.local import Given, Minibatch, Result, Site
from anyfleet.method import Loose, Work
from anyfleet.train.optimisers import Optimiser, Sgd, clipped
from anyfleet.train.rates import Decaying, Rate
from anyfleet.types import EVERYTHING, Numbers, Params

FLOAT_BYTES = 4
_UPDATE_PASSES = 5  # lr × g: read, write; p − step: read both, write
_TEMPORARY = 2  # copies of one parameter, while an optimiser calculates its new value


@dataclass(frozen=True)
class Gradient:
    """Epochs of minibatch gradient descent, or a fixed number of iterations.

    `proximal` pulls towards the received model (FedProx, METHODS §1.2). The last three are
    HeteroFL's (§1.5): `masked` sets training logits of locally absent classes to zero, `label_rows`
    reports the classifier rows of absent classes as not trained, `scaler` divides the output of
    cut layers that a normalisation follows by their share.
    """

    rate: Rate = field(default_factory=Decaying)
    optimiser: Optimiser = field(default_factory=Sgd)
    epochs: int = 1
    iterations: int | None = None
    batch: int = 32
    clip: float | None = None
    proximal: float = 0.0
    masked: bool = False
    label_rows: bool = False
    scaler: bool = False

    def __post_init__(self) -> None:
        for name, value in (("epochs", self.epochs), ("batch", self.batch)):
            if value < 1:
                raise ValueError(f"Gradient.{name} must be at least 1, got {value}.")
        if self.iterations is not None and self.iterations < 1:
            raise ValueError(
                f"Gradient.iterations must be at least 1, got {self.iterations}. "
                "Leave it out to train by epochs."
            )
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"Gradient.clip must be positive, got {self.clip}.")
        if self.proximal < 0:
            raise ValueError(f"Gradient.proximal must not be negative, got {self.proximal}.")

    def draft(self, step: int, samples: Ints) -> Numbers:
        count = len(samples)
        by_iterations = self.iterations is not None
        return Numbers(
            lr=np.full(count, self.rate(step)),
            epochs=np.full(count, EVERYTHING if by_iterations else self.epochs),
            batch=np.full(count, self.batch),
            steps=np.full(count, self.iterations if by_iterations else EVERYTHING),
            rate=np.ones(count),
            frequency=np.full(count, np.nan),
        )

    def choices(self, key: Tensor, steps: int) -> tuple[Any, ...]:
        return (None,) * steps

    def work(self, priced: Priced, processed: int, steps: int) -> Work:
        sample, batch = priced.sample, priced.batch
        flops = processed * (sample.forward_flops + sample.backward_flops)
        trained = FLOAT_BYTES * sample.sent_params
        # What is trained, and what the optimiser keeps of it.
        state = trained * (1 + self.optimiser.copies)
        # All the time: the model as it came (what is sent is the difference) and the state.
        held = sample.nbytes + state
        # The new state is made beside the old one, while gradients and samples are still there.
        updating = trained + state + _TEMPORARY * sample.largest_bytes + batch.input_bytes
        return Work(
            flops=float(flops),
            memory=float(held + max(batch.pass_bytes, updating)),
            calls=float(steps * batch.calls),
            # Besides the passes: the update goes over gradient, step and parameter.
            moved=float(steps * (batch.moved + _UPDATE_PASSES * state)),
        )

    def start(self, site: Site, given: Given) -> Loose:
        zero = next(iter(given.params.values())).new_zeros(())
        return {
            "params": given.params,
            # Only the proximal term looks back.
            "start": given.params if self.proximal else {},
            "buffers": given.buffers,
            "seen": given.seen,
            "optimiser": self.optimiser.init({n: given.params[n] for n in site.trained}),
            "loss": zero,
            "count": zero,
        }

    def step(
        self, site: Site, state: Loose, batch: Minibatch, numbers: Loose, choice: Any
    ) -> Loose:
        trained = {name: state["params"][name] for name in site.trained}

        def objective(values: Params) -> tuple[Tensor, Params]:
            return self.loss(site, {**state["params"], **values}, state, batch)

        gradients, loss, buffers = differentiated(objective, trained)
        if self.proximal:
            gradients = {
                n: g + self.proximal * (trained[n] - state["start"][n])
                for n, g in gradients.items()
            }
        if self.clip is not None:
            gradients = clipped(gradients, self.clip)
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

    def loss(
        self, site: Site, params: Params, state: Loose, batch: Minibatch
    ) -> tuple[Tensor, Params]:
        """The mean loss of the valid samples, and the buffers after the pass."""
        if self.scaler:
            params = scaled(params, site.blueprint)
        output, buffers = apply(
            site.blueprint,
            params,
            state["buffers"],
            batch.x,
            site.job.norm.training,
            valid=batch.valid,
            key=rng.fold(batch.key, "dropout"),
        )
        if self.masked:
            output = torch.where(state["seen"], output, 0.0)
        losses = torch.where(batch.valid, site.task.loss(output, batch.y), 0.0)
        return losses.sum() / batch.valid.sum().clamp(min=1), buffers

    def finish(self, site: Site, state: Loose) -> Result:
        mask = row_masks(site, state["seen"]) if self.label_rows else {}
        # Not a number where nothing was trained: zero would pass for a perfect fit.
        loss = state["loss"] / state["count"]
        return Result(dict(state["params"]), dict(state["buffers"]), mask, {"loss": loss})


def differentiated(
    objective: Callable[[Params], tuple[Tensor, Params]], at: Params
) -> tuple[Params, Tensor, Params]:
    """Gradients, value and by-product of an objective.

    `torch.func.grad` would keep all activations and their gradients, for a second derivative that
    nobody takes; here each goes as soon as the backward pass is through with it.
    """
    passed: tuple[Any, ...] = vjp(objective, at, has_aux=True)
    value, backward, besides = passed
    (gradients,) = backward(torch.ones_like(value), retain_graph=False, create_graph=False)
    return gradients, value, besides


def scaled(params: Params, blueprint: Blueprint) -> dict[str, Tensor]:
    """Layers before a normalisation, divided by the share of their output axis that is left.

    Dividing the layer's weight and bias is the same function as dividing its output.
    """
    new = dict(params)
    for name in blueprint.scaled:
        ((product,), *_) = blueprint.params[name]
        for axis in (blueprint.axes[a] for a in product):
            if axis.size < axis.whole:
                new[name] = new[name] * (axis.whole / axis.size)
    return new


def row_masks(site: Site, seen: Tensor) -> dict[str, Tensor]:
    """Ones in the classifier rows of present labels, zeros in the others (METHODS §1.5 a)."""
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
