"""A local step neither waits for the device that computes nor copies anything to it.

Only so can it be captured as a CUDA graph. Tensors on torch's "meta" device stand for the device:
they have no values, so whatever needs one fails, and whatever comes from the host is seen.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from anyfleet.core.local_training import train_with
from anyfleet.core.slots import Minibatch, Train, TrainingContext, TrainingState
from anyfleet.parts.norm import BatchStatistics, OnDevice, PerWidth, Static, Tracked
from anyfleet.parts.train import AdamW, Decaying, Fjord, Gradient, Progressive, Rush, Sgd, Slim
from anyfleet.tasks.augment import InTurn
from tests.helpers import small
from tests.helpers.stacks import stack


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What notes every operator that waits for a value or takes one from the host."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        places = {t.device.type for t in given}
        if str(func) in ("aten._local_scalar_dense.default", "aten.nonzero.default"):
            self.seen.append(str(func))
        out = func(*args, **(kwargs or {}))
        made = {t.device.type for t in tree_leaves(out) if isinstance(t, Tensor)}
        copied = "copy" in str(func) and len(places | made) > 1
        if copied or (places == {"cpu"} and "meta" in made):
            self.seen.append(str(func))
        return out


def waits(trainer: Train, norm: Any = None) -> list[str]:
    """Return what training a stack of three unequal devices waits for or copies."""
    task = replace(small.task(equal=False), augment=InTurn())
    context, inputs, bounds = stack(task, trainer, [1, 2, 5], norm=norm)
    assert (bounds.shared_steps, bounds.local_steps) == (1, 2)
    draws = trainer.shared_draws(bounds.local_steps, torch.tensor(3))
    there = tree_map(
        lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta"), inputs
    )
    watch = Watch()
    with watch:
        train_with(draws, trainer, context, there, bounds, lift=vmap)
    return watch.seen


BASE = Gradient(Decaying(0.1), Sgd(momentum=0.9, nesterov=True, weight_decay=0.1), batch_size=32)
TRAINERS: dict[str, Train] = {
    "plain": Gradient(batch_size=32),
    "sgd": BASE,
    "adamw": replace(BASE, optimiser=AdamW()),
    "options": replace(
        BASE, proximal=0.1, clip=1.0, masked=True, label_rows=True, scaler=True, inverted=True
    ),
    "progressive": Progressive(BASE),
    "masked": Progressive(BASE, momentum_rule="masked"),
    "literal": Progressive(BASE, momentum_rule="literal"),
    "rush": Rush(BASE),
    "slim": Slim(BASE),
    "fjord": Fjord(BASE),
}


@pytest.mark.parametrize("name", TRAINERS)
def test_no_trainer_waits(name: str) -> None:
    assert waits(TRAINERS[name]) == []


@pytest.mark.parametrize("norm", [BatchStatistics, Tracked, OnDevice, Static, PerWidth])
def test_no_norm_waits(norm: Callable[[], Any]) -> None:
    assert waits(BASE, norm()) == []


class Copies(Gradient):
    """A trainer that makes a tensor of a number on the host."""

    def step(
        self,
        context: TrainingContext,
        state: TrainingState,
        batch: Minibatch,
        hyperparameters: Mapping[str, Tensor],
        draw: Any,
    ) -> TrainingState:
        torch.tensor(1.0).to(batch.valid.device)
        return super().step(context, state, batch, hyperparameters, draw)


class Reads(Gradient):
    """A trainer that reads a value of the device."""

    def step(
        self,
        context: TrainingContext,
        state: TrainingState,
        batch: Minibatch,
        hyperparameters: Mapping[str, Tensor],
        draw: Any,
    ) -> TrainingState:
        torch.ones((), device=batch.valid.device).item()
        return super().step(context, state, batch, hyperparameters, draw)


def test_copies_and_reads_are_seen() -> None:
    assert waits(Copies())
    with pytest.raises(RuntimeError, match="meta"):
        waits(Reads())
