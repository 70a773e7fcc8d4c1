"""Made-up readings of a sensor: six people walk, each in a way of their own."""

import torch
from torch import Tensor
from torch.utils.data import Dataset

PEOPLE = ("ada", "bob", "eve", "joe", "kim", "zoe")


class Walks(Dataset[tuple[Tensor, int, str]]):
    """Items are (readings, pace, owner): three paces, and a gait that only its owner has."""

    def __init__(self, samples: int = 120, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        paces = torch.randn(3, 6, generator=generator)
        gaits = 0.5 * torch.randn(len(PEOPLE), 6, generator=generator)
        self.items = [
            (paces[row % 3] + gait + 0.4 * torch.randn(6, generator=generator), row % 3, owner)
            for owner, gait in zip(PEOPLE, gaits, strict=True)
            for row in range(samples)
        ]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Tensor, int, str]:
        return self.items[index]
