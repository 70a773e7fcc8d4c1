"""Parts one after the other: FedResCuE, FedSeq and FedRush against formulas and a plain loop."""

import math
from collections import Counter
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from anyfleet import rng
from anyfleet.core.messages import Params
from anyfleet.core.slots import Minibatch, TrainingStart
from anyfleet.elastic import Priced, Slice
from anyfleet.formulas.reference.distillation import (
    Buffers,
    Descent,
    LinearBatch,
    Moved,
    fedrescue_step,
    fedrush_step,
    fedseq_step,
)
from anyfleet.formulas.sub_models import progressive_widths
from anyfleet.parts.train import AdamW, Decaying, Fjord, Gradient, Progressive, Rush, Sgd, Slim
from anyfleet.parts.train.nested import NESTED_WIDTHS
from tests.helpers import linear, small

PLAIN = Gradient(Decaying(0.5))
HALVES = (0.5, 1.0)


@pytest.mark.parametrize(
    ("trainer", "expected"),
    [
        (Progressive(PLAIN, HALVES, 2), (0.605478, 0.679799)),
        (Progressive(PLAIN, HALVES, 2, distil=False), (0.561784, 0.689044)),
        (Rush(PLAIN, HALVES, 2), (0.738952, 0.665958)),
        (Rush(PLAIN, HALVES, 2, gated=False), (0.714584, 0.641590)),
    ],
    ids=["fedrescue", "fedseq", "fedrush gated", "fedrush literal"],
)
def test_1_7_example_of_steps_one_after_the_other(
    trainer: Progressive | Rush, expected: tuple[float, float]
) -> None:
    new = linear.stepped(linear.two_columns(), trainer, (0.0, 0.5))
    assert new["params"]["1.weight"].flatten().tolist() == pytest.approx(expected, abs=5e-7)
    # Of the whole model before all of its steps, −log σ(0.6); without a teacher, before the last.
    loss = 0.437488 if trainer.distils else -math.log(1 / (1 + math.exp(-0.425083 - 0.552343)))
    assert float(new["loss"] / new["count"]) == pytest.approx(loss, abs=5e-7)


def test_1_7_ratios_are_distinct_ascend_and_end_with_the_capacity() -> None:
    trainer = Progressive(samples=4)
    choices = trainer.shared_draws(600, rng.root(0, "cohort"))
    counts: Counter[float] = Counter()
    for choice in choices:
        ratios = trainer.visited(0.6, choice)
        assert len(ratios) == 4
        assert all(a < b for a, b in pairwise(ratios))
        assert ratios[-1] == 0.6
        counts.update(ratios[:-1])
    # 3 of the ten below: 180 of 600 each, with a standard deviation of √(600 × 0.3 × 0.7) = 11.2.
    assert sorted(counts) == list(NESTED_WIDTHS[:10])
    assert all(abs(count - 180) < 5 * 11.2 for count in counts.values())
    # A capacity of 0.2 has only two narrower ones, one below the grid none; S = 1 is the whole.
    assert {tuple(trainer.visited(0.2, choice)) for choice in choices} == {(0.1, 0.15, 0.2)}
    assert trainer.visited(0.05, choices[0]) == [0.05]
    assert Progressive(samples=1).visited(1.0, choices[0]) == [1.0]


STEPS = {"fedrescue": fedrescue_step, "fedseq": fedseq_step, "fedrush": fedrush_step}


def made(name: str, base: Gradient, rule: Buffers) -> Progressive | Rush:
    if name == "fedrush":
        return Rush(base, momentum_rule=rule)
    return Progressive(base, distil=name == "fedrescue", momentum_rule=rule)


@pytest.mark.parametrize("capacity", [1.0, 0.55, 0.2])
@pytest.mark.parametrize("rule", get_args(Buffers))
@pytest.mark.parametrize("name", STEPS)
def test_three_steps_equal_the_formulas(name: str, rule: Buffers, capacity: float) -> None:
    base = Gradient(optimiser=Sgd(0.9, nesterov=True, weight_decay=0.05))
    trainer = made(name, base, rule)
    descent = Descent(0.1, 0.9, decay=0.05, buffers=rule)

    def reference(model: Moved, batch: LinearBatch, choice: tuple[float, ...]) -> Moved:
        ratios = progressive_widths(np.array(NESTED_WIDTHS), capacity, 4, np.array(choice))
        return STEPS[name](model, batch, ratios, descent, capacity=capacity)

    linear.three_steps(trainer, capacity, 0.1, reference)


