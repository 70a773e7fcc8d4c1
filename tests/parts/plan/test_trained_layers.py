"""Depths: which layers a device trains, who decides it, and by what."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from anyfleet.core.check_in import CheckIns, Choices
from anyfleet.core.ledger import Ledger
from anyfleet.core.local_training import local_steps
from anyfleet.core.messages import ChooserState
from anyfleet.core.method import Method
from anyfleet.core.signals import TargetTime
from anyfleet.core.slots import Choose, Lesson, Plan
from anyfleet.elastic import Blueprint, trace
from anyfleet.errors import CompositionError
from anyfleet.methods import fedavg
from anyfleet.parts.choose import First, LargestInTime
from anyfleet.parts.plan import Assigned, TrainedLayersByLevel, TrainedLayersMenu, WidthMenu
from anyfleet.parts.plan.trained_layers import first_trained_layers
from anyfleet.parts.select import Everyone
from anyfleet.tasks import zoo
from anyfleet.tasks.partition import Iid
from anyfleet.world import Fleet, Group, Redrawn, Reports, Steady, levels
from anyfleet.world import Uniform as Between
from tests.helpers import small

ALL = replace(fedavg(lr=0.1, batch_size=8), select=Everyone())


def traced(net: nn.Module, *shape: int) -> Blueprint:
    return trace(net, torch.zeros(2, *shape))


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "FCNN": (zoo.perceptron, (1, 28, 28)),
    "MNIST": (zoo.cnn_mnist, (1, 28, 28)),
    "CIFAR": (zoo.cnn_cifar, (3, 32, 32)),
}


@cache
def blueprint_of(name: str) -> Blueprint:
    net, shape = NETS[name]
    return traced(net(), *shape)


# --- which layers -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "widths", "layers"),
    [
        ("FCNN", 4, [2, 3, 4, 5]),
        ("MNIST", 4, [1, 2, 3, 4]),
        ("CIFAR", 5, [1, 2, 3, 4, 5]),
        ("FCNN", 2, [4, 5]),
        ("MNIST", 2, [3, 4]),
        ("CIFAR", 2, [4, 5]),
        ("FCNN", None, [1, 2, 3, 4, 5]),
        ("FCNN", 1, [5]),
        ("MNIST", 7, [1, 2, 3, 4]),
    ],
    ids=["FCNN 4", "MNIST 4", "CIFAR 5", "FCNN 2", "MNIST 2", "CIFAR 2", "each", "one", "too many"],
)
def test_1_3_widths_of_the_table(name: str, widths: int | None, layers: list[int]) -> None:
    """specification §1.3, smallest width first."""
    blueprint = blueprint_of(name)
    found = [
        len(blueprint.layers) - first for first in reversed(first_trained_layers(blueprint, widths))
    ]
    assert found == layers
    # Always a suffix that ends in the classifier.
    assert all(
        blueprint.layers[first:][-1] == blueprint.layers[-1]
        for first in first_trained_layers(blueprint)
    )


def test_levels_may_name_their_layers() -> None:
    fcnn = blueprint_of("FCNN")
    assert first_trained_layers(fcnn, trained_layers=(5, 4, 3, 2)) == first_trained_layers(fcnn, 4)
    assert first_trained_layers(fcnn, trained_layers=(3, 1)) == (2, 4)
    assert first_trained_layers(blueprint_of("MNIST"), trained_layers=(9, 1)) == (0, 3)


def test_1_3_a_model_with_one_layer_has_one_width() -> None:
    blueprint = traced(zoo.logistic(), 784)
    assert first_trained_layers(blueprint, 4) == (0,)
    assert first_trained_layers(blueprint, trained_layers=(2, 1)) == (0, 0)


class Unused(nn.Module):
    """A linear layer that forward() never comes to."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(4, 3), nn.Linear(3, 2)
        self.spare = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.after(self.before(x).relu())
        return out


def test_layers_that_cannot_learn_do_not_count() -> None:
    net = nn.Sequential(
        nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2)
    )
    net[0].requires_grad_(False)
    blueprint = traced(net, 4)
    # Whoever trains everything has the whole model: frozen layers are its beginning.
    assert first_trained_layers(blueprint) == (0, 2, 3)
    assert first_trained_layers(blueprint, 2) == (0, 2)
    net[4].requires_grad_(False)
    assert first_trained_layers(traced(net, 4)) == (0, 3)
    assert len(first_trained_layers(traced(Unused(), 4))) == 2


