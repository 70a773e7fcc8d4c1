"""Nested models: leading parts of a device's sub-model, trained inside it by four trainers.

Each of these trainers makes narrower models inside the sub-model usable by themselves
(specification §1.7). All of them build on plain `Gradient`.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from typing import Any, final

import torch
from torch import Tensor

from anyfleet import rng
from anyfleet.arrays import Ints
from anyfleet.core.messages import Hyperparameters, Params
from anyfleet.core.objectives import Task, losses
from anyfleet.core.slots import (
    Minibatch,
    Train,
    TrainingContext,
    TrainingResult,
    TrainingStart,
    TrainingState,
)
from anyfleet.core.training_work import Work
from anyfleet.elastic import WHOLE, Blueprint, Priced, Slice, cut, paste, place
from anyfleet.elastic.plain_tensors import plain_tensors
from anyfleet.parts.train.gradient import Gradient, averaged, differentiated

NESTED_WIDTHS = tuple(k / 20 for k in range(2, 21))  # 0.10, 0.15 … 1.00 of the channels
SAME = 1e-9  # widths closer than this are one
OutputLoss = Callable[[Tensor], Tensor]  # of the output for a minibatch: the mean over its samples


class Nested(Train):
    """The half of a nested trainer that is `base`'s, and the checks of its common fields."""

    base: Gradient
    nested_widths: tuple[float, ...]
    samples: int  # nested models that a minibatch trains; 0 is plain training

    @property
    @abstractmethod
    def draws_per_step(self) -> int:
        """The random numbers that a minibatch needs; a device draws its widths with them."""

    def shared_draws(self, local_steps: int, key: Tensor) -> tuple[Any, ...]:
        """Return numbers in [0, 1) for every local step.

        Those of a step are the same, however many steps there are.
        """
        if not self.samples:
            return self.base.shared_draws(local_steps, key)
        keys = rng.fold(rng.fold(key, "ratios"), torch.arange(local_steps))
        return tuple(map(tuple, rng.uniform(keys, self.draws_per_step).tolist()))

    def hyperparameters(self, round_index: int, samples: Ints) -> Hyperparameters:
        return self.base.hyperparameters(round_index, samples)

    @final
    def step(
        self,
        context: TrainingContext,
        state: TrainingState,
        batch: Minibatch,
        hyperparameters: Mapping[str, Tensor],
        draw: Any,
    ) -> TrainingState:
        for substep in self.substeps(context, draw):
            state = self.substep(context, state, batch, hyperparameters, substep)
        return state

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "step" in vars(cls):
            raise TypeError(
                f"{cls.__name__} overrides `step`, which training with nested models does not "
                "call; override `substeps` and `substep`, of which a step is made."
            )

    def start(self, context: TrainingContext, start: TrainingStart) -> TrainingState:
        if problem := self.misfit(context.task):
            raise ValueError(problem)
        return self.base.start(context, start)

    def mask(self, context: TrainingContext, seen: Tensor) -> Params | None:
        return self.base.mask(context, seen)

    def finish(self, context: TrainingContext, state: TrainingState) -> TrainingResult:
        return self.base.finish(context, state)

    def misfit(self, task: Task) -> str:
        return "" if task.classified or not self.samples else self._no_classes()

    def _no_classes(self) -> str:
        """Return what to do where nested models cannot learn from the whole one."""
        return (
            f"{type(self).__name__} lets the whole model teach its parts by the probabilities of "
            "classes, and the targets of this task are none; use Progressive(distil=False), as "
            "FedSeq does, or say classified=True if its own loss is one of classes."
        )

    def _faults(self) -> Iterator[str]:
        """Yield what is wrong with the fields that all nested trainers have."""
        name, widths = type(self).__name__, self.nested_widths
        if not widths or not all(0 < width <= 1 for width in widths):
            yield f"{name}.nested_widths must be one or more widths in (0, 1], got {widths}."
        if len(set(widths)) < len(widths):
            yield f"{name}.nested_widths must differ from each other, got {widths}."
        if self.samples < 0:
            yield f"{name}.samples must not be negative, got {self.samples}; 0 is plain training."


