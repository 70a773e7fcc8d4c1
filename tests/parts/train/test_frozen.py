"""Training that leaves the leading part as it came, against training of everything."""

from dataclasses import replace

import pytest
import torch

from anyfleet.core.method import Method
from anyfleet.elastic import cut
from anyfleet.methods import fedavg
from anyfleet.parts.plan import WidthByLevel
from anyfleet.parts.train import Decaying, FrozenPrefix, Gradient, Sgd
from anyfleet.runtime import Sequential, Stacked
from tests.helpers import small

SGD = Sgd(momentum=0.9, nesterov=True, weight_decay=0.1)
FREE = Gradient(Decaying(0.1), SGD, epochs=2, batch_size=8)
FROZEN = FrozenPrefix(Decaying(0.1), SGD, epochs=2, batch_size=8, frozen=0.5)


def trained(train: Gradient, width: float = 1.0) -> Method:
    return replace(fedavg(count=3), plan=WidthByLevel((width,)), train=train)


@pytest.mark.parametrize("engine", [Sequential(), Stacked()], ids=["sequential", "stacked"])
def test_the_leading_part_stays_and_the_rest_is_trained(engine: Sequential | Stacked) -> None:
    task = small.task()
    before = task.params
    after = small.steps(trained(FROZEN), task, 2, engine=engine)[-1].params
    half = task.blueprint.prefix(0.5)
    was, now = (cut(tree, half, task.blueprint) for tree in (before, after))
    assert small.identical(was, now)
    # Every tensor that has columns beyond the half has moved.
    wider = [name for name in before if before[name].shape != was[name].shape]
    assert wider
    assert all(not torch.equal(before[name], after[name]) for name in wider)


@pytest.mark.parametrize("width", [0.5, 0.25])
def test_a_sub_model_that_is_not_wider_is_trained_as_a_whole(width: float) -> None:
    one, two = (
        small.steps(trained(train, width), small.task(), 1)[-1].params for train in (FREE, FROZEN)
    )
    assert small.identical(one, two)


def test_nothing_and_everything_cannot_be_frozen() -> None:
    for width in (0.0, 1.0):
        with pytest.raises(ValueError, match=r"FrozenPrefix\.frozen must lie in"):
            FrozenPrefix(frozen=width)
