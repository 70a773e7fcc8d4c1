"""Measured memory of a real training step."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from anyfleet import rng
from anyfleet.elastic import STATIC, Slice, apply, cost
from tests.elastic.cost.test_training_cost import ZOO, from_zoo, prepared


def peak(blueprint_name: str, slice: Slice) -> int:
    """The most bytes alive at once in one training step, the parameters included."""
    module, blueprint = from_zoo(blueprint_name)
    small, buffers = prepared(blueprint, slice, module)
    local, x = blueprint.local(slice), torch.randn(16, *ZOO[blueprint_name][1])

    def step() -> list[Tensor]:
        own = {n: p.detach().clone().requires_grad_(p.requires_grad) for n, p in small.items()}
        out, _ = apply(local, own, buffers, x, STATIC, key=rng.root(0, "memory"))
        wanted = [p for p in own.values() if p.requires_grad]
        return list(torch.autograd.grad(out.sum(), wanted))

    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    return highest(recorded)


def highest(recorded: profile) -> int:
    profiler: Any = recorded.profiler
    events = [e for e in profiler.kineto_results.events() if e.name() == "[memory]"]
    live = top = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        top = max(top, live)
    return top


@pytest.mark.parametrize("name", ["C.8", "C.13"])
def test_measured_peak_falls_with_width(name: str) -> None:
    _, blueprint = from_zoo(name)
    peaks = [peak(name, blueprint.prefix(share)) for share in (1.0, 0.5, 0.25)]
    assert peaks[0] > 2 * peaks[1] > 4 * peaks[2]


@pytest.mark.parametrize("name", ["C.8", "C.13"])
def test_measured_peak_falls_with_depth(name: str) -> None:
    _, blueprint = from_zoo(name)
    middle = len(blueprint.layers) // 2
    peaks = [peak(name, Slice((), first)) for first in (0, middle, len(blueprint.layers) - 1)]
    assert peaks[0] > 1.2 * peaks[1] > 1.2 * 1.2 * peaks[2]


@pytest.mark.parametrize(("name", "share"), [("C.8", 1.0), ("C.8", 0.25), ("C.13", 0.5)])
def test_predicted_memory_is_near_the_measured_one(name: str, share: float) -> None:
    _, blueprint = from_zoo(name)
    slice = blueprint.prefix(share)
    predicted = cost(blueprint, slice, batch=16).memory
    assert abs(peak(name, slice) / predicted - 1) < 0.1
