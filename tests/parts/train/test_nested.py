"""Prefixes inside a device's model: draws, masks, distillation; and gradients summed over them."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from anyfleet import rng
from anyfleet.core.slots import Minibatch, TrainingStart
from anyfleet.elastic import Priced, Slice
from anyfleet.formulas.reference.distillation import (
    Descent,
    LinearBatch,
    Moved,
    divergence_from_teacher,
    fedslim_step,
    fjord_step,
    softmax,
)
from anyfleet.formulas.sub_models import sampled_widths
from anyfleet.parts.norm import Tracked
from anyfleet.parts.train import Decaying, Fjord, Gradient, Progressive, Rush, Sgd, Slim
from anyfleet.parts.train.nested import (
    NESTED_WIDTHS,
    NestedModel,
    divergence,
    narrower,
    nested_model,
    rank,
    ranks,
)
from anyfleet.tasks import Data, Split, Task
from anyfleet.tasks.losses import squared_error
from tests.helpers import linear, small

PLAIN = Gradient(Decaying(0.5))


def new_coordinates(part: NestedModel, before: float) -> dict[str, Tensor]:
    """Return masks of the coordinates of a part that the part of width `before` does not have."""
    frozen = rank(before, NESTED_WIDTHS)
    return {name: each > frozen for name, each in ranks(part, NESTED_WIDTHS, "cpu").items()}


def test_ratios_are_nineteen() -> None:
    assert (
        *(0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55),
        *(0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0),
    ) == NESTED_WIDTHS


@pytest.mark.parametrize(
    ("trainer", "expected"),
    [
        (Slim(PLAIN, (0.5,)), (0.425083, 0.577172)),
        (Fjord(PLAIN, (0.5,)), (0.650166, 0.577172)),
    ],
    ids=["fedslim", "fjord"],
)
def test_1_7_example_of_summed_gradients(
    trainer: Slim | Fjord, expected: tuple[float, float]
) -> None:
    new = linear.stepped(linear.two_columns(), trainer, (0.0,))
    assert new["params"]["1.weight"].flatten().tolist() == pytest.approx(expected, abs=5e-7)
    # The loss of the whole model before the step: −log σ(0.6).
    assert float(new["loss"] / new["count"]) == pytest.approx(0.437488, abs=5e-7)


def test_1_7_kl_takes_the_teacher_first() -> None:
    """KL(q ‖ p1) = 0.018913 for q = σ(0.6), p1 = σ(0.2); the other way round it is another."""
    teacher, student = torch.tensor([[0.0, 0.6]]), torch.tensor([[0.0, 0.2]])
    assert float(divergence(teacher, student)) == pytest.approx(0.018913, abs=5e-7)
    assert float(divergence(student, teacher)) != pytest.approx(0.018913, abs=1e-5)
    noise = torch.randn(7, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    one, two = softmax(noise[:3].numpy()), softmax(noise[3:6].numpy())
    found = divergence(noise[:3], noise[3:6]).mean()
    assert float(found) == pytest.approx(divergence_from_teacher(one, two), rel=1e-12)


def test_kl_of_sequences_is_the_mean_over_positions() -> None:
    noise = torch.randn(2, 4, 6, 5, generator=torch.Generator().manual_seed(1))
    teacher, student = noise
    by_position = divergence(teacher.flatten(0, 1), student.flatten(0, 1)).reshape(4, 6)
    torch.testing.assert_close(divergence(teacher, student), by_position.mean(1))


@pytest.mark.parametrize("capacity", [1.0, 0.5, 0.1])
@pytest.mark.parametrize("kind", [Slim, Fjord])
def test_three_steps_equal_the_formulas(kind: type[Slim] | type[Fjord], capacity: float) -> None:
    sgd = Sgd(0.9, nesterov=True, weight_decay=0.01)
    trainer = kind(Gradient(Decaying(0.1), sgd), samples=3)
    step = fedslim_step if kind is Slim else fjord_step
    descent = Descent(0.1, 0.9, decay=0.01)

    def reference(model: Moved, batch: LinearBatch, choice: tuple[float, ...]) -> Moved:
        ratios = sampled_widths(np.array(NESTED_WIDTHS), capacity, np.array(choice))
        return step(model, batch, ratios, descent, capacity=capacity)

    linear.three_steps(trainer, capacity, 0.1, reference)


@pytest.mark.parametrize("kind", [Slim, Fjord, Progressive, Rush])
def test_draws_are_shared_by_the_cohort_and_addressed_by_step(kind: type[Any]) -> None:
    trainer = kind(samples=2)
    one, two = rng.root(0, "a"), rng.root(0, "b")
    assert trainer.shared_draws(5, one) == trainer.shared_draws(9, one)[:5]
    assert trainer.shared_draws(5, one) != trainer.shared_draws(5, two)
    assert len(set(trainer.shared_draws(50, one))) == 50
    assert kind(samples=0).shared_draws(3, one) == (None, None, None)


def test_every_ratio_up_to_the_capacity_is_as_likely_and_may_come_twice() -> None:
    trainer = Fjord(samples=4)
    drawn = [trainer.drawn(0.35, c) for c in trainer.shared_draws(600, rng.root(0, "cohort"))]
    counts = {ratio: sum(each.count(ratio) for each in drawn) for ratio in NESTED_WIDTHS}
    assert [ratio for ratio in NESTED_WIDTHS if counts[ratio]] == [0.1, 0.15, 0.2, 0.25, 0.3, 0.35]
    # 2400 draws of six: 400 each, with a standard deviation of √(2400 × 5/36) = 18.
    assert all(abs(counts[ratio] - 400) < 5 * 18.3 for ratio in NESTED_WIDTHS[:6])
    assert any(len(set(each)) < 4 for each in drawn)
    assert trainer.drawn(0.05, (0.3, 0.9, 0.0, 0.5)) == [0.05] * 4


def test_1_7_new_columns_are_an_l_and_the_output_bias_is_new_only_once() -> None:
    task = small.task(norm=True)
    where = linear.site(task, Progressive())
    half, most = nested_model(where, 0.5), nested_model(where, 0.75)
    first, then = new_coordinates(half, 0.0), new_coordinates(most, 0.5)
    assert all(bool(mask.all()) for mask in first.values())
    # Sixteen units behind 8 × 16 inputs: channel i owns sixteen neighbouring columns.
    expected = torch.ones(12, 96, dtype=torch.bool)
    expected[:8, :64] = False
    assert torch.equal(then["8.weight"], expected)
    assert torch.equal(then["8.bias"], torch.arange(12) >= 8)
    assert torch.equal(then["1.weight"], torch.arange(5) >= 3)
    assert torch.equal(then["10.weight"], (torch.arange(12) >= 8).expand(10, 12))
    assert not then["10.bias"].any()


def test_new_columns_of_a_chain_are_a_partition_of_the_model() -> None:
    task = small.task()
    where = linear.site(task, Progressive(), 0.8)
    chain = (0.0, 0.1, 0.15, 0.35, 0.6, 0.8)
    total = {name: torch.zeros(where.blueprint.shape(name)) for name in where.blueprint.params}
    for before, ratio in pairwise(chain):
        part = nested_model(where, ratio)
        for name, mask in new_coordinates(part, before).items():
            total[name] += part.paste(name, mask.float(), torch.zeros_like(total[name]))
    assert all(torch.equal(value, torch.ones_like(value)) for value in total.values())


def test_the_planned_share_is_all_that_a_device_holds() -> None:
    task = small.task()
    where = linear.site(task, Fjord(), 0.3)
    assert nested_model(where, 0.3).part == Slice()
    assert nested_model(where, 0.3).context.blueprint == where.blueprint
    assert nested_model(where, 0.2).context.blueprint.shape("8.weight") == (4, 32)


@pytest.mark.parametrize("trainer", [Slim(PLAIN), Fjord(PLAIN), Progressive(PLAIN), Rush(PLAIN)])
def test_running_statistics_are_those_of_the_whole_model_once(trainer: Any) -> None:
    task = small.task(dropout=0.0)
    where, plain = (linear.site(task, train) for train in (trainer, PLAIN))
    where, plain = (replace(s, norm=Tracked()) for s in (where, plain))
    data, valid = task.data(0), torch.ones(task.size(0), dtype=torch.bool)
    batch = Minibatch(data.x, data.y, valid, torch.tensor(0))
    numbers = {"lr": torch.tensor(0.0)}
    (choice,) = trainer.shared_draws(1, torch.tensor(5))
    given = TrainingStart(task.params, task.buffers, task.labels(0))
    found = trainer.step(where, trainer.start(where, given), batch, numbers, choice)
    expected = PLAIN.step(plain, PLAIN.start(plain, given), batch, numbers, None)
    assert int(found["buffers"]["1.num_batches_tracked"]) == 1
    assert small.distance(expected["buffers"], found["buffers"]) < 1e-7
    assert float(found["loss"]) == pytest.approx(float(expected["loss"]), rel=1e-6)


@pytest.mark.parametrize("kind", [Slim, Fjord, Progressive, Rush])
def test_parts_of_a_suffix_leave_the_other_layers_alone(kind: type[Any]) -> None:
    task = small.task(dropout=0.0)
    trainer = kind(PLAIN, samples=3)
    where = linear.site(task, trainer, first=2)
    data, valid = task.data(0), torch.ones(task.size(0), dtype=torch.bool)
    batch = Minibatch(data.x, data.y, valid, torch.tensor(0))
    (choice,) = trainer.shared_draws(1, torch.tensor(5))
    state = trainer.start(where, TrainingStart(task.params, task.buffers, task.labels(0)))
    new = trainer.step(where, state, batch, {"lr": torch.tensor(0.1)}, choice)["params"]
    changed = {name for name in new if not torch.equal(new[name], task.params[name])}
    assert changed == {"8.weight", "8.bias", "10.weight", "10.bias"}


def test_distillation_needs_classes() -> None:
    x = torch.randn(8, 4)
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1))
    split = Split(devices=1, test_share=0.25)
    task = Task.of(net, Data(x, x.sum(1)), loss=squared_error, split=split)
    for trainer in (Slim(), Fjord(), Progressive(), Rush()):
        where = linear.site(task, trainer)
        with pytest.raises(ValueError, match=r"Progressive\(distil=False\)"):
            trainer.start(where, TrainingStart(task.params, {}, task.labels(0)))
    for fine in (Slim(samples=0), Progressive(distil=False), PLAIN):
        assert not fine.misfit(task)
        assert fine.start(linear.site(task, fine), TrainingStart(task.params, {}, task.labels(0)))
    assert not Slim().misfit(small.task())


@pytest.mark.parametrize("kind", [Slim, Fjord, Progressive, Rush])
def test_what_is_wrong_is_told_all_at_once(kind: type[Any]) -> None:
    name = kind.__name__
    with pytest.raises(
        ValueError, match=rf"{name}\.nested_widths must be .*\n{name}\.samples must not"
    ):
        kind(nested_widths=(0.0, 1.0), samples=-1)
    with pytest.raises(ValueError, match=rf"{name}\.nested_widths must differ"):
        kind(nested_widths=(0.5, 0.5))
    with pytest.raises(ValueError, match=rf"{name}\.nested_widths must be one or more"):
        kind(nested_widths=())


def calculated(trainer: Any, task: Task, share: float) -> int:
    """FLOP of one minibatch of four, as torch counts them."""
    where = linear.site(task, trainer, share)
    params = (
        nested_model(linear.site(task, trainer), share).cut(task.params)
        if share < 1
        else task.params
    )
    state = trainer.start(where, TrainingStart(params, {}, task.labels(0)))
    batch = Minibatch(
        task.data(0).x[:4], task.data(0).y[:4], torch.ones(4, dtype=torch.bool), torch.tensor(0)
    )
    (choice,) = trainer.shared_draws(1, torch.tensor(5))
    with FlopCounterMode(display=False) as counter:
        trainer.step(where, state, batch, {"lr": torch.tensor(0.1)}, choice)
    return int(counter.get_total_flops())


@pytest.mark.parametrize(
    "trainer",
    [
        PLAIN,
        Slim(PLAIN, (0.5,), samples=1),
        Fjord(PLAIN, (0.5,), samples=2),
        Progressive(PLAIN, (0.5,), samples=2),
        Progressive(PLAIN, (0.5,), samples=1),
        Progressive(PLAIN, (0.5,), samples=2, distil=False),
        Rush(PLAIN, (0.5,), samples=2),
    ],
    ids=str,
)
@pytest.mark.parametrize("share", [1.0, 0.75])
def test_work_is_what_is_calculated(trainer: Any, share: float) -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    data = Data(torch.randn(9, 6), torch.arange(9) % 3)
    task = Task.of(net, data, data, split=Split(devices=1, test_share=0))
    part = task.blueprint.prefix(share) if share < 1 else Slice()
    work = trainer.work(Priced(task.blueprint, part, 4), processed=4, local_steps=1)
    assert work.flops == calculated(trainer, task, share)


@pytest.mark.parametrize("trainer", [Progressive(samples=4), Slim(samples=2)], ids=str)
def test_nobody_pays_for_ratios_that_are_never_drawn(trainer: Progressive | Slim) -> None:
    """A share of 0.2 is rounded up to a little more, and is not below itself for that."""
    blueprint = small.task().blueprint
    slice_ = blueprint.prefix(0.2)
    known, guessed = Priced(blueprint, slice_, 8, 0.2), Priced(blueprint, slice_, 8)
    assert guessed.width > 0.2
    drawn = [p for p in NESTED_WIDTHS if p < 0.2 - 1e-9]
    assert [part.width for part in narrower(known, NESTED_WIDTHS)] == drawn
    assert trainer.work(known, 8, 1).flops < trainer.work(guessed, 8, 1).flops
