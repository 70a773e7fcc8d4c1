"""Fisher information, measured on a device while it trains, whatever the trainer.

The trace E_x E_y‖∇ log p(y | x)‖², with labels y drawn from the model's own prediction
(specification §1.10). Normalisation by batch uses the statistics of the minibatch as constants, so
that samples stay independent; dropout is off. `Observed` adds the measurement to any trainer, and
its cost.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import vjp, vmap

from anyfleet import rng
from anyfleet.arrays import Ints
from anyfleet.core.messages import Hyperparameters, Params
from anyfleet.core.objectives import Task, losses
from anyfleet.core.padding import unpaddable
from anyfleet.core.slots import (
    Measure,
    Minibatch,
    Train,
    TrainingContext,
    TrainingResult,
    TrainingStart,
    TrainingState,
)
from anyfleet.core.training_work import FLOAT_BYTES, Amounts, Counted, Work
from anyfleet.elastic import OBSERVE, OBSERVED, Blueprint, Cost, Priced, apply
from anyfleet.errors import refuse

_TOGETHER = 8  # samples whose gradients are held at once


class FisherReading(NamedTuple):
    """The Fisher information of a minibatch: in all, and of every channel."""

    trace: Tensor
    channels: dict[str, Tensor]  # by axis, of the parameters that produce each channel


@dataclass(frozen=True)
class Fisher(Measure):
    """Fisher information: how it is measured, and how often.

    `estimate`: "samples", the mean of the squared gradients of single samples; or "mean", the
    squared mean gradient times the number of samples: much cheaper, but biased, as gradients of
    samples with labels that the model itself draws cancel only on average. `every` counts local
    steps, `samples` takes only so many of a minibatch: both lower the cost.

    A report has "fisher", the mean trace over the measured steps; "fisher_squares", the mean of its
    square; "fisher_steps", the number of all local steps; and "channels", the information of every
    channel of the received model.
    """

    scalars: ClassVar[frozenset[str]] = frozenset({"fisher", "fisher_squares", "fisher_steps"})
    vectors: ClassVar[frozenset[str]] = frozenset({"channels"})
    nonnegative: ClassVar[frozenset[str]] = scalars | vectors

    every: int = 1
    samples: int | None = None
    estimate: Literal["samples", "mean"] = "samples"

    def __post_init__(self) -> None:
        refuse(self._faults())

    def _faults(self) -> Iterator[str]:
        if self.every < 1:
            yield f"Fisher.every must be at least 1 local step, got {self.every}."
        if self.samples is not None and self.samples < 1:
            yield f"Fisher.samples must be at least 1, got {self.samples}; leave it out for all."
        if self.estimate not in ("samples", "mean"):
            yield f'Fisher.estimate must be "samples" or "mean", got {self.estimate!r}.'

    def __call__(
        self, context: TrainingContext, params: Params, buffers: Params, batch: Minibatch
    ) -> FisherReading:
        """Return the Fisher information of one minibatch."""
        blueprint = context.blueprint
        if blueprint.norms:
            _, seen = apply(
                blueprint, params, buffers, batch.x, OBSERVE, valid=batch.valid, key=batch.key
            )
            buffers = {**buffers, **seen}
        rows = slice(self.samples)
        x, valid = batch.x[rows], batch.valid[rows]
        labels = batch.y[rows]
        key, dtype = rng.fold(batch.key, "fisher"), next(iter(params.values())).dtype
        # A sequence has several labels.
        draws = rng.uniform(key, labels.numel(), dtype=dtype).reshape(labels.shape)
        model = _Model(context, params, buffers)
        if self.estimate == "mean":
            squares = _of_mean(model, x, valid, draws)
        else:
            squares = _of_samples(model, x, valid, draws)
        total = torch.stack([value.sum() for value in squares.values()]).sum()
        return FisherReading(total, by_channel(squares, blueprint))

    def initial(
        self, context: TrainingContext, params: Params, buffers: Params, batch: Minibatch
    ) -> float:
        """Return the trace of one minibatch."""
        return float(self(context, params, buffers, batch).trace)

    def observed(self, train: Train, asked: frozenset[str]) -> "Observed":
        return Observed(train, self, channels="channels" in asked)

    def length(self, name: str, blueprint: Blueprint, trained: Sequence[str]) -> int:
        if name != "channels":
            return 1
        axes = {produced(each, blueprint) for each in trained}
        return sum(blueprint.sizes[axis] for axis in axes if axis is not None)

    def work(self, priced: Priced, processed: Counted, local_steps: Counted) -> Work:
        sample, batch = priced.sample, priced.batch
        used = min(self.samples or priced.batch_size, priced.batch_size)
        times = -(-local_steps // self.every)

        def measured(count: int) -> Amounts:
            """Return the samples of all measurements that take `count` of a minibatch."""
            most = np.minimum(times * count, processed)
            # Without steps, what each sample adds on average: planners add the two up.
            return np.where(
                np.asarray(local_steps) > 0, most, processed * count / priced.batch_size
            )

        norms = bool(priced.blueprint.norms)
        flops = measured(used) * float(sample.flops)
        if norms:
            # Normalisation by batch takes a pass over all of it first.
            flops = flops + measured(priced.batch_size) * float(sample.forward_flops)
        single = self.estimate == "samples"
        runs = -(-used // _TOGETHER) if single else 1
        held = FLOAT_BYTES * sample.sent_params * (min(used, _TOGETHER) if single else 1)
        written = 2 * FLOAT_BYTES * sample.sent_params * (used if single else 1)
        return Work(
            flops=flops if np.ndim(flops) else float(flops),
            memory=float(held + _pass_bytes(sample, batch, min(used, _TOGETHER), single=single)),
            calls=float(runs * batch.calls + (batch.forward_calls if norms else 0)) * times,
            moved=(used / priced.batch_size * batch.moved + written) * times
            + float(batch.forward_moved if norms else 0) * times,
        )


def _pass_bytes(sample: Cost, batch: Cost, together: int, *, single: bool) -> float:
    """Return what the passes of a measurement hold, for `together` samples at a time."""
    return min(batch.pass_bytes, together * sample.pass_bytes) if single else batch.pass_bytes


class _Model(NamedTuple):
    """A model whose gradients are taken by its trained parameters; the others are constants."""

    context: TrainingContext
    params: Params
    buffers: Params

    def negative_log_likelihood(self, values: Params, x: Tensor, draws: Tensor) -> Tensor:
        """Return a value for each sample, with labels that the model itself draws."""
        output = self.output(values, x)
        return losses(self.context.task, output, drawn_labels(output.detach(), draws))

    def output(self, values: Params, x: Tensor) -> Tensor:
        """Return the output with other values of the trained parameters."""
        params, blueprint = {**self.params, **values}, self.context.blueprint
        output, _ = apply(blueprint, params, self.buffers, x, OBSERVED)
        return output

    @property
    def trained(self) -> dict[str, Tensor]:
        return {name: self.params[name] for name in self.context.trained}


def drawn_labels(output: Tensor, draws: Tensor) -> Tensor:
    """Return labels drawn from the softmax of the last axis, by inversion of `draws` in [0, 1)."""
    reached = output.softmax(dim=-1).cumsum(dim=-1)
    found = (reached <= draws.unsqueeze(-1)).sum(dim=-1)
    # Rounding may leave the last sum below 1.
    return found.clamp(max=output.shape[-1] - 1)


def _of_samples(model: _Model, x: Tensor, valid: Tensor, draws: Tensor) -> dict[str, Tensor]:
    """Return the mean of the squared gradients of single samples, row by row of each tensor."""

    def one(sample: Tensor, draw: Tensor) -> dict[str, Tensor]:
        def objective(values: Params) -> Tensor:
            return model.negative_log_likelihood(values, sample[None], draw[None])[0]

        return _rows_squared(_gradient(objective, model.trained))

    each: dict[str, Tensor] = vmap(one, chunk_size=_TOGETHER)(x, draws)
    count = valid.sum().clamp(min=1)
    return {
        name: torch.where(valid[:, None], rows, 0.0).sum(dim=0) / count
        for name, rows in each.items()
    }


def _of_mean(model: _Model, x: Tensor, valid: Tensor, draws: Tensor) -> dict[str, Tensor]:
    """Return the squared mean gradient times the number of samples, row by row of each tensor."""
    count = valid.sum().clamp(min=1)

    def objective(values: Params) -> Tensor:
        losses = model.negative_log_likelihood(values, x, draws)
        return torch.where(valid, losses, 0.0).sum() / count

    squares = _rows_squared(_gradient(objective, model.trained))
    return {name: count * rows for name, rows in squares.items()}


def _gradient(objective: Callable[[Params], Tensor], params: Params) -> Params:
    value, backward, *_ = vjp(objective, params)
    (gradients,) = backward(torch.ones_like(value), retain_graph=False, create_graph=False)
    found: Params = gradients
    return found


def _rows_squared(gradients: Params) -> dict[str, Tensor]:
    return {name: g.square().flatten(1).sum(dim=1) for name, g in _at_least_2d(gradients).items()}


def _at_least_2d(gradients: Params) -> dict[str, Tensor]:
    return {n: g.reshape(g.shape[0] if g.ndim else 1, -1) for n, g in gradients.items()}


def by_channel(squares: Params, blueprint: Blueprint) -> dict[str, Tensor]:
    """Return for every axis that can be cut the sums over the parameters of each channel.

    Every coordinate counts once, with its output channel; the output layer has none (§1.11).
    """
    found: dict[str, Tensor] = {}
    for name, rows in squares.items():
        axis = produced(name, blueprint)
        if axis is not None:
            axes = blueprint.output_axes(name)
            own = rows.reshape([blueprint.sizes[each] for each in axes])
            others = tuple(i for i, each in enumerate(axes) if each != axis)
            own = own.sum(dim=others) if others else own
            found[axis] = found[axis] + own if axis in found else own
    return dict(sorted(found.items()))


def produced(name: str, blueprint: Blueprint) -> str | None:
    """Return the axis whose channels the rows of a parameter produce; None if it is never cut."""
    return next(
        (axis for axis in blueprint.output_axes(name) if axis in blueprint.counts(1.0)), None
    )


@dataclass(frozen=True)
class Observed(Train):
    """Another trainer, with Fisher information measured on the minibatches it trains on."""

    inner: Train
    fisher: Fisher
    channels: bool = False  # reports the information of every channel, too

    def hyperparameters(self, round_index: int, samples: Ints) -> Hyperparameters:
        return self.inner.hyperparameters(round_index, samples)

    def shared_draws(self, local_steps: int, key: Tensor) -> tuple[Any, ...]:
        return self.inner.shared_draws(local_steps, key)

    def mask(self, context: TrainingContext, seen: Tensor) -> Params | None:
        return self.inner.mask(context, seen)

    def misfit(self, task: Task) -> str:
        if not task.classified:
            return (
                "Fisher information is measured with labels drawn from a softmax of the output, "
                "and this task has none: use a chooser and an extraction that do not ask for it "
                "(LargestInTime, Leading), or say classified=True if its loss is one of classes."
            )
        if self.fisher.estimate == "samples" and (reason := unpaddable(task)):
            return (
                "Fisher information is measured by the gradients of single samples, and in this "
                f'task samples see each other: {reason}. Use Fisher(estimate="mean"), or a '
                "chooser and an extraction that do not ask for it (LargestInTime, Leading)."
            )
        return self.inner.misfit(task)

    def work(self, priced: Priced, processed: Counted, local_steps: Counted) -> Work:
        beside = self.fisher.work(priced, processed, local_steps)
        # The model is there while Fisher information is measured.
        beside = replace(beside, memory=priced.sample.nbytes + beside.memory)
        return self.inner.work(priced, processed, local_steps) + beside

    def start(self, context: TrainingContext, start: TrainingStart) -> TrainingState:
        zero = next(iter(start.params.values())).new_zeros(())
        local = context.blueprint
        axes = {produced(name, local) for name in context.trained} if self.channels else set()
        return {
            "inner": self.inner.start(context, start),
            "trace": zero,
            "squares": zero,
            "measured": zero,
            "steps": zero,
            "channels": {a: zero.expand(local.sizes[a]) for a in sorted(a for a in axes if a)},
        }

    def step(
        self,
        context: TrainingContext,
        state: TrainingState,
        batch: Minibatch,
        hyperparameters: Mapping[str, Tensor],
        draw: Any,
    ) -> TrainingState:
        new = {**state, "steps": state["steps"] + 1}
        if batch.step_index % self.fisher.every == 0:
            model = state["inner"]
            found = self.fisher(context, model["params"], model["buffers"], batch)
            # A sample alone in its batch is normalised to nothing: it says nothing either.
            says = (batch.valid.sum() > bool(context.blueprint.norms)).to(found.trace.dtype)
            new["trace"] = state["trace"] + torch.where(says > 0, found.trace, 0.0)
            new["squares"] = state["squares"] + torch.where(says > 0, found.trace.square(), 0.0)
            new["measured"] = state["measured"] + says
            if self.channels and batch.step_index == 0:
                new["channels"] = found.channels
        new["inner"] = self.inner.step(context, state["inner"], batch, hyperparameters, draw)
        return new

    def finish(self, context: TrainingContext, state: TrainingState) -> TrainingResult:
        result = self.inner.finish(context, state["inner"])
        measured = {
            "fisher": state["trace"] / state["measured"],
            "fisher_squares": state["squares"] / state["measured"],
            "fisher_steps": state["steps"],
        }
        if self.channels:
            # Whoever trains no layer with channels, or nothing at all, has none to tell of.
            rows = [state["trace"].new_zeros(0), *state["channels"].values()]
            nothing = state["measured"] == 0
            measured["channels"] = torch.where(nothing, torch.nan, torch.cat(rows))
        return result._replace(report={**result.report, **measured})
