"""FedPMT (specification §1.3) through real runs."""

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from anyfleet.analysis.diagnosis import trained_layers_distribution, trained_layers_psi
from anyfleet.arrays import Ints
from anyfleet.core.loop import Round
from anyfleet.core.messages import Params
from anyfleet.core.slots import Select, State
from anyfleet.core.view import View
from anyfleet.formulas.fedpmt import CNN_CIFAR, fedpmt_complexity
from anyfleet.formulas.reference import fedpmt_layer_mean
from anyfleet.methods import fedavg, fedpmt
from anyfleet.methods.fedavg import Training
from anyfleet.papers import FEDPMT, papers_of
from anyfleet.parts.norm import Tracked
from anyfleet.parts.plan import TrainedLayersByLevel
from anyfleet.parts.plan.trained_layers import first_trained_layers
from anyfleet.parts.schedule import Deadline
from anyfleet.parts.select import Everyone
from anyfleet.parts.train import Sgd
from anyfleet.runtime import Sequential, Stacked, Threads
from anyfleet.tasks import Data, Split, Task, zoo
from anyfleet.tasks.partition import Iid
from anyfleet.world import Fleet, Group, Steady, levels
from tests.helpers import small

SETTINGS: Training = {"lr": 0.1, "batch_size": 8}
FOUR = levels(speeds=(1e9, 8e8, 6e8, 4e8))
LAYERS = [("0", "1"), ("4",), ("8",), ("10",)]  # of the small net; a norm belongs to its layer


def in_layer(number: int, params: Params) -> dict[str, Tensor]:
    return {n: v for n, v in params.items() if n.partition(".")[0] in LAYERS[number]}


def moved(before: Params, after: Params) -> list[int]:
    """The layers that are not what they were."""
    layers = range(len(LAYERS))
    return [i for i in layers if not small.identical(in_layer(i, before), in_layer(i, after))]


@dataclass(frozen=True)
class Only(Select):
    """One device, always."""

    device: int

    def __call__(self, view: View, state: State, key: Tensor) -> Ints:
        return np.array([self.device])


# --- identities -------------------------------------------------------------------------------


def test_at_full_depth_it_is_fedavg_bit_for_bit() -> None:
    task, fleet = small.task(), levels(speeds=(1e9,))
    one = small.steps(fedavg(count=5, **SETTINGS), task, 3, fleet=fleet)
    for method in (
        fedpmt(depths=1, count=5, **SETTINGS),
        fedpmt(depths=4, seconds=1e9, count=5, **SETTINGS),
    ):
        two = small.steps(method, task, 3, fleet=fleet)
        assert small.identical(one[-1].params, two[-1].params)
    # The same cohort on a fleet of several levels.
    many = [
        small.steps(replace(m, select=Everyone()), task, 2, fleet=FOUR)[-1].params
        for m in (fedavg(**SETTINGS), fedpmt(depths=1, **SETTINGS), fedpmt(depths=2, **SETTINGS))
    ]
    assert small.identical(many[0], many[1])
    assert not small.identical(many[0], many[2])


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "batch norm"])
def test_1_3_a_round_is_the_layer_mean_of_what_each_device_does_alone(norm: bool) -> None:
    task = small.task(norm=norm, dtype=torch.float64)
    method = replace(fedpmt(**SETTINGS), select=Everyone())
    (together,) = small.steps(method, task, 1, fleet=FOUR)
    alone = [
        small.steps(replace(method, select=Only(device)), task, 1, fleet=FOUR)[0]
        for device in range(task.devices)
    ]
    masks = [np.arange(4) >= int(step.ledger.first_trained_layer[0]) for step in alone]
    assert {int(mask.sum()) for mask in masks} == {1, 2, 3, 4}
    after = fedpmt_layer_mean(
        [flat(in_layer(i, task.params)) for i in range(4)],
        [[taken(task.params, step, i) for i in range(4)] for step in alone],
        np.array(masks),
    )
    for i, expected in enumerate(after):
        np.testing.assert_allclose(flat(in_layer(i, together.params)), expected, rtol=1e-12)


def flat(params: Params) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.concatenate([value.double().flatten().numpy() for value in params.values()])


