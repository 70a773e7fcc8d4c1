"""Server optimisers: the change that any aggregator proposes is taken as a gradient."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from anyfleet.arguments import checked
from anyfleet.core.messages import Aggregated, Params
from anyfleet.core.slots import Aggregate, State
from anyfleet.core.updates import Updates
from anyfleet.core.view import View
from anyfleet.papers import FEDADAM, Paper
from anyfleet.parts.aggregate.mean import Mean


class ServerOptimiser(Protocol):
    """The rule that turns the change an aggregator proposes into the change that is made."""

    def init(self, like: Tensor) -> dict[str, Tensor]:
        """Return the state of a tensor before its first change."""

    def step(self, change: Tensor, state: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the change that is made, and the state after it."""


@checked
@dataclass(frozen=True)
class ServerSgd:
    """Momentum on the proposed change: `velocity = momentum * velocity + change`, times `lr`."""

    lr: float = 1.0  # of the server
    momentum: float = 0.0  # share of the velocity that stays

    def __post_init__(self) -> None:
        if not self.lr > 0 or not 0 <= self.momentum < 1:
            raise ValueError(
                f"ServerSgd needs lr > 0 and momentum in [0, 1), got {self.lr} and {self.momentum}."
            )

    def init(self, like: Tensor) -> dict[str, Tensor]:
        return {"velocity": torch.zeros_like(like)}

    def step(self, change: Tensor, state: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        velocity = self.momentum * state["velocity"] + change
        return self.lr * velocity, {"velocity": velocity}


@checked
@dataclass(frozen=True)
class ServerAdam:
    """Adam on the proposed change (FedAdam); `epsilon` is the adaptivity of that paper."""

    lr: float = 0.01  # of the server
    betas: tuple[float, float] = (0.9, 0.99)  # decay of the two moments
    epsilon: float = 1e-3

    papers: ClassVar[tuple[Paper, ...]] = (FEDADAM,)

    def __post_init__(self) -> None:
        if not self.lr > 0 or not self.epsilon > 0 or not all(0 <= b < 1 for b in self.betas):
            raise ValueError(
                "ServerAdam needs lr > 0, epsilon > 0 and betas in [0, 1), got "
                f"{self.lr}, {self.epsilon} and {self.betas}."
            )

    def init(self, like: Tensor) -> dict[str, Tensor]:
        return {"mean": torch.zeros_like(like), "square": torch.zeros_like(like)}

    def step(self, change: Tensor, state: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        first, second = self.betas
        mean = first * state["mean"] + (1 - first) * change
        square = second * state["square"] + (1 - second) * change.square()
        return self.lr * mean / (square.sqrt() + self.epsilon), {"mean": mean, "square": square}


class _Kept(NamedTuple):
    inner: State
    slots: Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True)
class ServerOptimised(Aggregate):
    """An aggregator followed by a server optimiser.

    A coordinate moves only where somebody counted. Those that nobody trained do not move, nor do
    those that only devices without samples trained, or devices that an inner Subset `excluded`.
    """

    inner: Aggregate = field(default_factory=Mean)  # proposes the change
    optimiser: ServerOptimiser = field(default_factory=ServerSgd)  # makes the step

    def init(self, view: View) -> _Kept:
        return _Kept(self.inner.init(view), {})

    def learn(
        self,
        updates: Updates | None,
        diagnostics: Mapping[str, Any],
        view: View,
        state: _Kept,
    ) -> _Kept:
        return state._replace(inner=self.inner.learn(updates, diagnostics, view, state.inner))

    def diagnostics(self, state: _Kept) -> Mapping[str, Any]:
        return self.inner.diagnostics(state.inner)

    def __call__(
        self, model: Params, updates: Updates, view: View, state: _Kept, key: Tensor
    ) -> Aggregated:
        proposed = self.inner(model, updates, view, state.inner, key)
        moved, slots = {}, dict(state.slots)
        for name, covered in _counted(updates, proposed.diagnostics).covered().items():
            old = model[name]
            before = slots.get(name) or self.optimiser.init(old)
            change, after = self.optimiser.step(proposed.model[name] - old, before)
            moved[name] = torch.where(covered, old + change, old)
            slots[name] = {n: torch.where(covered, after[n], before[n]) for n in before}
        kept = _Kept(proposed.state, slots)
        return Aggregated({**proposed.model, **moved}, kept, proposed.diagnostics)


def _counted(updates: Updates, diagnostics: Mapping[str, Any]) -> Updates:
    """Return the updates that counted in a round with these diagnostics."""
    # Of a device that sent more than one update, only some may be excluded.
    sent, excluded = Counter(updates.device.tolist()), Counter(diagnostics.get("excluded", ()))
    out = [excluded[device] >= sent[device] for device in updates.device.tolist()]
    return updates.take(np.flatnonzero((updates.samples > 0) & ~np.array(out, dtype=bool)))
