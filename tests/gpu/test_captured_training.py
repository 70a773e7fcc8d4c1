"""Captured training on a CUDA device: graph = eager, side by side, and what cannot be captured."""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap

from anyfleet.core.local_training import train
from anyfleet.core.slots import Minibatch, Norm, TrainingContext, TrainingResult, TrainingState
from anyfleet.errors import AnyfleetWarning
from anyfleet.parts.norm import BatchStatistics, Tracked
from anyfleet.parts.train import AdamW, Decaying, Fjord, Gradient, Progressive, Rush, Sgd, Slim
from anyfleet.runtime.simulated.captured_training import CapturedTraining, Precision, arithmetic
from anyfleet.tasks import Data, Split, Task
from tests.helpers import small
from tests.helpers.stacks import Stack, distance, same_bits, stack

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

DEVICE = torch.device("cuda")
PLAIN = Gradient(Decaying(0.1), batch_size=8)
TRAINERS = {
    "sgd": PLAIN,
    "momentum": replace(PLAIN, optimiser=Sgd(momentum=0.9), proximal=0.1, clip=1.0, epochs=2),
    "adamw": replace(PLAIN, optimiser=AdamW(), masked=True, label_rows=True),
    "progressive": Progressive(PLAIN),
    "masked": Progressive(replace(PLAIN, optimiser=Sgd(momentum=0.9)), momentum_rule="masked"),
    "rush": Rush(PLAIN),
    "slim": Slim(PLAIN),
    "fjord": Fjord(PLAIN, samples=2),
}
NORMS: dict[str, Norm] = {"batch": BatchStatistics(), "tracked": Tracked()}


def eager(
    trainer: Any, given: Stack, precision: Precision = "float32", cohort_key: int = 3
) -> TrainingResult:
    with arithmetic(precision, DEVICE):
        return train(trainer, *given, lift=vmap, cohort_key=cohort_key)


@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16"])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", TRAINERS)
def test_a_graph_is_eager_training_bit_for_bit(name: str, norm: str, precision: Precision) -> None:
    task, trainer = small.task(equal=False).to(DEVICE), TRAINERS[name]
    runner = CapturedTraining(precision)
    for round_index in range(3):
        devices = [(round_index + i) % 8 for i in range(5)]  # a size that is not padded
        given = stack(task, trainer, devices, norm=NORMS[norm], round_index=round_index)
        plain = eager(trainer, given, precision, round_index)
        with warnings.catch_warnings():
            warnings.simplefilter("error", AnyfleetWarning)  # of what is not captured
            found = runner(trainer, *given, lift=vmap, cohort_key=round_index)
        assert same_bits(found, plain)
    assert runner.captured


def test_padding_changes_rounding_at_most_and_results_stay() -> None:
    task = small.task(equal=False).to(DEVICE).to(torch.float64)
    runner, found = CapturedTraining(), []
    for count in (6, 5, 7):
        given = stack(task, PLAIN, list(range(count)))
        found.append((runner(PLAIN, *given, lift=vmap, cohort_key=0), given))
    # A result is its caller's own: later replays of its graph did not touch it.
    for result, given in found:
        assert distance(result, eager(PLAIN, given), given.inputs.params) < 1e-10


def test_graphs_run_side_by_side() -> None:
    task = small.task().to(DEVICE)
    widths = (1.0, 0.5, 0.25)
    stacks = [
        stack(task, PLAIN, list(range(5)), slice_=task.blueprint.prefix(w), width=w) for w in widths
    ]
    runner = CapturedTraining()
    expected = [eager(PLAIN, given) for given in stacks]
    streams = [torch.cuda.Stream() for _ in stacks]  # type: ignore[no-untyped-call]
    for _ in range(20):
        found = []
        for given, stream in zip(stacks, streams, strict=True):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                found.append(runner(PLAIN, *given, lift=vmap, cohort_key=3))
        torch.cuda.synchronize()
        assert all(map(same_bits, found, expected))


@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16"])
def test_compiled_steps_agree_with_eager_ones(precision: Precision) -> None:
    task, trainer = small.task(equal=False).to(DEVICE), TRAINERS["momentum"]
    runner = CapturedTraining(precision, compile=True)
    given = stack(task, trainer, [0, 1, 2, 3], norm=Tracked())
    with warnings.catch_warnings():
        warnings.simplefilter("error", AnyfleetWarning)
        found = runner(trainer, *given, lift=vmap, cohort_key=3)
    allowed = {"float32": 1e-4, "tf32": 2e-2, "bf16": 0.2}[precision]
    assert distance(found, eager(trainer, given, precision), given.inputs.params) < allowed
    again = runner(trainer, *given, lift=vmap, cohort_key=3)
    assert same_bits(found, again)


class Waits(Gradient):
    """A trainer that reads a value of the device in every step."""

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


def test_a_trainer_that_waits_is_not_captured_and_a_warning_says_so_once() -> None:
    task, trainer = small.task().to(DEVICE), Waits(Decaying(0.1), batch_size=8)
    runner, given = CapturedTraining(), stack(task, trainer, [0, 1, 2, 3])
    with pytest.warns(AnyfleetWarning, match="not captured") as caught:
        found = [runner(trainer, *given, lift=vmap, cohort_key=3) for _ in range(2)]
    assert len(caught) == 1
    assert all(same_bits(each, eager(trainer, given)) for each in found)
    # What can be captured still is.
    plain = stack(task, PLAIN, [0, 1, 2, 3, 4])
    assert same_bits(runner(PLAIN, *plain, lift=vmap, cohort_key=3), eager(PLAIN, plain))


def test_memory_is_bounded_by_letting_go_of_old_graphs() -> None:
    task = small.task().to(DEVICE)
    runner = CapturedTraining(share=0.0)
    for count in (5, 2, 5):
        given = stack(task, PLAIN, list(range(count)))
        found = runner(PLAIN, *given, lift=vmap, cohort_key=3)
        assert same_bits(found, eager(PLAIN, given))
        assert runner.captured == 1


def test_a_colour_network_trains_as_its_devices_do_one_by_one() -> None:
    made = torch.Generator().manual_seed(0)
    x, y = torch.randn(120, 3, 12, 12, generator=made), torch.randint(10, (120,), generator=made)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 24, 3, stride=2),
        nn.ReLU(),
        nn.Conv2d(24, 8, 1),
        nn.Flatten(),
        nn.Linear(200, 10),
    )
    split = Split(devices=4, test_share=0)
    task = Task.of(net, Data(x, y), Data(x, y), split=split).to(DEVICE)
    given = stack(task, PLAIN, [0, 1, 2, 3])
    found = CapturedTraining()(PLAIN, *given, lift=vmap, cohort_key=3)
    wide = task.to(torch.float64)
    exact = eager(PLAIN, stack(wide, PLAIN, [0, 1, 2, 3]))
    assert distance(found, exact, given.inputs.params) < 1e-4