@dataclass(frozen=True, eq=False)
class NestedModel:
    """A leading part of a device's sub-model, as a model of its own."""

    around: Blueprint  # of the device's sub-model
    part: Slice  # of that sub-model
    context: TrainingContext  # of the part

    def state(self, state: TrainingState) -> TrainingState:
        """Return what the part sees of a trainer's state; views where that is possible."""
        trees = {name: self.cut(state[name]) for name in ("params", "start", "buffers")}
        return {**state, **trees}

    def cut(self, tree: Params) -> dict[str, Tensor]:
        """Return the part's values of a tree of the sub-model."""
        return cut(tree, self.part, self.around)

    def paste(self, name: str, value: Tensor, onto: Tensor) -> Tensor:
        """Return a new tensor of the sub-model with the part's values in it."""
        return paste({name: value}, {name: onto}, self.part, self.around)[name]


def nested_model(context: TrainingContext, width: float) -> NestedModel:
    """Return the part of that width; the device's planned width is all of its sub-model."""
    part = WHOLE if width > context.width - SAME else _prefix(context.blueprint, width)
    small = replace(context, blueprint=context.blueprint.local(part))
    return NestedModel(context.blueprint, part, small)


@lru_cache(maxsize=1024)
def _prefix(blueprint: Blueprint, width: float) -> Slice:
    return blueprint.prefix(width)


def narrower(priced: Priced, widths: Iterable[float]) -> list[Priced]:
    """Return the parts of those widths that are below the width of a slice."""
    return [priced.within(width) for width in widths if width < priced.width - SAME]


def divergence(teacher: Tensor, output: Tensor) -> Tensor:
    """Return KL[teacher ‖ output] for each sample, of logits [B, …, C] (specification §1.7).

    Positions of a sequence are averaged within a sample, as the task's loss does it.
    """
    taught, own = teacher.log_softmax(-1), output.log_softmax(-1)
    values = (taught.exp() * (taught - own)).sum(-1)
    return values if values.ndim == 1 else values.flatten(1).mean(1)


def output_loss(
    context: TrainingContext, batch: Minibatch, *, labels: bool, teacher: Tensor | None
) -> OutputLoss:
    """Return the objective of a part: the task's loss, the divergence from a teacher, or both."""

    def loss(output: Tensor) -> Tensor:
        total = output.new_zeros(())
        if labels:
            total = total + averaged(losses(context.task, output, batch.y), batch.valid)
        if teacher is not None:
            total = total + averaged(divergence(teacher, output), batch.valid)
        return total

    return loss


def part_gradients(
    base: Gradient, part: NestedModel, small: TrainingState, batch: Minibatch, loss: OutputLoss
) -> Params:
    """Return the gradients of the trained parameters of a part, in its own coordinates.

    What the pass does to running statistics is forgotten: those are the whole sub-model's.
    """
    trained = {name: small["params"][name] for name in part.context.trained}

    def objective(values: Params) -> tuple[Tensor, Params]:
        output, _ = base.output(part.context, {**small["params"], **values}, small, batch)
        return loss(output), {}

    return differentiated(objective, trained)[0]


def rank(width: float, widths: Sequence[float]) -> int:
    """Return how many of the widths are at most this one; 0 if none is."""
    return sum(each <= width + SAME for each in widths)


def ranks(part: NestedModel, widths: tuple[float, ...], device: str) -> Params:
    """Return for every coordinate of a part the rank of the narrowest width that has it.

    Those that only the part itself has, and none of the widths, rank last.
    """
    return _ranks(part.context.blueprint, widths, device)


@lru_cache(maxsize=1024)
def _ranks(blueprint: Blueprint, widths: tuple[float, ...], device: str) -> Params:
    with plain_tensors():
        found = {
            name: torch.full(
                blueprint.shape(name), len(widths) + 1, dtype=torch.int16, device=device
            )
            for name in blueprint.params
        }
        for width in sorted(widths, reverse=True):
            narrow = blueprint.prefix(width)
            for name, each in found.items():
                each[place(name, narrow, blueprint, device)] = rank(width, widths)
    return found


def expected(works: Iterable[Work], draws: float) -> Work:
    """Return the expected work of so many draws, when each is as likely; none if there are none."""
    each = list(works)
    often = draws / max(1, len(each))
    return reduce(Work.__add__, (work * often for work in each), Work(0.0, 0.0, 0.0, 0.0))
