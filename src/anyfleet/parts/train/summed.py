"""Trainers that sum the gradients of the whole sub-model and of nested models, for one step."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
from torch import Tensor

from anyfleet.core.messages import Params
from anyfleet.core.objectives import losses
from anyfleet.core.slots import Minibatch, TrainingContext, TrainingState
from anyfleet.core.training_work import FLOAT_BYTES, Counted, Work, passes_work
from anyfleet.elastic import Priced
from anyfleet.errors import refuse
from anyfleet.formulas.sub_models import sampled_widths
from anyfleet.papers import FEDRESCUE, FJORD, SLIMMABLE, Paper
from anyfleet.parts.train.gradient import Gradient, MinibatchGradient, averaged, differentiated
from anyfleet.parts.train.nested import (
    NESTED_WIDTHS,
    SAME,
    Nested,
    NestedModel,
    expected,
    narrower,
    nested_model,
    output_loss,
    part_gradients,
)

# None: plain training; a number: the width of a part whose gradient is added.
Substep = float | Literal["whole", "descend"] | None

_ADDED = 5  # a part's gradients to the sum: read both, write; and a copy of the sum: read, write


class _Summed(Nested):
    """One step along the sum of the whole sub-model's gradient and of those of drawn parts.

    Each of the `samples` widths of a minibatch is drawn by itself, as the paper writes it, from
    those up to the device's width (or is this width, if none is narrower), and may come twice. The
    teacher is the whole sub-model in the very pass that trains it, so with its dropout and its
    normalisation: where a part is the whole sub-model nothing diverges.
    """

    labelled: ClassVar[bool]  # parts learn from labels, too

    def __post_init__(self) -> None:
        refuse(self._faults())

    @property
    def draws_per_step(self) -> int:
        return self.samples

    def drawn(self, width: float, draw: tuple[float, ...]) -> list[float]:
        """Return the widths of one minibatch on a device of that width."""
        widths: list[float] = sampled_widths(
            np.array(self.nested_widths), width, np.array(draw)
        ).tolist()
        return widths

    def work(self, priced: Priced, processed: Counted, local_steps: Counted) -> Work:
        whole = self.base.work(priced, processed, local_steps)
        if not self.samples:
            return whole
        parts = narrower(priced, self.nested_widths)
        if not parts or any(abs(width - priced.width) <= SAME for width in self.nested_widths):
            parts.append(priced)  # the device's own width is one of them, or all there is
        trained = FLOAT_BYTES * priced.sample.sent_params
        # What is summed is there beside the pass of a part, which may be as wide as the whole.
        added = Work(
            0.0, whole.memory + trained, 0.0, float(self.samples * _ADDED * trained) * local_steps
        )
        passes = [passes_work(part, processed, local_steps) for part in parts]
        return whole + expected(passes, self.samples) + added

    def substeps(self, context: TrainingContext, draw: Any) -> tuple[Substep, ...]:
        if not self.samples:
            return (None,)
        return "whole", *self.drawn(context.width, draw), "descend"

    def substep(
        self,
        context: TrainingContext,
        state: TrainingState,
        batch: Minibatch,
        hyperparameters: Mapping[str, Tensor],
        substep: Substep,
    ) -> TrainingState:
        if substep is None:
            return self.base.step(context, state, batch, hyperparameters, None)
        if substep == "whole":
            total, loss, (buffers, output) = _whole(self.base, context, state, batch)
            return {
                **state,
                "found": {"gradients": total, "loss": loss, "buffers": buffers, "teacher": output},
            }
        found = state["found"]
        if substep == "descend":
            own = {name: value for name, value in state.items() if name != "found"}
            gradient = MinibatchGradient(found["gradients"], found["loss"], found["buffers"])
            return self.base.descend(context, own, gradient, batch, hyperparameters)
        objective = output_loss(context, batch, labels=self.labelled, teacher=found["teacher"])
        part = nested_model(context, substep)
        gradients = part_gradients(self.base, part, part.state(state), batch, objective)
        total = _added(found["gradients"], gradients, part)
        return {**state, "found": {**found, "gradients": total}}


@dataclass(frozen=True)
class Slim(_Summed):
    """Slimmable training: parts learn from the whole sub-model only (specification §1.7)."""

    base: Gradient = field(default_factory=Gradient)
    nested_widths: tuple[float, ...] = NESTED_WIDTHS
    samples: int = 1
    papers: ClassVar[tuple[Paper, ...]] = (SLIMMABLE, FEDRESCUE)
    labelled: ClassVar[bool] = False


@dataclass(frozen=True)
class Fjord(_Summed):
    """FjORD's training: parts learn from labels and from the whole sub-model (§1.7)."""

    base: Gradient = field(default_factory=Gradient)
    nested_widths: tuple[float, ...] = NESTED_WIDTHS
    samples: int = 1
    papers: ClassVar[tuple[Paper, ...]] = (FJORD, FEDRESCUE)
    labelled: ClassVar[bool] = True


def _whole(
    base: Gradient, context: TrainingContext, state: TrainingState, batch: Minibatch
) -> tuple[Params, Tensor, tuple[Params, Tensor]]:
    """Return gradients, loss and buffers of the whole sub-model, and its output, which teaches."""
    trained = {name: state["params"][name] for name in context.trained}

    def objective(values: Params) -> tuple[Tensor, tuple[Params, Tensor]]:
        output, buffers = base.output(context, {**state["params"], **values}, state, batch)
        return averaged(losses(context.task, output, batch.y), batch.valid), (buffers, output)

    return differentiated(objective, trained)


def _added(total: Params, gradients: Params, part: NestedModel) -> dict[str, Tensor]:
    """Return the gradients of the whole sub-model with those of a part added."""
    old = part.cut(total)
    return {n: part.paste(n, old[n] + gradients[n], value) for n, value in total.items()}
