"""FedDrop and FedRolex: random and rolling parts of one model."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from anyfleet.core.method import Method
from anyfleet.core.server import Server
from anyfleet.elastic import trace
from anyfleet.methods import fedavg, feddrop, fedrolex, heterofl
from anyfleet.methods.fedavg import Training
from anyfleet.parts.aggregate import Mean
from anyfleet.parts.extract import Rolling
from anyfleet.parts.norm import BatchStatistics, Static
from anyfleet.parts.plan import WidthByLevel
from anyfleet.parts.plan.widths import convolved
from anyfleet.runtime import Sequential, Simulated, Stacked, Threads
from anyfleet.tasks import Dirichlet
from anyfleet.tasks.zoo import cnn_cifar, cnn_mnist, perceptron
from anyfleet.world import levels
from tests.helpers import nets, small
from tests.methods.test_identities import OFF

SETTINGS: Training = {"lr": 0.1, "batch_size": 8}
TWO_LEVELS = levels(speeds=(1e9, 1e8))


def moved(before: Tensor, after: Tensor) -> list[int]:
    """The rows that changed."""
    rows: list[int] = (before != after).any(dim=1).nonzero()[:, 0].tolist()
    return rows


# --- what equals FedAvg -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [
        feddrop(widths=(1.0,), count=5, **SETTINGS),
        feddrop(widths=(1.0,), layers="linear", inverted=True, count=5, **SETTINGS),
        fedrolex(widths=(1.0,), count=5, **OFF, **SETTINGS),
        fedrolex(widths=(1.0,), shift=-2, count=5, **OFF, **SETTINGS),
    ],
    ids=["feddrop", "feddrop with its switches", "fedrolex", "fedrolex the other way"],
)
def test_share_1_equals_fedavg_bit_for_bit(method: Method) -> None:
    task = small.task()
    expected = small.steps(fedavg(count=5, **SETTINGS), task, 3)[-1].params
    assert small.identical(small.steps(method, task, 3)[-1].params, expected)


def test_fedrolex_begins_as_heterofl_and_leaves_it_in_the_second_round() -> None:
    task = small.task(partition=Dirichlet(0.5))
    runs = [
        small.steps(make(widths=(1.0, 0.5), count=5, **SETTINGS), task, 2, fleet=TWO_LEVELS)
        for make in (heterofl, fedrolex)
    ]
    assert small.identical(runs[0][0].params, runs[1][0].params)
    assert not small.identical(runs[0][1].params, runs[1][1].params)


# --- which channels are trained ---------------------------------------------------------------


def test_1_6_the_window_rolls_through_the_rounds_and_all_else_keeps_its_value() -> None:
    task = small.task()
    steps = small.steps(fedrolex(widths=(0.25,), count=3, **SETTINGS), task, 4)
    models = [task.params, *(step.params for step in steps)]
    for t, (before, after) in enumerate(pairwise(models)):
        window = sorted((t + j) % 8 for j in range(2))
        assert moved(before["4.weight"].flatten(1), after["4.weight"].flatten(1)) == window
        assert moved(before["4.bias"][:, None], after["4.bias"][:, None]) == window
        # Channel i owns 16 columns of the layer behind the flattening, hidden unit i one row.
        columns = moved(before["8.weight"].T, after["8.weight"].T)
        assert {column // 16 for column in columns} == set(window)
        rows = moved(before["8.weight"], after["8.weight"])
        assert set(rows) <= {(t + j) % 16 for j in range(4)}


def test_1_4_what_nobody_drew_keeps_its_value() -> None:
    task = small.task()
    steps = small.steps(feddrop(widths=(0.25,), count=1, **SETTINGS), task, 6)
    models = [task.params, *(step.params for step in steps)]
    drawn = [
        moved(before["4.weight"].flatten(1), after["4.weight"].flatten(1))
        for before, after in pairwise(models)
    ]
    assert {len(rows) for rows in drawn} == {2}
    assert len({tuple(rows) for rows in drawn}) > 3


def test_devices_of_one_round_train_different_channels() -> None:
    task = small.task()
    (step,) = small.steps(feddrop(widths=(0.25,), count=5, **SETTINGS), task, 1)
    rows = moved(task.params["4.weight"].flatten(1), step.params["4.weight"].flatten(1))
    assert len(rows) > 2
    assert set(step.ledger.parameters) == {
        task.blueprint.local(task.blueprint.prefix(0.25)).numel()
    }


# --- which layers are cut ---------------------------------------------------------------------


def test_1_4_only_linear_layers_are_cut_when_asked() -> None:
    task = small.task()
    method = feddrop(widths=(1.0, 0.25), layers="linear", count=8, **SETTINGS)
    (step,) = small.steps(method, task, 1, fleet=TWO_LEVELS)
    cut = task.blueprint.prefix({"8": 0.25})
    small_one, whole = task.blueprint.local(cut).numel(), task.blueprint.numel()
    assert step.ledger.parameters.tolist() == [
        whole if level == 0 else small_one for level in step.ledger.level
    ]
    by_level = {level: step.ledger.flops[step.ledger.level == level] for level in (0, 1)}
    assert by_level[1].max() < by_level[0].min()


@pytest.mark.parametrize(
    ("net", "side", "kept"),
    [
        (perceptron, 28, {"1": 216, "3": 162, "5": 108, "7": 54}),
        (cnn_mnist, 28, {"0": 8, "3": 16, "7": 70}),
        (cnn_cifar, 32, {"0": 16, "3": 32, "7": 270, "9": 162}),
    ],
    ids=["FCNN", "CNN-MNIST", "CNN-CIFAR10"],
)
def test_1_4_units_kept_in_the_nets_of_the_table(
    net: Callable[[], nn.Module], side: int, kept: dict[str, int]
) -> None:
    """specification §1.4: convolutions stay complete, hidden linear layers keep ceil(a K) units."""
    channels = 3 if side == 32 else 1
    blueprint = trace(net(), torch.zeros(2, channels, side, side))
    complete = dict.fromkeys(convolved(blueprint), 1.0)
    shares = {**dict.fromkeys(blueprint.counts(1.0), 0.54), **complete}
    assert blueprint.counts(shares) == kept


def test_an_axis_that_some_convolution_shares_is_complete() -> None:
    assert convolved(nets.traced("squeeze_excite").blueprint) == {"c1", "c2"}
    assert convolved(nets.traced("vision").blueprint) == {"patch"}
    assert not convolved(nets.traced("language_fused").blueprint)


def test_layers_that_cannot_be_meant_are_refused() -> None:
    with pytest.raises(ValueError, match=r'WidthByLevel\.layers must be "all" or "linear"'):
        WidthByLevel(layers="conv")  # type: ignore[arg-type]
    task = small.task()
    server = Server(fedavg(), task, Simulated(task, small.world(task)), 0)
    view = replace(server.view(), blueprint=nets.traced("resnet_basic").blueprint)
    with pytest.raises(ValueError, match=r"no fully connected hidden layer"):
        WidthByLevel(layers="linear").init(view)
    WidthByLevel(layers="all").init(view)


# --- switches ---------------------------------------------------------------------------------


def test_feddrop_starts_without_heterofls_parts_and_fedrolex_with_them() -> None:
    assert feddrop().norm == BatchStatistics()
    assert feddrop().train == fedavg().train
    assert fedrolex().train == heterofl().train
    assert fedrolex().norm == Static()
    parts = {"label_rows": True, "masked": True, "scaler": True}
    assert feddrop(static_norm=True, **parts).train == heterofl().train  # type: ignore[arg-type]
    assert feddrop(static_norm=True).norm == Static()
    assert fedrolex(**OFF).train == fedavg().train


def test_every_device_counts_the_same_and_the_knobs_reach_their_parts() -> None:
    assert feddrop().aggregate == fedrolex().aggregate == Mean("equal")
    assert fedrolex(shift=3).extract == Rolling(3)
    assert feddrop(widths=(0.5,), layers="linear").plan == WidthByLevel((0.5,), "linear")
    assert fedrolex(widths=(0.5,)).plan == WidthByLevel((0.5,))


def test_scaling_of_kept_activations_is_a_switch() -> None:
    task = small.task()
    plain, scaled = (
        small.steps(feddrop(widths=(0.5,), inverted=on, count=4, **SETTINGS), task, 1)[0].params
        for on in (False, True)
    )
    assert not small.identical(plain, scaled)


# --- engines ----------------------------------------------------------------------------------

ALL_ON = {"label_rows": True, "masked": True, "scaler": True}


@pytest.mark.parametrize(
    "method",
    [
        feddrop(widths=(1.0, 0.4), inverted=True, count=6, **ALL_ON, **SETTINGS),  # type: ignore[arg-type]
        fedrolex(widths=(1.0, 0.4), count=6, **SETTINGS),
    ],
    ids=["feddrop", "fedrolex"],
)
def test_every_engine_trains_the_same(method: Method) -> None:
    task = small.task(equal=False, dtype=torch.float64)
    ends = [
        small.steps(method, task, 2, engine=engine, fleet=TWO_LEVELS)[-1].params
        for engine in (Sequential(), Threads(), Stacked())
    ]
    assert small.identical(ends[0], ends[1])
    assert small.distance(ends[0], ends[2]) < 1e-10
    assert small.distance(task.params, ends[0]) > 1e-3