def taken(before: Params, step: Round, layer: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    return flat(in_layer(layer, before)) - flat(in_layer(layer, step.params))


# --- what is trained, sent and kept -----------------------------------------------------------


def test_1_3_only_the_last_layers_move_and_only_they_are_sent() -> None:
    task = small.task()
    for trained in (1, 2, 3, 4):
        method = replace(
            fedpmt(**SETTINGS),
            plan=TrainedLayersByLevel(trained_layers=(trained,)),
            select=Everyone(),
        )
        (step,) = small.steps(method, task, 1)
        assert moved(task.params, step.params) == list(range(4 - trained, 4))
        names = task.blueprint.trained(4 - trained)
        assert set(step.ledger.bits_up) == {32 * task.blueprint.numel(names)}
        assert set(step.ledger.parameters) == {task.blueprint.numel()}  # all of it comes down


def test_1_3_a_layer_that_nobody_delivers_keeps_its_value() -> None:
    """The only device that trains everything misses the deadline; so would all with FedAvg."""
    link = Steady(bit_rate_up=1e9, bit_rate_down=1e9)
    fleet = Fleet((Group(speed=1e4, link=link, count=1), Group(speed=1e9, link=link, count=7)))
    method = replace(fedpmt(**SETTINGS), select=Everyone(), schedule=Deadline(1.0))
    task = small.task()
    first, second = small.steps(method, task, 2, fleet=fleet)
    for before, step in ((task.params, first), (first.params, second)):
        assert Counter(step.ledger.failure) == {"": 7, "too late": 1}
        assert moved(before, step.params) == [1, 2, 3]


def test_1_3_layers_that_are_not_trained_run_in_training_mode_but_keep_their_statistics() -> None:
    """Batch norm stands in the first layer: its buffers move with it, and only with it."""
    task = small.task(dropout=0.5)
    base = replace(fedpmt(**SETTINGS), norm=Tracked(), select=Everyone())
    whole, last = (
        small.steps(replace(base, plan=TrainedLayersByLevel(trained_layers=(n,))), task, 2)[-1]
        for n in (4, 3)
    )
    assert small.identical(task.buffers, last.buffers)
    assert not small.identical(task.buffers, whole.buffers)
    # By the batch's own statistics, as in training: running ones would give other gradients.
    plain = replace(base, plan=TrainedLayersByLevel(trained_layers=(1,)))
    one = small.steps(plain, task, 1)[-1].params
    shifted = {n: v + 1.0 if n.endswith("mean") else v for n, v in task.buffers.items()}
    assert small.identical(one, small.steps(plain, replace(task, buffers=shifted), 1)[-1].params)
    # And dropout, which lies before the last layer, drops.
    calm = small.steps(plain, small.task(dropout=0.0), 1)[-1].params
    assert not small.identical(one, calm)


@dataclass(frozen=True)
class Watched(Sgd):
    """Momentum that notes whose velocity it keeps, and that it began at zero."""

    seen: ClassVar[list[frozenset[str]]] = []

    def init(self, params: Params) -> Any:
        self.seen.append(frozenset(params))
        state = super().init(params)
        assert not any(value.any() for value in state["velocity"].values())
        return state


def test_1_3_momentum_is_kept_for_trained_layers_and_reset_every_round() -> None:
    task = small.task()
    base = fedpmt(**SETTINGS)
    train = replace(base.train, optimiser=Watched(0.9))  # type: ignore[type-var]
    method = replace(
        base, select=Everyone(), plan=TrainedLayersByLevel(trained_layers=(2,)), train=train
    )
    Watched.seen.clear()
    small.steps(method, task, 3)
    assert len(Watched.seen) == 3 * task.devices
    assert set(Watched.seen) == {frozenset(task.blueprint.trained(2))}


def test_weight_decay_leaves_layers_alone_that_are_not_trained() -> None:
    task = small.task()
    base = replace(
        fedpmt(**SETTINGS), select=Everyone(), plan=TrainedLayersByLevel(trained_layers=(1,))
    )
    train = replace(base.train, optimiser=Sgd(weight_decay=0.1))  # type: ignore[type-var]
    (step,) = small.steps(replace(base, train=train), task, 1)
    assert moved(task.params, step.params) == [3]


# --- who does what ----------------------------------------------------------------------------


def test_1_3_as_many_devices_of_each_level_and_the_rest_from_the_strongest() -> None:
    task, fleet = small.task(devices=12), FOUR
    for count, expected in ((8, (2, 2, 2, 2)), (6, (2, 2, 1, 1)), (3, (1, 1, 1, 0))):
        (step,) = small.steps(fedpmt(count=count, **SETTINGS), task, 1, fleet=fleet)
        assert np.bincount(step.ledger.level, minlength=4).tolist() == list(expected)
        assert step.ledger.first_trained_layer.tolist() == step.ledger.level.tolist()


def cifar() -> Task:
    """One batch of 20 for each of five devices."""
    data = Data(torch.randn(100, 3, 32, 32), torch.arange(100) % 10)
    split = Split(devices=5, partition=Iid(samples=20), test_share=0.0)
    return Task.of(zoo.cnn_cifar(), data, data, split=split)


def five(*speeds: float) -> Fleet:
    """Ten seconds for the whole model at speed 1, as the paper counts."""
    full = fedpmt_complexity(CNN_CIFAR, 20, "paper") / 10
    link = Steady(bit_rate_up=1e12, bit_rate_down=1e12)
    groups = tuple(Group(speed=full * speed, link=link) for speed in speeds)
    return Fleet(groups, counting="paper")


def test_1_3_the_deadline_of_the_paper() -> None:
    """26.5 s on 1, 1/2, 1/3, 1/4, 1/5: nobody is late with FedPMT, three of five with FedAvg."""
    task, fleet = cifar(), five(1, 1 / 2, 1 / 3, 1 / 4, 1 / 5)
    base = replace(fedavg(batch_size=20), select=Everyone(), schedule=Deadline(26.5))
    (avg,) = small.steps(base, task, 1, fleet=fleet)
    assert sorted(avg.ledger.level[avg.ledger.counted]) == [0, 1]
    method = replace(fedpmt(depths=5, batch_size=20), select=Everyone(), schedule=Deadline(26.5))
    (pmt,) = small.steps(method, task, 1, fleet=fleet)
    assert not any(pmt.ledger.failure)
    seconds = dict(zip(pmt.ledger.level.tolist(), pmt.ledger.compute_seconds.tolist(), strict=True))
    expected = [10.0, 18.66, 26.28, 22.91, 22.92]
    assert [seconds[level] for level in range(5)] == pytest.approx(expected, abs=0.01)


def test_1_3_option_ii_takes_the_deepest_that_is_in_time() -> None:
    """1/2 has time for everything; .33 instead of 1/3 would miss by 0.05 s, and takes one less."""
    task = cifar()
    for third, depth in ((1 / 3, 2), (0.33, 3)):
        method = replace(fedpmt(depths=5, seconds=26.5, batch_size=20), select=Everyone())
        (step,) = small.steps(method, task, 1, fleet=five(1, 1 / 2, third, 1 / 4, 1 / 5))
        chosen = dict(zip(step.ledger.level.tolist(), step.ledger.choice.tolist(), strict=True))
        assert [chosen[level] for level in range(5)] == [0, 0, depth, 3, 4]
        assert step.ledger.first_trained_layer.tolist() == step.ledger.choice.tolist()
        assert step.ledger.compute_seconds.max() <= 26.5


def test_f_1_psi_of_a_run() -> None:
    task = small.task()
    firsts = first_trained_layers(task.blueprint, 4)
    for method, expected in (
        (fedpmt(count=8, **SETTINGS), 25 / 3),
        (fedpmt(depths=2, count=8, **SETTINGS), 1 / 0.25 + 3),
        (replace(fedavg(**SETTINGS), select=Everyone()), 4.0),
        (
            replace(
                fedpmt(**SETTINGS),
                plan=TrainedLayersByLevel(trained_layers=(3,)),
                select=Everyone(),
            ),
            math.inf,
        ),
    ):
        (step,) = small.steps(method, task, 1, fleet=FOUR)
        assert trained_layers_distribution(step.ledger, firsts).sum() == pytest.approx(1)
        assert trained_layers_psi(step.ledger, firsts) == pytest.approx(expected)


# --- learning ---------------------------------------------------------------------------------


def test_every_engine_trains_the_same() -> None:
    task = small.task(equal=False, dtype=torch.float64)
    method = fedpmt(count=8, lr=0.1, batch_size=8, momentum=0.5)
    ends = [
        small.steps(method, task, 2, engine=engine, fleet=FOUR)[-1].params
        for engine in (Sequential(), Threads(), Stacked())
    ]
    assert small.identical(ends[0], ends[1])
    assert small.distance(ends[0], ends[2]) < 1e-10
    assert small.distance(task.params, ends[0]) > 1e-3


def test_who_is_cited() -> None:
    assert FEDPMT in papers_of(fedpmt())
