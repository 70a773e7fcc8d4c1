"""Training that leaves the leading columns of a model as they came."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from anyfleet.core.slots import Minibatch, TrainingContext, TrainingState
from anyfleet.elastic import cut, paste
from anyfleet.papers import FEDRESCUE, Paper
from anyfleet.parts.train.gradient import Gradient, MinibatchGradient


@dataclass(frozen=True)
class FrozenPrefix(Gradient):
    """Gradient descent that leaves the leading part of a sub-model as it came.

    A sub-model no wider than `frozen` is trained as a whole. So a narrow device learns first, and
    a wide one adds columns to what it learned (FedResCuE's Table 1).
    """

    frozen: float = 0.5  # width that stays as it came

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.frozen < 1:
            raise ValueError(f"FrozenPrefix.frozen must lie in (0, 1), got {self.frozen}.")

    @property
    def papers(self) -> tuple[Paper, ...]:
        """The papers whose options are on."""
        return (*super().papers, FEDRESCUE)

    def descend(
        self,
        context: TrainingContext,
        state: TrainingState,
        found: MinibatchGradient,
        batch: Minibatch,
        hyperparameters: Mapping[str, Tensor],
    ) -> TrainingState:
        new = super().descend(context, state, found, batch, hyperparameters)
        if self.frozen >= context.width:
            return new
        # Momentum and decay act on every coordinate by itself: those put back are as if untouched.
        blueprint = context.blueprint
        part = blueprint.prefix(self.frozen)
        kept = cut({name: state["params"][name] for name in context.trained}, part, blueprint)
        return {**new, "params": paste(kept, new["params"], part, blueprint)}
