"""Keyed augmentation of image batches [B, C, H, W].

An augmentation is a function of the batch and a key, without hidden state and without branches on
values, so it runs under `vmap`. Sample i takes draw i, whatever the size of the batch.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from anyfleet import rng
from anyfleet.arguments import checked


class Augment(Protocol):
    """What makes changed copies of samples."""

    def __call__(self, x: Tensor, key: Tensor) -> Tensor:
        """Return a changed copy of each sample."""
        ...


@checked
@dataclass(frozen=True)
class Shift:
    """Random crops to the old size, after padding by `padding` pixels of value `fill`.

    Inputs are standardised, so the default fill is the mean colour.
    """

    padding: int = 4
    fill: float = 0.0

    def __post_init__(self) -> None:
        if self.padding < 1:
            raise ValueError(f"Shift.padding must be at least 1, got {self.padding}.")

    def __call__(self, x: Tensor, key: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        padded = functional.pad(x, (self.padding,) * 4, value=self.fill)
        rows = self._start(rng.fold(key, "rows"), batch) + torch.arange(height, device=x.device)
        columns = self._start(rng.fold(key, "columns"), batch) + torch.arange(
            width, device=x.device
        )
        rows = rows[:, None, :, None].expand(batch, channels, height, padded.shape[-1])
        columns = columns[:, None, None, :].expand(batch, channels, height, width)
        return padded.gather(2, rows).gather(3, columns)

    def _start(self, key: Tensor, batch: int) -> Tensor:
        return (rng.uniform(key, batch) * (2 * self.padding + 1)).long().unsqueeze(-1)


@checked
@dataclass(frozen=True)
class Flip:
    """Mirror images: left and right are swapped with probability `chance`."""

    chance: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.chance <= 1:
            raise ValueError(f"Flip.chance must lie in [0, 1], got {self.chance}.")

    def __call__(self, x: Tensor, key: Tensor) -> Tensor:
        draw = rng.uniform(rng.fold(key, "flip"), x.shape[0])
        return torch.where((draw < self.chance)[:, None, None, None], x.flip(-1), x)


@checked
@dataclass(frozen=True)
class InTurn:
    """Several augmentations, one after the other, each with a key of its own."""

    steps: tuple[Augment, ...] = (Shift(), Flip())  # augmentations, in their order

    def __call__(self, x: Tensor, key: Tensor) -> Tensor:
        for position, step in enumerate(self.steps):
            x = step(x, rng.fold(key, position))
        return x