def test_depths_that_cannot_be_meant_are_refused() -> None:
    for part in (TrainedLayersByLevel, TrainedLayersMenu):
        with pytest.raises(ValueError, match=rf"{part.__name__}\.depths must be at least 1"):
            part(0)
        with pytest.raises(
            ValueError, match=r"\.trained_layers must be at least 1 each, got 0 at posit"
        ):
            part(trained_layers=(3, 0))
        with pytest.raises(ValueError, match=r"takes depths or trained_layers"):
            part(2, (3, 2))


# --- plans and menus --------------------------------------------------------------------------


def run(plan: Plan, fleet: Fleet, choose: Choose | None = None, *, devices: int = 8) -> Ledger:
    method = replace(ALL, plan=plan, choose=choose or First())
    (step,) = small.steps(method, small.task(devices=devices), 1, fleet=fleet)
    return step.ledger


def test_every_level_has_its_depth_and_the_last_serves_those_beyond() -> None:
    fleet = levels(speeds=(1e9, 8e8, 6e8, 4e8))
    assert set(run(TrainedLayersByLevel(4), fleet).level) == {0, 1, 2, 3}
    for part, firsts in (
        (TrainedLayersByLevel(4), (0, 1, 2, 3)),
        (TrainedLayersByLevel(2), (0, 1, 1, 1)),
    ):
        found = run(part, fleet)
        assert found.first_trained_layer.tolist() == [firsts[level] for level in found.level]
    found = run(TrainedLayersByLevel(trained_layers=(2, 1)), fleet)
    assert found.first_trained_layer.tolist() == [(2, 3, 3, 3)[level] for level in found.level]


def test_a_device_chooses_the_deepest_in_time_and_reports_which() -> None:
    """Times of the four depths are told by a run without a choice."""
    fast = Steady(bit_rate_up=1e12, bit_rate_down=1e12)
    fleet = Fleet((Group(speed=1e7, link=fast),))
    assigned = [
        run(TrainedLayersByLevel(trained_layers=(n,)), fleet).compute_seconds.max()
        for n in (4, 3, 2, 1)
    ]
    assert assigned == sorted(assigned, reverse=True)
    for place, seconds in enumerate(assigned):
        found = run(TrainedLayersMenu(4), fleet, LargestInTime(1.001 * seconds))
        assert set(found.first_trained_layer) == set(found.choice) == {place}
    assert set(
        run(TrainedLayersMenu(4), fleet, LargestInTime(0.5 * assigned[-1])).first_trained_layer
    ) == {3}
    assert set(
        run(TrainedLayersMenu(2), fleet, LargestInTime(0.5 * assigned[-1])).first_trained_layer
    ) == {1}
    assert set(
        run(TrainedLayersMenu(trained_layers=(1, 3, 3)), fleet, First()).first_trained_layer
    ) == {1}


# --- the server chooses -----------------------------------------------------------------------

MENUS: list[Plan] = [WidthMenu((1.0, 0.5, 0.25, 0.125)), TrainedLayersMenu()]
WITHIN = LargestInTime(0.3)


def mixed(reports: Reports | None = None) -> Fleet:
    """Speeds and links of every kind, new in every round."""
    rate = Redrawn(Between(1e6, 1e7))
    groups = (
        Group(
            speed=Redrawn(Between(speed / 2, 2 * speed)),
            load=Redrawn(Between(1.0, 1.5)),
            link=Steady(bit_rate_up=rate, bit_rate_down=rate),
            overhead=1e-3,
            fixed=0.1,
        )
        for speed in (1e6, 2e6, 4e6, 8e6)
    )
    return Fleet(tuple(groups), reports=reports or Reports())


def sizes(method: Method, fleet: Fleet, rounds: int) -> list[tuple[int, float, int]]:
    steps = small.steps(
        method, small.task(devices=30, partition=Iid(samples=15)), rounds, fleet=fleet
    )
    rows = [row for step in steps for row in small.rows(step)]
    return [(row.device, row.width, row.first_trained_layer) for row in rows]


def pair(menu: Plan, choose: Choose = WITHIN) -> tuple[Method, Method]:
    on_device = replace(ALL, plan=menu, choose=choose)
    return on_device, replace(ALL, plan=Assigned(menu, choose))


