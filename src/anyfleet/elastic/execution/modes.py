"""The modes in which a program runs, and what one run knows."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from anyfleet.elastic.program import Node


@dataclass(frozen=True)
class Mode:
    """The behaviour of random and statistical layers.

    `statistics`: batch norm normalises by the batch or by its running buffers. `update`: what
    becomes of the running buffers: kept ("none"), moved by the module's own momentum ("module"), or
    replaced by the exact mean and unbiased variance of this batch ("exact", for cumulative
    averaging by the caller), or by those that this very pass normalises with ("own"). `forward`:
    what the module computes after `train()` or after `eval()`, where its forward() tells them
    apart.
    """

    dropout: bool
    statistics: Literal["batch", "running"]
    update: Literal["none", "module", "exact", "own"] = "none"
    forward: Literal["training", "evaluation"] = "training"


TRAIN = Mode(dropout=True, statistics="batch", update="module")
STATIC = Mode(dropout=True, statistics="batch")
EVALUATE = Mode(dropout=False, statistics="running", forward="evaluation")
EVALUATE_BATCH = Mode(dropout=False, statistics="batch", forward="evaluation")
COLLECT = Mode(dropout=False, statistics="batch", update="exact", forward="evaluation")
# What training computes, without its noise: to observe statistics, and for gradients by them.
OBSERVE = Mode(dropout=False, statistics="batch", update="own")
OBSERVED = Mode(dropout=False, statistics="running")


@dataclass
class Run:
    """One execution of a program: what it knows besides its values."""

    mode: Mode
    batch: int
    valid: Tensor | None
    key: Tensor | None
    dtype: torch.dtype
    device: torch.device
    updates: dict[str, Tensor]
    sizes: Mapping[str, int] = field(default_factory=dict)  # of the axes


Special = Callable[[Run, list[Any], Node], Any]
