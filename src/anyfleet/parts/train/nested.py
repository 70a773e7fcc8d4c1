"""Leading parts of a device's model, trained inside it: what four trainers have in common.

All make every prefix of the local model usable by itself (specification §1.7), around plain `Gradient`.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from anyfleet import rng
from anyfleet.arrays import Ints
from anyfleet.core.messages import Hyperparameters, Params
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
from anyfleet.elastic import WHOLE, Blueprint, Priced, Slice, cut, paste, place
from anyfleet.elastic.plain_tensors import plain_tensors
from anyfleet.parts.train.gradient import Gradient, averaged, differentiated

NESTED_WIDTHS = tuple(k / 20 for k in range(2, 21))  # 0.10, 0.15 … 1.00 of the width
SAME = 1e-9  # ratios closer than this are one
Judge = Callable[[Tensor], Tensor]  # of the output for a minibatch: the mean over its samples


class Nested(Train, Protocol):
    """What is `base`'s business, and what is wrong with the fields all of them have."""

    base: Gradient
    nested_widths: tuple[float, ...]
    samples: int

    @property
    def numbers(self) -> int:
        """How many numbers a minibatch draws; a device makes ratios of its own from them."""

    def shared_draws(self, key: Tensor, local_steps: int) -> tuple[Any, ...]:
        """Numbers in [0, 1); those of a step are the same however many steps there are."""
        if not self.samples:
            return self.base.shared_draws(key, local_steps)
        keys = rng.fold(rng.fold(key, "ratios"), torch.arange(local_steps))
        return tuple(map(tuple, rng.uniform(keys, self.numbers).tolist()))

    def hyperparameters(self, round_index: int, samples: Ints) -> Hyperparameters:
        return self.base.hyperparameters(round_index, samples)

    def start(self, context: TrainingContext, start: TrainingStart) -> Loose:
        if problem := self.misfit(context.task):
            raise ValueError(problem)
        return self.base.start(context, start)

    def finish(self, context: TrainingContext, state: Loose) -> TrainingResult:
        return self.base.finish(context, state)

    def misfit(self, task: Task) -> str:
        return "" if task.classified or not self.samples else self._untaught()

    def _untaught(self) -> str:
        return (
            f"{type(self).__name__} lets the whole model teach its parts by the probabilities of "
            "classes, and the targets of this task are none; use Progressive(distil=False), as "
            "FedSeq does, or say classified=True if its own loss is one of classes."
        )

    def _faults(self) -> Iterator[str]:
        name = type(self).__name__
        if not self.nested_widths or not all(0 < ratio <= 1 for ratio in self.nested_widths):
            yield f"{name}.ratios must be one or more shares in (0, 1], got {self.nested_widths}."
        if len(set(self.nested_widths)) < len(self.nested_widths):
            yield f"{name}.ratios must differ from each other, got {self.nested_widths}."
        if self.samples < 0:
            yield f"{name}.samples must not be negative, got {self.samples}; 0 is plain training."


@dataclass(frozen=True, eq=False)
class Inner:
    """A leading part of a site's model, as a model of its own."""

    around: Blueprint
    part: Slice
    site: TrainingContext

    def state(self, state: Loose) -> Loose:
        """What the part sees of a trainer's state; views where that is possible."""
        trees = {name: self.cut(state[name]) for name in ("params", "start", "buffers")}
        return {**state, **trees}

    def cut(self, tree: Params) -> dict[str, Tensor]:
        return cut(tree, self.part, self.around)

    def paste(self, name: str, value: Tensor, onto: Tensor) -> Tensor:
        """One tensor of the whole with the part's values in it; a new one."""
        return paste({name: value}, {name: onto}, self.part, self.around)[name]


def inner(site: TrainingContext, ratio: float) -> Inner:
    """The part of that share of the whole width; the device's planned share is all of it."""
    part = WHOLE if ratio > site.width - SAME else _prefix(site.blueprint, ratio)
    small = replace(site, blueprint=site.blueprint.local(part))
    return Inner(site.blueprint, part, small)


@lru_cache(maxsize=1024)
def _prefix(blueprint: Blueprint, ratio: float) -> Slice:
    return blueprint.prefix(ratio)


def narrower(priced: Priced, ratios: Iterable[float]) -> list[Priced]:
    """The parts of those ratios that are below a slice's share."""
    return [priced.within(ratio) for ratio in ratios if ratio < priced.width - SAME]


def divergence(teacher: Tensor, output: Tensor) -> Tensor:
    """KL[teacher ‖ output] per sample, of logits [B, …, C] (specification §1.7).

    Positions of a sequence are averaged within a sample, as the task's loss does it.
    """
    taught, own = teacher.log_softmax(-1), output.log_softmax(-1)
    values = (taught.exp() * (taught - own)).sum(-1)
    return values if values.ndim == 1 else values.flatten(1).mean(1)


def judged(
    site: TrainingContext, batch: Minibatch, *, labels: bool, teacher: Tensor | None
) -> Judge:
    """The objective of a part: the task's loss, the divergence from the teacher, or both."""

    def judge(output: Tensor) -> Tensor:
        total = output.new_zeros(())
        if labels:
            total = total + averaged(losses(site.task, output, batch.y), batch.valid)
        if teacher is not None:
            total = total + averaged(divergence(teacher, output), batch.valid)
        return total

    return judge


def gradients(base: Gradient, where: Inner, small: Loose, batch: Minibatch, judge: Judge) -> Params:
    """Of the trained parameters of a part, in its own coordinates.

    What it does to running statistics is forgotten: those are the whole model's.
    """
    trained = {name: small["params"][name] for name in where.site.trained}

    def objective(values: Params) -> tuple[Tensor, Params]:
        output, _ = base.output(where.site, {**small["params"], **values}, small, batch)
        return judge(output), {}

    return differentiated(objective, trained)[0]


def new_columns(where: Inner, before: float, device: str) -> Params:
    """Which coordinates of a part do not belong to the narrower part `before`, as booleans."""
    return _new(where.site.blueprint, before, device)


@lru_cache(maxsize=1024)
def _new(blueprint: Blueprint, before: float, device: str) -> Params:
    with plain_tensors():
        masks = {
            name: torch.ones(blueprint.shape(name), dtype=torch.bool, device=device)
            for name in blueprint.params
        }
        if before:
            old = blueprint.prefix(before)
            for name, mask in masks.items():
                mask[place(name, old, blueprint, device)] = False
    return masks


def expected(works: Iterable[Work], draws: float) -> Work:
    """The work of so many draws, when each is as likely; nothing if there are none."""
    each = list(works)
    often = draws / max(1, len(each))
    return together(*(_times(work, often) for work in each))


def together(*works: Work) -> Work:
    """One after the other; memory is that of the most demanding."""
    return Work(
        flops=sum(work.flops for work in works),
        memory=max((work.memory for work in works), default=0.0),
        calls=sum(work.calls for work in works),
        moved=sum(work.moved for work in works),
    )


def _times(work: Work, factor: float) -> Work:
    return Work(work.flops * factor, work.memory, work.calls * factor, work.moved * factor)