@pytest.mark.parametrize("menu", MENUS, ids=["shares", "depths"])
def test_server_and_device_agree_when_reports_are_fresh(menu: Plan) -> None:
    chosen, assigned = (sizes(method, mixed(), 2) for method in pair(menu))
    assert chosen == assigned
    assert len({size[1:] for size in chosen}) == 4


@pytest.mark.parametrize("menu", MENUS, ids=["shares", "depths"])
@pytest.mark.parametrize("reports", [Reports(rounds=1), Reports(noise=0.5)], ids=["late", "noisy"])
def test_they_differ_when_reports_are_late_or_noisy(menu: Plan, reports: Reports) -> None:
    chosen, assigned = (sizes(method, mixed(reports), 2) for method in pair(menu))
    assert chosen != assigned
    assert [size[0] for size in chosen] == [size[0] for size in assigned]


def test_no_menu_travels_and_no_choice_is_reported() -> None:
    chosen, assigned = (
        small.steps(method, small.task(), 1, fleet=mixed())[0].ledger
        for method in pair(TrainedLayersMenu())
    )
    assert set(assigned.choice) == {-1}
    assert min(chosen.choice) >= 0
    assert (assigned.bits_down < chosen.bits_down).all()


def test_what_a_device_cannot_hold_is_not_on_its_menu() -> None:
    chosen, assigned = pair(WidthMenu((1.0, 0.5, 0.25)), First())
    whole = small.steps(chosen, small.task(), 1)[0]
    assert set(whole.ledger.width) == {1.0}
    room = np.linspace(1e4, 1.2e5, 8)
    fleet = Fleet(tuple(Group(memory=float(bytes_)) for bytes_ in room))
    ledgers = [small.steps(m, small.task(), 1, fleet=fleet)[0].ledger for m in (chosen, assigned)]
    one, two = (list(zip(each.device, each.width, each.failure, strict=True)) for each in ledgers)
    fits = [share for _, share, lost in one if not lost]
    assert set(fits) == {1.0, 0.5, 0.25}
    assert any(ledgers[0].failure)
    assert [row[1:] for row in one if not row[2]] == [row[1:] for row in two if not row[2]]
    assert [row[2] for row in one] == [row[2] for row in two]


@dataclass(frozen=True)
class Slowly(Choose):
    """The last entry, at half the speed and in one step."""

    def __call__(self, check_ins: CheckIns) -> Choices:
        for each in check_ins:
            assert local_steps(each.hyperparameters.changed(local_steps=1), [each.samples]) == [1]
        return check_ins.choices(
            [len(each.menu) - 1 for each in check_ins],
            frequency=check_ins.conditions.fastest / 2,
            local_steps=1,
        )


def test_numbers_that_a_chooser_changes_are_ordered() -> None:
    method = replace(ALL, plan=Assigned(TrainedLayersMenu(), Slowly()))
    (step,) = small.steps(method, small.task(), 1)
    assert set(step.ledger.local_steps) == {1}
    assert set(step.ledger.frequency) == {5e8}
    assert set(step.ledger.first_trained_layer) == {3}


def test_without_a_menu_there_is_nothing_to_assign() -> None:
    with pytest.raises(CompositionError, match=r"Assigned.* needs a menu.*TrainedLayersMenu"):
        replace(ALL, plan=Assigned(TrainedLayersByLevel(3), LargestInTime(1e-9)))


class Remembers(First):
    """Remembers how often it chose."""

    def learn(self, lesson: Lesson, state: ChooserState) -> ChooserState:
        return {"visits": (state.get("visits", (0.0,))[0] + 1,)}


class Keeps(First):
    learns_from = frozenset({"loss"})


class Needs(First):
    requires = frozenset({TargetTime(provider="plan=TargetSeconds(...)")})


@pytest.mark.parametrize("choose", [Remembers(), Keeps()], ids=["state", "measures"])
def test_a_chooser_that_learns_on_the_device_stays_there(choose: Choose) -> None:
    with pytest.raises(ValueError, match=r"Assigned\.choose=.*decides by what devices learn"):
        Assigned(WidthMenu(), choose)


def test_what_the_chooser_needs_the_plan_needs() -> None:
    with pytest.raises(
        CompositionError, match=r"plan=.*needs a target time.*use plan=TargetSeconds"
    ):
        replace(ALL, plan=Assigned(WidthMenu(), Needs()))
