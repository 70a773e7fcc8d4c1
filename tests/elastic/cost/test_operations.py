"""Layers read off traced nets, and the nets that are refused."""

import math
from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from anyfleet.elastic import Blueprint, trace
from anyfleet.elastic.cost import flops
from anyfleet.elastic.cost.operations import layers_of
from anyfleet.formulas.fedpmt import CNN_CIFAR, CNN_MNIST, FCNN, Convolution, CountedLayer, Dense
from anyfleet.tasks import zoo

Layers = Sequence[CountedLayer]
WHOLE: dict[str, Layers] = {"fcnn": FCNN, "cnn_mnist": CNN_MNIST, "cnn_cifar": CNN_CIFAR}
MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "fcnn": (zoo.perceptron, (1, 28, 28)),
    "cnn_mnist": (zoo.cnn_mnist, (1, 28, 28)),
    "cnn_cifar": (zoo.cnn_cifar, (3, 32, 32)),
}
HALVES: dict[str, Layers] = {
    "fcnn": (Dense(784, 200), Dense(200, 150), Dense(150, 100), Dense(100, 50), Dense(50, 10)),
    "cnn_mnist": (
        Convolution(1, 4, 25, 576),
        Convolution(4, 8, 25, 64),
        Dense(128, 64),
        Dense(64, 10),
    ),
    "cnn_cifar": (
        Convolution(3, 8, 25, 784),
        Convolution(8, 16, 25, 100),
        Dense(400, 250),
        Dense(250, 150),
        Dense(150, 10),
    ),
}


@cache
def traced(name: str) -> Blueprint:
    make, shape = MODULES[name]
    return trace(make(), torch.zeros(2, *shape))


@pytest.mark.parametrize("name", MODULES)
def test_layers_are_read_off_traced_nets(name: str) -> None:
    blueprint = traced(name)
    assert layers_of(blueprint) == WHOLE[name]
    assert layers_of(blueprint, blueprint.prefix(0.5)) == HALVES[name]
    assert layers_of(blueprint, blueprint.prefix(0.5, first_trained_layer=2)) == HALVES[name]


def test_layers_at_a_share_that_does_not_divide() -> None:
    blueprint = traced("cnn_mnist")
    expected = (
        Convolution(1, 3, 25, 576),
        Convolution(3, 5, 25, 64),
        Dense(80, 39),
        Dense(39, 10),
    )
    assert layers_of(blueprint, blueprint.prefix(0.3)) == expected


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("share", [1.0, 0.3])
def test_products_are_those_of_the_flop_counter(name: str, share: float) -> None:
    small = traced(name).local(traced(name).prefix(share))
    products = sum(
        math.prod((layer.inputs, layer.outputs, *sizes))
        for layer in layers_of(small)
        for sizes in [(layer.window, layer.positions) if isinstance(layer, Convolution) else ()]
    )
    assert 2 * products == flops.count(small).forward


def test_norms_are_ignored_and_windows_need_not_be_square() -> None:
    net = nn.Sequential(
        nn.Conv2d(2, 4, (3, 5), stride=2, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 6, 1),
        nn.GroupNorm(2, 6),
        nn.Flatten(),
        nn.Linear(6 * 5 * 4, 7),
        nn.LayerNorm(7),
        nn.Dropout(0.5),
        nn.Linear(7, 3),
    )
    expected = (
        Convolution(2, 4, 15, 20),
        Convolution(4, 6, 1, 20),
        Dense(120, 7),
        Dense(7, 3),
    )
    assert layers_of(trace(net, torch.zeros(2, 2, 9, 9))) == expected


def test_convolutions_of_sequences() -> None:
    blueprint = trace(zoo.har_cnn(), torch.zeros(2, 6, 128))
    assert layers_of(blueprint)[:2] == (Convolution(6, 64, 5, 128), Convolution(64, 128, 5, 64))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(x + self.inner(x))
        return out


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(6, 5), nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.inner(x) * self.scale)
        return out


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.inner(self.inner(x)))
        return out


def grouped() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 1, groups=2), nn.Flatten(), nn.Linear(16, 3))


def tokens() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.Flatten(), nn.Linear(20, 3))


def frozen() -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
    net[0].requires_grad_(False)
    return net


@pytest.mark.parametrize(
    ("make", "shape", "problem"),
    [
        (Residual, (6,), "joins 2 earlier results"),
        (Scaled, (6,), "neither a linear layer, a convolution nor a norm"),
        (Twice, (6,), "stands where layer 1"),
        (grouped, (2, 2, 2), "in '0' has groups"),
        (tokens, (5, 6), "in '0' is applied more than once"),
        (frozen, (6,), "in '0' has frozen weights"),
    ],
)
def test_nets_that_are_no_chain(
    make: Callable[[], nn.Module], shape: tuple[int, ...], problem: str
) -> None:
    blueprint = trace(make(), torch.zeros(2, *shape))
    with pytest.raises(ValueError, match=f'{problem}.*counting="flops"'):
        layers_of(blueprint)


def test_sizes_are_positive() -> None:
    with pytest.raises(ValueError, match=r"Dense\.inputs must be a positive number, got 0"):
        Dense(0, 3)
    with pytest.raises(ValueError, match=r"Convolution\.window"):
        Convolution(1, 1, -1, 1)