def ends(trainers: list[Progressive | Rush]) -> list[Params]:
    """The small task after five minibatches of one device."""
    found = []
    for trainer in trainers:
        task = small.task(dropout=0.2, dtype=torch.float64)
        where = linear.site(task, trainer)
        state = trainer.start(where, TrainingStart(task.params, task.buffers, task.labels(0)))
        data, valid = task.data(0), torch.ones(7, dtype=torch.bool)
        for i, choice in enumerate(trainer.shared_draws(4, torch.tensor(3))):
            rows = slice(7 * i, 7 * (i + 1))
            batch = Minibatch(data.x[rows], data.y[rows], valid, torch.tensor(i))
            numbers = {"lr": torch.tensor(0.05, dtype=torch.float64)}
            state = trainer.step(where, state, batch, numbers, choice)
        found.append(state["params"])
    return found


def test_three_rules_are_three_and_without_memory_or_decay_one() -> None:
    heavy = Gradient(optimiser=Sgd(0.9, nesterov=True, weight_decay=0.01))
    told = ends([Progressive(heavy, momentum_rule=rule) for rule in get_args(Buffers)])
    assert all(small.distance(a, b) > 1e-3 for a, b in combinations(told, 2))
    decaying = Gradient(optimiser=Sgd(weight_decay=0.01))
    final, masked, literal = ends(
        [Progressive(decaying, momentum_rule=r) for r in get_args(Buffers)]
    )
    assert small.identical(final, masked)
    assert small.distance(final, literal) > 1e-5
    final, masked, literal = ends([Progressive(PLAIN, momentum_rule=r) for r in get_args(Buffers)])
    assert small.identical(final, masked)
    assert small.distance(final, literal) < 1e-14


def test_each_part_of_the_method_matters() -> None:
    found = ends([Progressive(), Progressive(distil=False), Rush(), Rush(gated=False)])
    assert all(small.distance(a, b) > 1e-5 for a, b in combinations(found, 2))


@pytest.mark.parametrize("rule", ["masked", "literal"])
def test_averages_of_an_optimiser_are_kept_by_column(rule: Any) -> None:
    base = Gradient(optimiser=AdamW())
    (end,) = ends([Progressive(base, momentum_rule=rule)])
    start = small.task(dropout=0.2, dtype=torch.float64).params
    assert small.distance(start, end) > 1e-2


def test_an_optimiser_that_is_nothing_without_memory_takes_no_plain_steps() -> None:
    base = Gradient(optimiser=AdamW())
    for kind in (Progressive, Rush):
        with pytest.raises(
            ValueError, match=r'momentum_rule = "final" .* AdamW has none .*use Sgd'
        ):
            kind(base)
        with pytest.raises(
            ValueError, match=r"momentum_rule must be one of final, masked, literal"
        ):
            kind(momentum_rule="other")  # type: ignore[arg-type]


def sizes(ratio: float) -> tuple[int, int, int]:
    """Channels, channels and units of the small network at a width."""
    one, two, three = (max(1, int(np.ceil(ratio * n - 1e-9))) for n in (6, 8, 16))
    return one, two, three


def forward(params: Params, ratio: float, x: Tensor) -> Tensor:
    """The small network, cut by hand."""
    one, two, three = sizes(ratio)
    p = params
    h = functional.conv2d(x, p["0.weight"][:one], p["0.bias"][:one], padding=1)
    h = functional.max_pool2d(h.relu(), 2)
    h = functional.conv2d(h, p["4.weight"][:two, :one], p["4.bias"][:two], padding=1).relu()
    h = functional.linear(h.flatten(1), p["8.weight"][:three, : 16 * two], p["8.bias"][:three])
    return functional.linear(h.relu(), p["10.weight"][:, :three], p["10.bias"])


def held(params: Params, ratio: float) -> dict[str, Tensor]:
    """Where the small network has coordinates at a width; nothing at width 0."""
    masks = {name: torch.zeros_like(value, dtype=torch.bool) for name, value in params.items()}
    if ratio:
        one, two, three = sizes(ratio)
        masks["0.weight"][:one] = masks["0.bias"][:one] = True
        masks["4.weight"][:two, :one] = masks["4.bias"][:two] = True
        masks["8.weight"][:three, : 16 * two] = masks["8.bias"][:three] = True
        masks["10.weight"][:, :three] = masks["10.bias"][:] = True
    return masks


