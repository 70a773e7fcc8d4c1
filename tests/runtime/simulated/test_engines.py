"""Three engines, one result."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from anyfleet.core.method import Method
from anyfleet.methods import (
    centralised,
    fedavg,
    feddrop,
    fedprox,
    fedrescue,
    fedrush,
    heterofl,
    local,
)
from anyfleet.parts.norm import OnDevice, PerWidth, Tracked
from anyfleet.parts.schedule import Buffered, Deadline
from anyfleet.parts.train import Decaying, Gradient, Sgd
from anyfleet.runtime import Stacked, Threads
from anyfleet.tasks import Data, Split, Task, pooled
from tests.helpers import small
from tests.helpers.nets import Recurrent

METHODS: dict[str, Method] = {
    "fedavg": fedavg(count=5, lr=0.1, batch_size=8),
    "fedprox": fedprox(count=5, lr=0.1, mu=0.1, seconds=0.01, batch_size=8),
    "heterofl": heterofl(count=5, lr=0.1, batch_size=8, momentum=0.9, widths=(1.0, 0.5, 0.25)),
    "local": local(lr=0.1, batch_size=8),
    "tracked": replace(fedavg(count=5, lr=0.1, batch_size=8), norm=Tracked()),
    "on device": replace(fedavg(count=5, lr=0.1, batch_size=8), norm=OnDevice()),
    "per width": replace(heterofl(count=6, lr=0.1, widths=(1.0, 0.5)), norm=PerWidth()),
    "deadline": replace(heterofl(count=5, lr=0.1), schedule=Deadline(0.02)),
    "asynchronous": replace(heterofl(lr=0.1, widths=(1.0, 0.5)), schedule=Buffered(5, 2)),
    "clipped slices": replace(
        heterofl(count=5, widths=(0.5,)),
        train=Gradient(
            Decaying(0.1), Sgd(0.9), batch_size=6, clip=0.1, masked=True, label_rows=True
        ),
    ),
    "weights": replace(fedavg(count=5, lr=0.1), send="weights", cache=True),
}


@pytest.mark.parametrize("name", METHODS)
def test_threads_with_real_bytes_equal_the_reference_bit_for_bit(name: str) -> None:
    task = small.task(equal=False)
    one = small.steps(METHODS[name], task, 2)
    two = small.steps(METHODS[name], task, 2, engine=Threads())
    assert small.identical(one[-1].params, two[-1].params)
    assert small.identical(one[-1].buffers, two[-1].buffers)
    assert [step.time for step in one] == [step.time for step in two]
    assert repr([small.rows(step) for step in one]) == repr([small.rows(step) for step in two])


@pytest.mark.parametrize("name", METHODS)
def test_stacks_equal_the_reference_in_double_precision(name: str) -> None:
    task = small.task(equal=False, dtype=torch.float64)
    one = small.steps(METHODS[name], task, 2)
    two = small.steps(METHODS[name], task, 2, engine=Stacked())
    assert small.distance(one[-1].params, two[-1].params) < 1e-10
    assert [step.time for step in one] == [step.time for step in two]


def test_the_size_of_a_stack_changes_nothing_that_matters() -> None:
    task = small.task(equal=False, dtype=torch.float64)
    ends = [
        small.steps(METHODS["fedavg"], task, 3, engine=Stacked(chunk))[-1].params
        for chunk in (1, 2, 64)
    ]
    assert all(small.distance(ends[0], end) < 1e-10 for end in ends[1:])


def test_centralised_training_is_one_device_with_all_data() -> None:
    task = pooled(small.task(dropout=0.0))
    first, *_, last = small.steps(centralised(lr=0.1, batch_size=16, epochs=2), task, 8)
    assert task.devices == 1
    assert len(small.rows(first)) == 1
    assert small.rows(last)[0].loss < 0.5 * small.rows(first)[0].loss


def test_centralised_training_is_the_same_with_real_bytes() -> None:
    task, method = pooled(small.task()), centralised(lr=0.1, batch_size=16)
    one, two = (small.steps(method, task, 5, engine=e)[-1].params for e in (None, Threads()))
    assert small.identical(one, two)


def test_a_world_of_another_size_is_refused() -> None:
    from anyfleet.runtime import Simulated

    with pytest.raises(ValueError, match="8 devices"):
        Simulated(pooled(small.task()), small.world(small.task()))


class Weighed(nn.Module):
    """Hidden units with fixed weights that are no parameters: a constant along an axis."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 12), nn.Linear(12, 10)
        self.register_buffer("scale", torch.linspace(0.2, 2.0, 12), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.first(x.flatten(1)).relu() * self.scale
        found: Tensor = self.last(hidden)
        return found


def test_devices_with_other_constants_are_not_stacked() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        module = Weighed()
    split = Split(devices=6, seed=2)
    task = Task.of(module, small.patterns(200, 1), small.patterns(40, 2), split=split)
    method = feddrop(widths=(0.5,), count=6, lr=0.1, batch_size=8)
    one, two = (small.steps(method, task, 2, engine=engine)[-1] for engine in (None, Stacked()))
    assert small.distance(one.params, two.params) < 1e-5


@pytest.mark.parametrize("make", [fedrescue, fedrush])
def test_a_recurrent_model_teaches_its_parts_in_every_engine(make: Callable[..., Method]) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        module, text = Recurrent(), torch.randint(0, 11, (60, 6))
    data = Data(text[:, :-1].contiguous(), text[:, 1:].contiguous())
    task = Task.of(module, data, split=Split(devices=3, server=6, seed=2))
    method = make(count=3, lr=0.1, batch_size=8, samples=2)
    one, two, three = (
        small.steps(method, task, 1, engine=engine)[-1].params
        for engine in (None, Threads(), Stacked())
    )
    assert small.identical(one, two)
    assert small.distance(one, three) < 1e-5
