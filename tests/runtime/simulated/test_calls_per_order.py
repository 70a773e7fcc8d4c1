"""The cohort is the unit: no Python runs once per order between two rounds of stacked devices."""

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import anyfleet
from anyfleet.core.ledger import Ledger
from anyfleet.core.loop import run
from anyfleet.core.method import Method
from anyfleet.methods import fedavg, heterofl, stc
from anyfleet.parts.schedule import Buffered, Deadline
from anyfleet.runtime import Simulated, Stacked
from anyfleet.tasks import Split, Task
from anyfleet.tasks.partition import Iid
from anyfleet.world import levels
from tests.helpers import small

PACKAGE = str(Path(anyfleet.__file__).parent)
DEVICES, FEW, MANY = 80, 20, 60
# Calls of the package's functions for each order more. What remains asks for the labels of each
# device, and why each order ended; replies to asynchronous orders lie in stacks of several cohorts.
BOUNDS = {"fedavg": 3.0, "heterofl": 3.0, "stc": 3.0, "deadline": 3.0, "buffered": 4.5}
FLEET = levels(speeds=(2e9, 1e6))
SECONDS = 0.005  # in which half of the devices finish


def buffered(count: int) -> Method:
    """Return FedAvg in which half of the orders under way make a round, and are asked anew."""
    schedule = Buffered(concurrency=count, buffer_size=count // 2, refill=count // 2)
    return replace(fedavg(count=count), schedule=schedule)


METHODS: dict[str, Callable[[int], Method]] = {
    "fedavg": lambda count: fedavg(count=count),
    "heterofl": lambda count: heterofl(count=count, widths=(1.0, 0.5)),
    "stc": lambda count: stc(count=count),
    "deadline": lambda count: replace(fedavg(count=count), schedule=Deadline(SECONDS)),
    "buffered": buffered,
}


def task() -> Task:
    """Return a small task of many devices, all with as much data."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))
    split = Split(devices=DEVICES, partition=Iid(samples=5), test_share=0.0, server=10, seed=5)
    return Task.of(net, small.patterns(500, 1), small.patterns(10, 2), split=split)


def calls(method: Method, problem: Task) -> tuple[Ledger, Counter[str]]:
    """Return the ledger of the fourth round, and the package's calls in it."""
    runtime = Simulated(problem, small.world(problem, FLEET), engine=Stacked())
    rounds, seen = run(method, problem, runtime, 0), Counter[str]()
    list(islice(rounds, 3))

    def see(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            seen[f"{code.co_filename.removeprefix(PACKAGE)} {code.co_qualname}"] += 1

    sys.setprofile(see)
    try:
        found = next(rounds)
    finally:
        sys.setprofile(None)
    return found.ledger, seen


@pytest.mark.parametrize("name", METHODS)
def test_more_orders_are_hardly_more_calls(name: str) -> None:
    problem = task()
    few, before = calls(METHODS[name](FEW), problem)
    many, after = calls(METHODS[name](MANY), problem)
    assert len(many) - len(few) >= (MANY - FEW) / 2  # or nothing is tested
    assert 0 < many.counted.mean() < 1 or name != "deadline"
    more = after - before  # functions that are called less often make up for nothing
    assert more.total() / (len(many) - len(few)) < BOUNDS[name], more.most_common(10)
