"""Captured training on a CPU, where nothing is captured; tests/gpu has what needs CUDA."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.func import vmap
from torch.utils._pytree import tree_flatten, tree_map

from anyfleet.core.local_training import lifted, train, train_with
from anyfleet.parts.norm import Tracked
from anyfleet.parts.train import AdamW, Decaying, Gradient, Progressive
from anyfleet.runtime.simulated.captured_training import (
    CapturedTraining,
    Reads,
    arithmetic,
    stack_size,
    traced_step,
)
from tests.helpers import small
from tests.helpers.stacks import distance, same_bits, stack

TRAINER = Gradient(Decaying(0.1), AdamW(), batch_size=16, epochs=2, label_rows=True)


def test_on_a_cpu_it_is_plain_training() -> None:
    task = small.task(equal=False)
    runner = CapturedTraining()
    for round_index in (0, 1):
        given = stack(task, TRAINER, [0, 1, 2], norm=Tracked(), round_index=round_index)
        plain = train(TRAINER, *given, lift=vmap, cohort_key=0)
        assert same_bits(runner(TRAINER, *given, lift=lifted(3), cohort_key=0), plain)
    assert runner.seconds == 0


def test_precision_holds_during_training_only() -> None:
    task = small.task()
    given = stack(task, TRAINER, [0, 1])
    plain = CapturedTraining()(TRAINER, *given, lift=vmap, cohort_key=0)
    coarse = CapturedTraining("bf16")(TRAINER, *given, lift=vmap, cohort_key=0)
    assert all(value.dtype == torch.float32 for value in coarse.params.values())
    assert 1e-4 < distance(coarse, plain, given.inputs.params) < 0.5
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = products.allow_tf32, convolutions.allow_tf32, convolutions.deterministic
    with pytest.raises(ZeroDivisionError), arithmetic("tf32", torch.device("cuda")):
        assert 1 / (1 - products.allow_tf32 * convolutions.deterministic)
    assert (products.allow_tf32, convolutions.allow_tf32, convolutions.deterministic) == before


def test_stacks_are_padded_a_little_and_to_few_sizes() -> None:
    sizes = [stack_size(count) for count in range(1, 2001)]
    assert all(size >= count for count, size in enumerate(sizes, 1))
    assert all(size - count <= max(9, count / 10) for count, size in enumerate(sizes, 1))
    assert sizes == sorted(sizes)
    assert len(set(sizes)) < 120
    # Round numbers are sizes; 50 devices that have one of five widths by chance make few stacks.
    assert all(stack_size(count) == count for count in (1, 2, 5, 10, 20, 50, 100, 500, 1000, 2000))
    assert len({stack_size(count) for count in range(4, 17)}) == 3


def test_what_training_reads_is_kept_and_what_it_makes_is_not() -> None:
    given = stack(small.task(dropout=0.5), TRAINER, [0, 1, 2], norm=Tracked())
    with Reads() as reads:
        found = train(TRAINER, *given, lift=vmap, cohort_key=0)
    assert same_bits(found, train(TRAINER, *given, lift=vmap, cohort_key=0))
    kept = {each.data_ptr() for each in reads.tensors.values()}
    inputs = given.inputs
    assert {inputs.x.data_ptr(), inputs.y.data_ptr(), inputs.key.data_ptr()} <= kept
    assert {each.data_ptr() for each in inputs.params.values()} <= kept
    assert not {each.data_ptr() for each in found.params.values()} & kept


def test_views_of_what_was_there_before_are_not_made() -> None:
    constant = torch.ones(3)
    with Reads() as reads:
        made = constant.view(3, 1) + 1
        assert made.add_(constant.view(3, 1)).sum() == 9
    assert [each is constant for each in reads.tensors.values()] == [True]


def test_a_traced_step_is_the_step_for_other_values_too() -> None:
    base = replace(TRAINER, local_steps=2)
    trainer = Progressive(base, samples=2, momentum_rule="masked")
    task = small.task(dropout=0.5)
    first = stack(task, trainer, [0, 1, 2], norm=Tracked())
    draws = trainer.shared_draws(first.bounds.local_steps, torch.tensor(5))
    checked: list[int] = []

    def check(step: Callable[..., Any]) -> Callable[..., Any]:
        def mapped(*given: Any) -> Any:
            mapped_step = vmap(step)
            leaves, tree = tree_flatten(given)
            graph, result = traced_step(mapped_step, leaves, tree)
            after = mapped_step(*given)
            found, shape = tree_flatten(after)
            assert shape == result
            # Of another state, too: no value was written into the graph.
            state = tree_map(lambda t: 1.25 * t if t.is_floating_point() else t, given[0])
            again, _ = tree_flatten(mapped_step(state, *given[1:]))
            other, _ = tree_flatten((state, *given[1:]))
            for values, inputs in ((found, leaves), (again, other)):
                traced = graph(*inputs)
                assert all(torch.equal(a, b) for a, b in zip(traced, values, strict=True))
            checked.append(len(list(graph.graph.nodes)))
            return after

        return mapped

    train_with(draws, trainer, *first, lift=vmap, lift_step=check)
    substeps = [trainer.substeps(first.context, draw) for draw in draws]
    assert len(checked) == sum(map(len, substeps)) > first.bounds.local_steps
