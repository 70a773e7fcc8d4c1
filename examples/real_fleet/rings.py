"""The model that a fleet trains, and samples for the server's test."""

import torch
from torch import nn
from torch.utils.data import TensorDataset


def network():
    """Return the model that the fleet trains."""
    return nn.Sequential(
        nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)
    )


def samples():
    """Return samples for training, which a real fleet does not use, and for the server's test."""
    x = torch.randn(1000, 2, generator=torch.Generator().manual_seed(1))
    y = (x.norm(dim=1) * 1.5).long().clamp(max=3)
    return TensorDataset(x, y), TensorDataset(x, y)
