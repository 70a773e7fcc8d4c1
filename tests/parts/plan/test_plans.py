"""Planners that look at what devices report."""

from dataclasses import replace

import numpy as np
import pytest

from anyfleet import methods
from anyfleet.core.ledger import Ledger
from anyfleet.core.method import Method
from anyfleet.core.time_and_energy import Amount, training
from anyfleet.parts.choose import LargestInTime
from anyfleet.parts.plan import (
    Assigned,
    LargestFitting,
    LocalStepsWithin,
    WholeModel,
    WidthByLevel,
    WidthMenu,
)
from anyfleet.world import Fleet, Group, levels
from tests.helpers import small

FEDAVG = methods.fedavg(count=8, lr=0.1, batch_size=8)


def needed(share: float) -> float:
    """Bytes that training this share takes, as the planner sees it."""
    blueprint = small.task().blueprint
    slice_ = blueprint.prefix(share)
    found = training(FEDAVG.train, blueprint, slice_, Amount(8), "flops")
    return float(found.memory[0])


def with_memory(*sizes: float) -> Fleet:
    return Fleet(tuple(Group(memory=size) for size in sizes))


def test_everybody_gets_the_largest_share_that_fits() -> None:
    shares = (1.0, 0.5, 0.25)
    fleet = with_memory(*(needed(share) for share in shares))
    method = replace(FEDAVG, plan=LargestFitting(shares))
    (step,) = small.steps(method, small.task(), 1, fleet=fleet)
    blueprint = small.task().blueprint
    sizes = [blueprint.local(blueprint.prefix(share)).numel() for share in shares]
    assert not any(step.ledger.failure)
    assert step.ledger.parameters.tolist() == [sizes[level] for level in step.ledger.level]
    assert set(step.ledger.level) == {0, 1, 2}


def test_nobody_gets_more_than_the_inner_plan_says() -> None:
    method = replace(FEDAVG, plan=LargestFitting((1.0, 0.5, 0.25), WidthByLevel((0.5,))))
    (step,) = small.steps(method, small.task(), 1, fleet=with_memory(4e9, needed(0.25)))
    blueprint = small.task().blueprint
    half, quarter = (blueprint.local(blueprint.prefix(s)).numel() for s in (0.5, 0.25))
    expected = [half if level == 0 else quarter for level in step.ledger.level]
    assert step.ledger.parameters.tolist() == expected


@pytest.mark.parametrize("plan", [WholeModel(), LargestFitting((1.0, 0.5)), WidthMenu((1.0, 0.5))])
def test_who_has_no_room_at_all_is_not_asked(plan: WholeModel) -> None:
    fleet = with_memory(4e9, needed(0.5) / 2)
    (step,) = small.steps(replace(FEDAVG, plan=plan), small.task(), 1, fleet=fleet)
    told = step.ledger
    for level, reason, bits in zip(told.level, told.failure, told.bits_down, strict=True):
        assert bool(reason) == (level == 1)
        if level == 1:
            assert reason.startswith("out of memory: needs")
            assert bits == 0
    assert np.all(told.seconds[told.level == 1] == 0)


def test_a_menu_shows_only_what_fits() -> None:
    """`First` takes the first entry: the largest of those that the device can hold."""
    method = replace(FEDAVG, plan=WidthMenu((1.0, 0.5, 0.25)))
    (step,) = small.steps(method, small.task(), 1, fleet=with_memory(4e9, needed(0.5)))
    blueprint = small.task().blueprint
    whole, half = (blueprint.local(blueprint.prefix(s)).numel() for s in (1.0, 0.5))
    assert not any(step.ledger.failure)
    expected = [whole if level == 0 else half for level in step.ledger.level]
    assert step.ledger.parameters.tolist() == expected
    # Counted in the planner's menu: one number is one size, whatever else was left out.
    assert step.ledger.choice.tolist() == step.ledger.level.tolist()


def test_room_for_everybody_changes_nothing() -> None:
    plain, fitted = (
        small.steps(replace(FEDAVG, plan=plan), small.task(), 2, fleet=levels())[-1]
        for plan in (WholeModel(), LargestFitting())
    )
    assert small.identical(plain.params, fitted.params)
    with pytest.raises(ValueError, match=r"LargestFitting\.widths must name at least one"):
        LargestFitting(())


@pytest.mark.parametrize("seconds", [0.005, 0.02, 0.1, 0.5])
def test_1_2_steps_of_a_menu_are_those_of_the_size_that_allows_most(seconds: float) -> None:
    """As many as the share that is chosen then has time for; the whole model if all fit in it."""
    fleet, menu, choose = Fleet((Group(speed=2e7),)), WidthMenu((1.0, 0.25)), LargestInTime(seconds)

    def ledger(method: Method) -> Ledger:
        return small.steps(method, small.task(norm=False), 1, fleet=fleet)[0].ledger

    chosen = ledger(replace(FEDAVG, plan=LocalStepsWithin(seconds, menu), choose=choose))
    assert (chosen.seconds <= seconds).all()
    assert set(chosen.width) == {1.0 if seconds == 0.5 else 0.25}
    for inner in (WidthByLevel((0.25,)), Assigned(menu, choose)):
        known = ledger(replace(FEDAVG, plan=LocalStepsWithin(seconds, inner)))
        assert chosen.local_steps.tolist() == known.local_steps.tolist()
