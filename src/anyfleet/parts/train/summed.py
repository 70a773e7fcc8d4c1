"""Gradients of the whole model and of some of its leading parts, summed for one step."""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import numpy as np
from torch import Tensor

from anyfleet.core.messages import Params
from anyfleet.core.objectives import losses
from anyfleet.core.slots import Loose, Minibatch, TrainingContext
from anyfleet.core.time_and_energy import Work
from anyfleet.elastic import Priced
from anyfleet.errors import refuse
from anyfleet.formulas.sub_models import sampled_widths
from anyfleet.papers import FEDRESCUE, FJORD, SLIMMABLE, Paper
from anyfleet.parts.train.gradient import FLOAT_BYTES, Gradient, Slope, averaged, differentiated
from anyfleet.parts.train.nested import (
    NESTED_WIDTHS,
    SAME,
    Inner,
    Nested,
    expected,
    gradients,
    inner,
    judged,
    narrower,
    together,
)

_ADDED = 5  # a part's gradients to the sum: read both, write; and a copy of the sum: read, write


class _Summed(Nested, Protocol):
    """One step down the sum of the whole model's gradient and of those of drawn parts.

    Each of the `samples` ratios of a minibatch is drawn by itself, as the paper writes it, from
    those up to the device's share (or is this share, if none is narrower), and may come twice. The
    teacher is the whole model in the very pass that trains it, so with its dropout and its
    normalisation: where a part is the whole model nothing diverges.
    """

    labelled: ClassVar[bool]  # parts learn from labels, too

    def __post_init__(self) -> None:
        refuse(self._faults())

    @property
    def numbers(self) -> int:
        return self.samples

    def drawn(self, share: float, choice: tuple[float, ...]) -> list[float]:
        """The ratios of one minibatch at a device of that share."""
        ratios: list[float] = sampled_widths(
            np.array(self.nested_widths), share, np.array(choice)
        ).tolist()
        return ratios

    def work(self, priced: Priced, processed: int, local_steps: int) -> Work:
        whole = self.base.work(priced, processed, local_steps)
        if not self.samples:
            return whole
        parts = narrower(priced, self.nested_widths)
        if not parts or any(abs(ratio - priced.width) <= SAME for ratio in self.nested_widths):
            parts.append(priced)  # the device's own share is one of the ratios, or all there is
        trained = FLOAT_BYTES * priced.sample.sent_params
        # What is summed is there beside the pass of a part, which may be as wide as the whole.
        whole = replace(whole, memory=whole.memory + trained)
        works = [self.base.effort(part, processed, local_steps, updates=False) for part in parts]
        added = Work(0.0, 0.0, 0.0, float(self.samples * local_steps * _ADDED * trained))
        return together(whole, expected(works, self.samples), added)

    def step(
        self,
        context: TrainingContext,
        state: Loose,
        batch: Minibatch,
        hyperparameters: Loose,
        draw: Any,
    ) -> Loose:
        if not self.samples:
            return self.base.step(context, state, batch, hyperparameters, draw)
        total, loss, (buffers, output) = _whole(self.base, context, state, batch)
        judge = judged(context, batch, labels=self.labelled, teacher=output)
        for ratio in self.drawn(context.width, draw):
            where = inner(context, ratio)
            part = gradients(self.base, where, where.state(state), batch, judge)
            total = _added(total, part, where)
        return self.base.descend(state, Slope(total, loss, buffers), batch, hyperparameters)


@dataclass(frozen=True)
class Slim(_Summed):
    """Parts learn from the whole model only (slimmable training, specification §1.7)."""

    base: Gradient = field(default_factory=Gradient)
    nested_widths: tuple[float, ...] = NESTED_WIDTHS
    samples: int = 1
    papers: ClassVar[tuple[Paper, ...]] = (SLIMMABLE, FEDRESCUE)
    labelled: ClassVar[bool] = False


@dataclass(frozen=True)
class Fjord(_Summed):
    """Parts learn from labels and from the whole model (specification §1.7)."""

    base: Gradient = field(default_factory=Gradient)
    nested_widths: tuple[float, ...] = NESTED_WIDTHS
    samples: int = 1
    papers: ClassVar[tuple[Paper, ...]] = (FJORD, FEDRESCUE)
    labelled: ClassVar[bool] = True


def _whole(
    base: Gradient, site: TrainingContext, state: Loose, batch: Minibatch
) -> tuple[Params, Tensor, tuple[Params, Tensor]]:
    """Gradients, loss and buffers of the whole model, and its output, which teaches."""
    trained = {name: state["params"][name] for name in site.trained}

    def objective(values: Params) -> tuple[Tensor, tuple[Params, Tensor]]:
        output, buffers = base.output(site, {**state["params"], **values}, state, batch)
        return averaged(losses(site.task, output, batch.y), batch.valid), (buffers, output)

    return differentiated(objective, trained)


def _added(total: Params, part: Params, where: Inner) -> dict[str, Tensor]:
    """Gradients of the whole model with those of a part added."""
    old = where.cut(total)
    return {name: where.paste(name, old[name] + part[name], value) for name, value in total.items()}
