"""Trainers that give nested models a step each, one after the other, from narrow to wide.

How the optimiser's state takes part in these steps is open in the paper, and decisive; see
`Progressive.momentum_rule`.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from anyfleet.core.messages import Params
from anyfleet.core.objectives import Task, losses
from anyfleet.core.slots import Minibatch, TrainingContext, TrainingState
from anyfleet.core.training_work import (
    FLOAT_BYTES,
    UPDATE_PASSES,
    Counted,
    Work,
    forward_work,
    passes_work,
    state_bytes,
    update_work,
)
from anyfleet.elastic import Priced
from anyfleet.errors import refuse
from anyfleet.formulas.sub_models import progressive_widths
from anyfleet.papers import FEDRESCUE, Paper
from anyfleet.parts.train.gradient import Gradient, averaged
from anyfleet.parts.train.nested import (
    NESTED_WIDTHS,
    Nested,
    NestedModel,
    OutputLoss,
    expected,
    narrower,
    nested_model,
    output_loss,
    part_gradients,
    rank,
    ranks,
)
from anyfleet.parts.train.optimisers import Optimiser

MomentumRule = Literal["final", "masked", "literal"]

Substep = float | Literal["teacher", "whole"]  # a number is the width of a part

_WRITTEN = 2  # a copy of the model with the new coordinates in it: read, write


class _Stepwise(Nested):
    """Steps of drawn parts, narrow before wide, then one of the whole sub-model (§1.7).

    A minibatch has `samples` parts: up to one less, distinct, narrower than the device's width, and
    last the whole sub-model. The teacher is the whole sub-model as it was before the minibatch, in
    the mode and with the dropout of training; the loss reported is that of this very pass, or of
    the last one where nobody is taught.
    """

    momentum_rule: MomentumRule
    freezes: ClassVar[bool]  # a step leaves the coordinates of narrower parts alone

    @property
    @abstractmethod
    def distils(self) -> bool:
        """Whether any part learns from the whole sub-model."""

    def __post_init__(self) -> None:
        refuse(self._faults())

    def _faults(self) -> Iterator[str]:
        yield from super()._faults()
        name = type(self).__name__
        if self.momentum_rule not in get_args(MomentumRule):
            known = ", ".join(get_args(MomentumRule))
            yield f"{name}.momentum_rule must be one of {known}; got {self.momentum_rule!r}."
        if self.momentum_rule == "final" and self.base.optimiser.plain() is None:
            yield (
                f'{name}.momentum_rule = "final" takes plain steps with the parts, and '
                f"{type(self.base.optimiser).__name__} has none without its averages; use Sgd, or "
                'momentum_rule = "masked" or "literal".'
            )

    @abstractmethod
    def teaches(self, narrower: bool) -> bool:
        """Return whether a part learns from the whole sub-model, too."""

    @property
    def draws_per_step(self) -> int:
        return len(self.nested_widths)

    def visited(self, width: float, draw: tuple[float, ...]) -> list[float]:
        """Return the widths of one minibatch on a device of that width, ascending."""
        widths: list[float] = progressive_widths(
            np.array(self.nested_widths), width, self.samples, np.array(draw)
        ).tolist()
        return widths

    def work(self, priced: Priced, processed: Counted, local_steps: Counted) -> Work:
        final = self.base.work(priced, processed, local_steps)
        if not self.samples:
            return final
        parts = narrower(priced, self.nested_widths)
        count = min(self.samples - 1, len(parts))
        copies, sparse = self._copies_of_parts, self.momentum_rule != "literal"

        def step(part: Priced) -> Work:
            passes = passes_work(part, processed, local_steps)
            return passes + update_work(part, local_steps, copies=copies) if sparse else passes

        often = _WRITTEN if sparse else UPDATE_PASSES
        written = Work(
            flops=0.0,
            memory=final.memory + self._held_bytes(priced),
            calls=0.0,
            moved=float((count + 1) * often * state_bytes(priced, copies)) * local_steps,
        )
        if self.distils:
            final = final + forward_work(priced, processed, local_steps)
        return final + expected(map(step, parts), count) + step(priced) + written

    def _held_bytes(self, priced: Priced) -> int:
        """Return the bytes besides those of the last step.

        They hold what the minibatch started from, and copies.
        """
        state = state_bytes(priced, self._copies_of_parts)
        trained = FLOAT_BYTES * priced.sample.sent_params
        return state + {"final": 0, "masked": state, "literal": trained}[self.momentum_rule]

    @property
    def _copies_of_parts(self) -> int:
        """The tensors that the optimiser keeps for each parameter while it trains parts."""
        plain = self.base.optimiser.plain() if self.momentum_rule == "final" else None
        return (plain or self.base.optimiser).copies

    def substeps(self, context: TrainingContext, draw: Any) -> tuple[Substep, ...]:
        if not self.samples:
            return ("whole",)
        taught: tuple[Substep, ...] = ("teacher",) if self.distils else ()
        return *taught, *self.visited(context.width, draw), "whole"

    def substep(
        self,
        context: TrainingContext,
        state: TrainingState,
        batch: Minibatch,
        hyperparameters: Mapping[str, Tensor],
        substep: Substep,
    ) -> TrainingState:
        if substep == "teacher":
            taught = {**state, "teacher": self._teacher(context, state, batch)}
            return self._frozen(taught, 0.0, batch)
        if substep == "whole":
            return self._whole(context, state, batch, hyperparameters)
        teacher = state["teacher"] if self.teaches(substep < context.width) else None
        loss = output_loss(context, batch, labels=True, teacher=teacher)
        moved = self._moved(nested_model(context, substep), state, batch, loss)
        new = _RULES[self.momentum_rule](self.base.optimiser, moved, state, hyperparameters["lr"])
        return self._frozen(new, substep, batch)

    def _frozen(self, state: TrainingState, width: float, batch: Minibatch) -> TrainingState:
        """Return the state with the width whose coordinates later parts leave alone, as a rank."""
        if not self.freezes:
            return state
        number = rank(width, self.nested_widths)
        like: dict[str, Any] = {"dtype": torch.int16, "device": batch.valid.device}
        return {**state, "frozen": torch.full((), number, **like)}

    def _whole(
        self,
        context: TrainingContext,
        state: TrainingState,
        batch: Minibatch,
        hyperparameters: Mapping[str, Tensor],
    ) -> TrainingState:
        """Return the state after the step of the whole sub-model, which ends a minibatch."""
        own = {name: value for name, value in state.items() if name not in ("teacher", "frozen")}
        new = self.base.step(context, own, batch, hyperparameters, None)
        if "teacher" not in state:
            return new
        before_step = averaged(losses(context.task, state["teacher"], batch.y), batch.valid)
        count = batch.valid.sum().to(before_step.dtype)
        return {**new, "loss": state["loss"] + before_step * count}

    def _teacher(self, context: TrainingContext, state: TrainingState, batch: Minibatch) -> Tensor:
        """Return the output of the whole sub-model before the minibatch."""
        output, _ = self.base.output(context, state["params"], state, batch)
        return output

    def _moved(
        self,
        part: NestedModel,
        state: TrainingState,
        batch: Minibatch,
        loss: OutputLoss,
    ) -> "MovedCoordinates":
        """Return the coordinates of a part that are not frozen, and their gradients."""
        small = part.state(state)
        numbers = ranks(part, self.nested_widths, str(batch.valid.device))
        mask = {name: number > state.get("frozen", 0) for name, number in numbers.items()}
        found = part_gradients(self.base, part, small, batch, loss)
        found = self.base.pulled(found, small["params"], small["start"])
        found = {name: torch.where(mask[name], value, 0.0) for name, value in found.items()}
        return MovedCoordinates(part, mask, self.base.limited(found))


@dataclass(frozen=True)
class Progressive(_Stepwise):
    """Steps that move only the coordinates that no narrower part has (FedResCuE, §1.7).

    Without `distil` parts learn from labels only (FedSeq). `momentum_rule`: "final", parts take
    plain steps, without momentum, which acts in the last step of the minibatch, that of the whole
    sub-model; "masked", all steps share one optimiser state, used and renewed where they move
    something; "literal", only gradients are masked, so that momentum and weight decay go on moving
    all coordinates in every step.
    """

    base: Gradient = field(default_factory=Gradient)
    nested_widths: tuple[float, ...] = NESTED_WIDTHS
    samples: int = 4
    distil: bool = True
    momentum_rule: MomentumRule = "final"
    papers: ClassVar[tuple[Paper, ...]] = (FEDRESCUE,)
    freezes: ClassVar[bool] = True

    @property
    def distils(self) -> bool:
        return self.distil

    def teaches(self, narrower: bool) -> bool:
        return self.distil and narrower

    def misfit(self, task: Task) -> str:
        return super().misfit(task) if self.distil else ""


@dataclass(frozen=True)
class Rush(_Stepwise):
    """Steps that move all coordinates of a part, those of narrower parts again (FedRush, §1.7).

    Only parts narrower than the device's sub-model learn from it, unless `gated` is off, as the
    paper prints it: the sub-model has moved since it became the teacher, and diverges from itself.
    """

    base: Gradient = field(default_factory=Gradient)
    nested_widths: tuple[float, ...] = NESTED_WIDTHS
    samples: int = 4
    gated: bool = True
    momentum_rule: MomentumRule = "final"
    papers: ClassVar[tuple[Paper, ...]] = (FEDRESCUE,)
    freezes: ClassVar[bool] = False
    distils: ClassVar[bool] = True

    def teaches(self, narrower: bool) -> bool:
        return narrower or not self.gated


class MovedCoordinates(NamedTuple):
    """What a step moves: coordinates of a part, and their gradients, which are zero elsewhere."""

    part: NestedModel
    mask: Params
    gradients: Params

    def old(self, state: TrainingState) -> dict[str, Tensor]:
        """Return the part's values before the step."""
        return self.part.cut({name: state["params"][name] for name in self.gradients})

    def written(self, new: Params, tree: Params) -> dict[str, Tensor]:
        """Return the tree with new values in these coordinates."""
        old, written = self.part.cut({name: tree[name] for name in new}), dict(tree)
        for name, value in new.items():
            kept = torch.where(self.mask[name], value, old[name])
            written[name] = self.part.paste(name, kept, tree[name])
        return written


