"""Leading parts of the model one after the other, from narrow to wide, each with a step of its own.

How the optimiser's memory takes part in these steps is open in the paper, and decisive; see
`Progressive.momentum_rule`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, get_args

import numpy as np
import torch
from torch import Tensor

from anyfleet.core.messages import Params
from anyfleet.core.objectives import Task, losses
from anyfleet.core.slots import Loose, Minibatch, TrainingContext
from anyfleet.core.time_and_energy import Work
from anyfleet.elastic import Priced
from anyfleet.errors import refuse
from anyfleet.formulas.sub_models import progressive_widths
from anyfleet.papers import FEDRESCUE, Paper
from anyfleet.parts.train.gradient import FLOAT_BYTES, UPDATE_PASSES, Gradient, averaged
from anyfleet.parts.train.nested import (
    NESTED_WIDTHS,
    Inner,
    Judge,
    Nested,
    expected,
    gradients,
    inner,
    judged,
    narrower,
    new_columns,
    together,
)
from anyfleet.parts.train.optimisers import Optimiser

MomentumRule = Literal["final", "masked", "literal"]

_WRITTEN = 2  # a copy of the model with the new columns in it: read, write


class _Stepwise(Nested, Protocol):
    """Steps of drawn parts, narrow before wide, then one of the whole model (specification §1.7).

    A minibatch has `samples` parts: up to one less, distinct, narrower than the device's share, and
    last the whole of what it holds. Teacher is the whole model as it was before the minibatch, in
    the mode and with the dropout of training; the loss reported is that of this very pass, or of
    the last one where nobody is taught.
    """

    momentum_rule: MomentumRule
    freezes: ClassVar[bool]  # a step leaves the columns of narrower parts alone

    @property
    def distils(self) -> bool:
        """Whether any part learns from the whole model."""

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

    def teaches(self, narrower: bool) -> bool:
        """Whether a part learns from the whole model, too."""

    @property
    def numbers(self) -> int:
        return len(self.nested_widths)

    def visited(self, share: float, choice: tuple[float, ...]) -> list[float]:
        """The ratios of one minibatch at a device of that share, ascending."""
        ratios: list[float] = progressive_widths(
            np.array(self.nested_widths), share, self.samples, np.array(choice)
        ).tolist()
        return ratios

    def work(self, priced: Priced, processed: int, local_steps: int) -> Work:
        final = self.base.work(priced, processed, local_steps)
        if not self.samples:
            return final
        parts = narrower(priced, self.nested_widths)
        count = min(self.samples - 1, len(parts))
        base, sparse = self._of_parts(), self.momentum_rule != "literal"
        final = replace(final, memory=final.memory + self._held(priced))
        small, wide = (
            expected((base.effort(p, processed, local_steps, updates=sparse) for p in group), draws)
            for group, draws in ((parts, count), ([priced], 1))
        )
        often = _WRITTEN if sparse else UPDATE_PASSES
        written = Work(
            0.0, 0.0, 0.0, float(local_steps * (count + 1) * often * base.state_bytes(priced))
        )
        teacher = [_forward(priced, processed, local_steps)] if self.distils else []
        return together(final, *teacher, small, wide, written)

    def _held(self, priced: Priced) -> int:
        """Bytes besides those of the last step: what the minibatch started from, and copies."""
        state = self._of_parts().state_bytes(priced)
        trained = FLOAT_BYTES * priced.sample.sent_params
        return state + {"final": 0, "masked": state, "literal": trained}[self.momentum_rule]

    def _of_parts(self) -> Gradient:
        """How parts are trained."""
        plain = self.base.optimiser.plain() if self.momentum_rule == "final" else None
        return self.base if plain is None else replace(self.base, optimiser=plain)

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
        output = self._teacher(context, state, batch)
        now, before = state, 0.0
        for ratio in self.visited(context.width, draw):
            teacher = output if self.teaches(ratio < context.width) else None
            judge = judged(context, batch, labels=True, teacher=teacher)
            columns = self._columns(inner(context, ratio), before, now, batch, judge)
            now = _RULES[self.momentum_rule](
                self.base.optimiser, columns, now, hyperparameters["lr"]
            )
            del columns
            before = ratio if self.freezes else 0.0
        new = self.base.step(context, now, batch, hyperparameters, draw)
        if output is None:
            return new
        loss = averaged(losses(context.task, output, batch.y), batch.valid)
        return {**new, "loss": state["loss"] + loss * batch.valid.sum().to(loss.dtype)}

    def _teacher(self, site: TrainingContext, state: Loose, batch: Minibatch) -> Tensor | None:
        """What the whole model says before the minibatch, if anybody learns from it."""
        if not self.distils:
            return None
        output, _ = self.base.output(site, state["params"], state, batch)
        return output

    def _columns(
        self, where: Inner, before: float, state: Loose, batch: Minibatch, judge: Judge
    ) -> "Columns":
        """Those of a part that the narrower part `before` does not have, and their gradients."""
        small = where.state(state)
        mask = new_columns(where, before, str(batch.valid.device))
        found = gradients(self.base, where, small, batch, judge)
        found = self.base.pulled(found, small["params"], small["start"])
        found = {name: torch.where(mask[name], value, 0.0) for name, value in found.items()}
        return Columns(where, mask, self.base.limited(found))


@dataclass(frozen=True)
class Progressive(_Stepwise):
    """A part's step moves only the columns that no narrower part has (FedResCuE, specification §1.7).

    Without `distil` parts learn from labels only (FedSeq). `momentum_rule`: "final", parts take
    plain steps, without memory of earlier ones, and momentum acts in the last step of the
    minibatch, that of the whole model; "masked", all steps share one memory, used and renewed where
    they move something; "literal", only gradients are masked, so that momentum and weight decay go
    on moving all columns in every step.
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
    """A part's step moves all its columns, those of narrower parts again (FedRush, specification §1.7).

    Only parts narrower than the device's model learn from it, unless `gated` is off, as the paper
    prints it: the model has moved since it became the teacher, and diverges from itself.
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


def _forward(priced: Priced, processed: int, steps: int) -> Work:
    """Of the teacher."""
    sample, batch = priced.sample, priced.batch
    return Work(
        flops=float(processed * sample.forward_flops),
        memory=0.0,
        calls=float(steps * batch.forward_calls),
        moved=float(steps * batch.forward_moved),
    )


class Columns(NamedTuple):
    """What a step moves: coordinates of a part, and their gradients, which are zero elsewhere."""

    where: Inner
    mask: Params
    gradients: Params

    def old(self, state: Loose) -> dict[str, Tensor]:
        return self.where.cut({name: state["params"][name] for name in self.gradients})

    def written(self, new: Params, tree: Params) -> dict[str, Tensor]:
        """The tree with new values in these columns."""
        old, written = self.where.cut({name: tree[name] for name in new}), dict(tree)
        for name, value in new.items():
            kept = torch.where(self.mask[name], value, old[name])
            written[name] = self.where.paste(name, kept, tree[name])
        return written


def _final(optimiser: Optimiser, columns: Columns, state: Loose, lr: Tensor) -> Loose:
    plain = optimiser.plain()
    assert plain is not None, "refused when the trainer was made"
    old = columns.old(state)
    new, _ = plain.update(old, columns.gradients, plain.init(old), lr)
    return {**state, "params": columns.written(new, state["params"])}


def _masked(optimiser: Optimiser, columns: Columns, state: Loose, lr: Tensor) -> Loose:
    memory = state["optimiser"]
    trees = {slot: tree for slot, tree in memory.items() if not isinstance(tree, Tensor)}
    small = {**memory, **{slot: columns.where.cut(tree) for slot, tree in trees.items()}}
    new, after = optimiser.update(columns.old(state), columns.gradients, small, lr)
    kept = {slot: columns.written(after[slot], tree) for slot, tree in trees.items()}
    params = columns.written(new, state["params"])
    return {**state, "params": params, "optimiser": {**after, **kept}}


def _literal(optimiser: Optimiser, columns: Columns, state: Loose, lr: Tensor) -> Loose:
    trained = {name: state["params"][name] for name in columns.gradients}
    spread = {
        name: columns.where.paste(name, value, torch.zeros_like(trained[name]))
        for name, value in columns.gradients.items()
    }
    new, after = optimiser.update(trained, spread, state["optimiser"], lr)
    return {**state, "params": {**state["params"], **new}, "optimiser": after}


_Rule = Callable[[Optimiser, Columns, Loose, Tensor], Loose]
_RULES: Mapping[MomentumRule, _Rule] = MappingProxyType(
    {"final": _final, "masked": _masked, "literal": _literal}
)
