"""Local optimisers, as pure functions of tensors; their state lives for one order."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C import _functorch

from anyfleet.arguments import checked
from anyfleet.core.messages import Params

OptimiserState = dict[str, Any]


class Optimiser(Protocol):
    """A rule for one update of the trained parameters.

    Its state holds trees of tensors with the names and shapes of these, and single numbers.
    """

    @property
    def copies(self) -> int:
        """The tensors that it keeps for each trained parameter: they take memory of a device."""

    def plain(self) -> "Optimiser | None":
        """Return the same optimiser without memory of earlier steps, or None if there is none."""

    def init(self, params: Params) -> OptimiserState:
        """Return the state before the first update."""

    def update(
        self, params: Params, gradients: Params, state: OptimiserState, lr: Tensor
    ) -> tuple[dict[str, Tensor], OptimiserState]:
        """Return the new parameters and the new state."""


@checked
@dataclass(frozen=True)
class Sgd:
    """Stochastic gradient descent, with torch's conventions for momentum and weight decay."""

    momentum: float = 0.0  # share of the velocity that stays
    nesterov: bool = False  # Nesterov's form of momentum
    weight_decay: float = 0.0  # added to the gradient, times the weight

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ValueError(f"Sgd.momentum must lie in [0, 1), got {self.momentum}.")
        if self.nesterov and not self.momentum:
            raise ValueError("Sgd.nesterov needs a momentum; set Sgd.momentum, for example to 0.9.")
        if self.weight_decay < 0:
            raise ValueError(f"Sgd.weight_decay must not be negative, got {self.weight_decay}.")

    @property
    def copies(self) -> int:
        return 1 if self.momentum else 0

    def plain(self) -> "Sgd":
        return Sgd(weight_decay=self.weight_decay)

    def init(self, params: Params) -> OptimiserState:
        if not self.momentum:
            return {}
        return {"velocity": {name: torch.zeros_like(value) for name, value in params.items()}}

    def update(
        self, params: Params, gradients: Params, state: OptimiserState, lr: Tensor
    ) -> tuple[dict[str, Tensor], OptimiserState]:
        new, velocity = {}, {}
        # One by one: whatever is made in between is gone before the next.
        for n, gradient in gradients.items():
            step = gradient + self.weight_decay * params[n] if self.weight_decay else gradient
            if self.momentum:
                velocity[n] = self.momentum * state["velocity"][n] + step
                step = step + self.momentum * velocity[n] if self.nesterov else velocity[n]
            # In one pass over memory, which is what an update of a large model takes.
            new[n] = torch.addcmul(params[n], step, lr, value=-1)
        return new, {"velocity": velocity} if self.momentum else state

    def overwrite(
        self, params: Params, gradients: Params, state: OptimiserState, lr: Tensor
    ) -> tuple[dict[str, Tensor], OptimiserState]:
        """Return what `update` does; without momentum and decay, written over the parameters.

        That saves half of the memory that a step of a large model goes through.
        """
        if self.momentum or self.weight_decay:
            return self.update(params, gradients, state, lr)
        if _functorch.peek_interpreter_stack() is None:
            # In one call: where devices are trained side by side, each has to wait for its turn.
            targets, rates = [params[n] for n in gradients], [lr] * len(gradients)
            torch._foreach_addcmul_(targets, list(gradients.values()), rates, value=-1)
            return dict(params), state
        return {n: _descended(params[n], step, lr) for n, step in gradients.items()}, state


def _descended(params: Tensor, step: Tensor, lr: Tensor) -> Tensor:
    """Return a parameter of a stack after a step, written over it where it is laid out as usual.

    Torch has no rule for `addcmul_` of a stack, and would go through it device by device.
    """
    parts = params, step, lr
    if {(_functorch.maybe_get_level(t), _functorch.maybe_get_bdim(t)) for t in parts} != {(1, 0)}:
        return torch.addcmul(params, step, lr, value=-1)
    stack, steps, rates = map(_functorch.get_unwrapped, parts)
    stack.addcmul_(steps, rates.view(-1, *[1] * (stack.ndim - 1)), value=-1)
    return params


@checked
@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay."""

    betas: tuple[float, float] = (0.9, 0.999)  # decay of the two moments
    epsilon: float = 1e-8  # added to the root of the second moment
    weight_decay: float = 0.01  # decoupled, times the learning rate

    def __post_init__(self) -> None:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"AdamW.betas must lie in [0, 1), got {self.betas}.")
        if self.weight_decay < 0 or not self.epsilon > 0:
            raise ValueError(
                f"AdamW needs epsilon > 0 and weight_decay >= 0, got {self.epsilon} and "
                f"{self.weight_decay}."
            )

    @property
    def copies(self) -> int:
        return 2

    def plain(self) -> None:
        return None

    def init(self, params: Params) -> OptimiserState:
        some = next(iter(params.values()))
        return {
            "mean": {name: torch.zeros_like(value) for name, value in params.items()},
            "square": {name: torch.zeros_like(value) for name, value in params.items()},
            "count": some.new_zeros(()),
        }

    def update(
        self, params: Params, gradients: Params, state: OptimiserState, lr: Tensor
    ) -> tuple[dict[str, Tensor], OptimiserState]:
        first, second = self.betas
        count = state["count"] + 1
        mean = {n: first * state["mean"][n] + (1 - first) * g for n, g in gradients.items()}
        square = {
            n: second * state["square"][n] + (1 - second) * g.square() for n, g in gradients.items()
        }
        unbias, spread = 1 - first**count, (1 - second**count).sqrt()
        new = {}
        for n in gradients:
            # In place, on what was made here: written as one formula it would take five copies.
            size = square[n].sqrt().div_(spread).add_(self.epsilon)
            step = (lr / unbias * mean[n]).div_(size)
            new[n] = (params[n] * (1 - lr * self.weight_decay)).sub_(step)
        return new, {"mean": mean, "square": square, "count": count}


def clipped(gradients: Params, norm: float) -> dict[str, Tensor]:
    """Return the gradients, scaled down to a norm of at most `norm` over all of them together."""
    total = torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt()
    scale = (norm / (total + 1e-6)).clamp(max=1.0)
    return {name: scale * g for name, g in gradients.items()}