def _final(
    optimiser: Optimiser, moved: MovedCoordinates, state: TrainingState, lr: Tensor
) -> TrainingState:
    plain = optimiser.plain()
    assert plain is not None, "refused when the trainer was made"
    old = moved.old(state)
    new, _ = plain.update(old, moved.gradients, plain.init(old), lr)
    return {**state, "params": moved.written(new, state["params"])}


def _masked(
    optimiser: Optimiser, moved: MovedCoordinates, state: TrainingState, lr: Tensor
) -> TrainingState:
    kept = state["optimiser"]
    trees = {name: tree for name, tree in kept.items() if not isinstance(tree, Tensor)}
    small = {**kept, **{name: moved.part.cut(tree) for name, tree in trees.items()}}
    new, after = optimiser.update(moved.old(state), moved.gradients, small, lr)
    whole = {name: moved.written(after[name], tree) for name, tree in trees.items()}
    params = moved.written(new, state["params"])
    return {**state, "params": params, "optimiser": {**after, **whole}}


def _literal(
    optimiser: Optimiser, moved: MovedCoordinates, state: TrainingState, lr: Tensor
) -> TrainingState:
    trained = {name: state["params"][name] for name in moved.gradients}
    spread = {
        name: moved.part.paste(name, value, torch.zeros_like(trained[name]))
        for name, value in moved.gradients.items()
    }
    new, after = optimiser.update(trained, spread, state["optimiser"], lr)
    return {**state, "params": {**state["params"], **new}, "optimiser": after}


_Rule = Callable[[Optimiser, MovedCoordinates, TrainingState, Tensor], TrainingState]
_RULES: Mapping[MomentumRule, _Rule] = MappingProxyType(
    {"final": _final, "masked": _masked, "literal": _literal}
)
