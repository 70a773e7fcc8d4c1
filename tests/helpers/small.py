"""A task small enough for every test: ten classes of noisy patterns, and a net with every layer."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor, nn

from anyfleet.core.loop import Round, run
from anyfleet.core.method import Method
from anyfleet.runtime import Limits, Sequential, Simulated
from anyfleet.runtime.simulated.engines import Engine
from anyfleet.tasks import Data, Split, Task
from anyfleet.tasks.partition import Iid, LogNormalSizes, Partition
from anyfleet.world import Fleet, World

PIXELS = 8


def patterns(count: int, seed: int) -> Data:
    """Return noisy copies of ten fixed pictures."""
    centres = torch.randn(10, 1, PIXELS, PIXELS, generator=torch.Generator().manual_seed(99))
    noise = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 10, (count,), generator=noise)
    x = centres[y] + 0.7 * torch.randn(count, 1, PIXELS, PIXELS, generator=noise)
    return Data(x, y)


def net(*, dropout: float = 0.2, norm: bool = True) -> nn.Sequential:
    """Return a net with convolutions, batch norm, dropout, and flatten into linear."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1),
            nn.BatchNorm2d(6) if norm else nn.Identity(),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 8, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(8 * 16, 16),
            nn.ReLU(),
            nn.Linear(16, 10),
        )


@lru_cache(maxsize=16)
def task(
    *,
    devices: int = 8,
    equal: bool = True,
    dropout: float = 0.2,
    norm: bool = True,
    dtype: torch.dtype = torch.float32,
    partition: Partition | None = None,
) -> Task:
    """Return a task with equal or unequal data sizes, which are not multiples of the batch size."""
    rule = partition or (Iid(samples=37) if equal else LogNormalSizes())
    split = Split(devices=devices, partition=rule, test_share=0.2, server=40, seed=5)
    made = Task.of(net(dropout=dropout, norm=norm), patterns(500, 1), patterns(120, 2), split=split)
    return made.to(dtype)


def world(problem: Task, fleet: Fleet | None = None, seed: int = 0) -> World:
    """Return the world of a fleet, with one device for each of the task."""
    samples = np.array([len(problem.data(device)) for device in range(problem.devices)])
    return (fleet or Fleet()).build(samples, seed)


def steps(
    method: Method,
    problem: Task,
    count: int = 3,
    *,
    engine: Engine | None = None,
    fleet: Fleet | None = None,
    seed: int = 0,
    limits: Limits | None = None,
) -> list[Round]:
    """Return the first rounds of a run."""
    there = world(problem, fleet, seed)
    runtime = Simulated(problem, there, engine=engine or Sequential(), limits=limits)
    return list(islice(run(method, problem, runtime, seed), count))


def padded(method: Method) -> Method:
    """Return the method as lossy links need it: devices keep their model, and send weights."""
    return replace(method, send="weights", cache=True)


def rows(round_: Round) -> list[SimpleNamespace]:
    """Return the ledger of a round, order by order."""
    return [SimpleNamespace(**row) for row in round_.ledger.as_dicts()]


def identical(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Return whether two trees are equal bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Return the relative distance of two trees as vectors."""
    change = sum(float((a[name] - b[name]).double().square().sum()) for name in a)
    size = sum(float(a[name].double().square().sum()) for name in a)
    return math.sqrt(change / size)