def by_hand(params: Params, ratios: list[float], x: Tensor, y: Tensor) -> Params:
    """FedResCuE's minibatch with torch alone: plain steps at rate 0.1, clipped at norm 0.5."""
    teacher = functional.softmax(forward(params, 1.0, x), -1)
    before = 0.0
    for ratio in [*ratios, None]:
        leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
        logits = forward(leaves, ratio or 1.0, x)
        loss = functional.cross_entropy(logits, y)
        if ratio is not None and ratio < 1:
            student = functional.log_softmax(logits, -1)
            loss = loss + functional.kl_div(student, teacher, reduction="batchmean")
        found = torch.autograd.grad(loss, list(leaves.values()))
        new, old = held(params, ratio or 1.0), held(params, before if ratio else 0.0)
        masked = {n: g * (new[n] & ~old[n]) for n, g in zip(leaves, found, strict=True)}
        norm = torch.sqrt(sum((g.square().sum() for g in masked.values()), torch.zeros(())))
        scale = (0.5 / (norm + 1e-6)).clamp(max=1.0)
        params = {n: v - 0.1 * scale * masked[n] for n, v in params.items()}
        before = ratio or 0.0
    return params


def test_a_convolutional_network_equals_a_plain_loop() -> None:
    task = small.task(dropout=0.0, norm=False, dtype=torch.float64)
    trainer = Progressive(Gradient(clip=0.5))
    where = linear.site(task, trainer)
    state = trainer.start(where, TrainingStart(task.params, task.buffers, task.labels(0)))
    expected = dict(task.params)
    data, valid = task.data(0), torch.ones(8, dtype=torch.bool)
    for i, choice in enumerate(trainer.shared_draws(3, torch.tensor(3))):
        rows = slice(8 * i, 8 * (i + 1))
        batch = Minibatch(data.x[rows], data.y[rows], valid, torch.tensor(i))
        numbers = {"lr": torch.tensor(0.1, dtype=torch.float64)}
        state = trainer.step(where, state, batch, numbers, choice)
        expected = dict(by_hand(expected, trainer.visited(1.0, choice), *batch[:2]))
    assert small.distance(expected, state["params"]) < 1e-13
    assert small.distance(task.params, state["params"]) > 1e-2


def test_the_proximal_term_pulls_the_columns_that_move() -> None:
    pulled, free = ends([Progressive(Gradient(proximal=p)) for p in (5.0, 0.0)])
    start = small.task(dropout=0.2, dtype=torch.float64).params
    assert small.distance(start, pulled) < 0.9 * small.distance(start, free)


@pytest.mark.parametrize("kind", [Slim, Fjord])
def test_1_7_the_whole_model_does_not_diverge_from_itself(kind: type[Slim] | type[Fjord]) -> None:
    """With its dropout: a part of ratio 1 adds nothing to FedSlim, and to FjORD the loss again."""
    task = small.task(dropout=0.2, dtype=torch.float64)
    data, valid = task.data(0), torch.ones(task.size(0), dtype=torch.bool)
    batch = Minibatch(data.x, data.y, valid, torch.tensor(0))
    numbers = {"lr": torch.tensor(0.1, dtype=torch.float64)}
    given = TrainingStart(task.params, task.buffers, task.labels(0))
    trainer = kind(PLAIN, (1.0,), samples=1)
    where, plain = linear.site(task, trainer), linear.site(task, PLAIN)
    twice = {"lr": numbers["lr"] * (2 if kind is Fjord else 1)}
    found = trainer.step(where, trainer.start(where, given), batch, numbers, (0.3,))
    expected = PLAIN.step(plain, PLAIN.start(plain, given), batch, twice, None)
    assert small.distance(expected["params"], found["params"]) < 1e-15


def test_work_is_the_expectation_over_the_draws() -> None:
    """Each of the narrower ratios is as likely: the mean over all steps comes near."""
    task = small.task()
    half = task.blueprint.prefix(0.5)
    trainer = Progressive(Gradient(batch_size=8))
    priced = Priced(task.blueprint, half, 8)
    costs = {ratio: priced.within(ratio).sample.flops for ratio in NESTED_WIDTHS if ratio <= 0.5}
    drawn = [trainer.visited(0.5, c) for c in trainer.shared_draws(2000, rng.root(0, "cohort"))]
    parts = np.mean([sum(costs[ratio] for ratio in ratios) for ratios in drawn])
    whole = priced.sample.flops + priced.sample.forward_flops
    work = trainer.work(priced, processed=40, local_steps=5)
    assert work.flops == pytest.approx(40 * (parts + whole), rel=0.01)
    plain = trainer.base.work(priced, processed=40, local_steps=5)
    assert work.calls > 4 * plain.calls
    assert work.moved > 3 * plain.moved
    assert work.memory > plain.memory
    assert replace(trainer, samples=0).work(priced, 40, 5) == plain


def test_a_narrow_device_has_fewer_parts_to_pay_for() -> None:
    task = small.task()
    priced = [Priced(task.blueprint, task.blueprint.prefix(p), 8) for p in (0.125, 1.0)]
    few, many = (Progressive().work(p, 8, 1).calls / p.batch.calls for p in priced)
    assert few < many
    assert Slim().work(Priced(task.blueprint, Slice(), 8), 8, 1).flops > 0
