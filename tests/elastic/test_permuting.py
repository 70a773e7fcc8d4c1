"""Models with their channels in another order are the same function; channels by norm."""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import grad
from torch.nn import functional

from anyfleet import rng
from anyfleet.elastic import (
    COLLECT,
    EVALUATE,
    EVALUATE_BATCH,
    Blueprint,
    SliceError,
    apply,
    channel_order,
    permute,
    trace,
)
from anyfleet.tasks import zoo
from tests.helpers import nets

Orders = dict[str, tuple[int, ...]]

ZOO: dict[str, tuple[Callable[..., nn.Module], Callable[[], Tensor]]] = {
    "Transformer": (zoo.Transformer, lambda: torch.randint(0, 128, (2, 9))),
    "cnn_c": (zoo.cnn_c, lambda: torch.randn(2, 3, 32, 32)),
    "cnn_cifar": (zoo.cnn_cifar, lambda: torch.randn(2, 3, 32, 32)),
    "cnn_m": (zoo.cnn_m, lambda: torch.randn(2, 1, 28, 28)),
    "cnn_mnist": (zoo.cnn_mnist, lambda: torch.randn(2, 1, 28, 28)),
    "digits_net": (zoo.digits_net, lambda: torch.randn(2, 3, 28, 28)),
    "har_cnn": (zoo.har_cnn, lambda: torch.randn(2, 6, 128)),
    "logistic": (zoo.logistic, lambda: torch.randn(2, 1, 28, 28)),
    "mcmahan_cnn": (zoo.mcmahan_cnn, lambda: torch.randn(2, 1, 28, 28)),
    "perceptron": (zoo.perceptron, lambda: torch.randn(2, 1, 28, 28)),
    "resnet18": (zoo.resnet18, lambda: torch.randn(2, 3, 32, 32)),
    "resnet_s2": (zoo.resnet_s2, lambda: torch.randn(2, 3, 32, 32)),
    "vgg9": (zoo.vgg9, lambda: torch.randn(2, 3, 32, 32)),
    "wide_resnet": (zoo.wide_resnet, lambda: torch.randn(2, 3, 32, 32)),
}


@lru_cache(maxsize=1)  # some are large
def network(name: str) -> nets.Traced:
    """A small net, or one of the zoo with biases, norms and statistics that are not 0 and 1."""
    if name in nets.NETS:
        return nets.traced(name)
    make, example = ZOO[name]
    torch.manual_seed(11)
    module = make()
    for parameter in module.parameters():
        if parameter.ndim == 1:
            nn.init.normal_(parameter)
    net = nets.of(module, example())
    params = {name: p.detach() for name, p in net.module.named_parameters()}
    return nets.Traced(net.module, net.inputs, net.blueprint, params, net.buffers)


def movable(net: nets.Traced, orders: Orders) -> Orders:
    """Without the axes along which a network has constants of its own."""
    constants = net.blueprint.program.constants.values()
    held = {axis for c in constants for dim in c.dims for product in dim for axis in product}
    return {axis: order for axis, order in orders.items() if axis not in held}


def mixed(blueprint: Blueprint) -> Orders:
    found = {}
    for name, axis in blueprint.axes.items():
        if axis.free:
            draws = rng.uniform(rng.root(axis.size, name), axis.size)
            found[name] = tuple(draws.argsort().tolist())
    return found


def moved(net: nets.Traced, orders: Orders) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    params, buffers = (permute(tree, orders, net.blueprint) for tree in (net.params, net.buffers))
    return params, buffers


def inverse(orders: Orders) -> Orders:
    return {axis: tuple(np.argsort(order).tolist()) for axis, order in orders.items()}


# --- the same function ------------------------------------------------------------------------


def test_the_whole_zoo_is_here() -> None:
    assert set(ZOO) == set(zoo.__all__)


@pytest.mark.parametrize("name", [*nets.NETS, *ZOO])
def test_the_function_stays_whatever_the_order(name: str) -> None:
    net = network(name)
    blueprint = net.blueprint
    mode = EVALUATE if all(site.mean for site in blueprint.norms) else EVALUATE_BATCH
    expected, _ = apply(blueprint, net.params, net.buffers, net.inputs, mode)
    close = partial(torch.testing.assert_close, rtol=1e-11, atol=1e-11 * float(expected.std()))
    for every in (mixed(blueprint), channel_order(net.params, blueprint)):
        orders = movable(net, every)
        params, buffers = moved(net, orders)
        found, _ = apply(blueprint, params, buffers, net.inputs, mode)
        close(found, expected)
        assert not orders or any(not torch.equal(params[n], net.params[n]) for n in params)


@pytest.mark.parametrize("name", ["resnet_basic", "language_fused"])
def test_gradients_and_statistics_move_along(name: str) -> None:
    net = network(name)
    orders = mixed(net.blueprint)
    params, buffers = moved(net, orders)

    def gradients(at: dict[str, Tensor], held: dict[str, Tensor]) -> dict[str, Tensor]:
        def loss(values: dict[str, Tensor]) -> Tensor:
            output, _ = apply(net.blueprint, values, held, net.inputs, EVALUATE_BATCH)
            return output.square().sum()

        found: dict[str, Tensor] = grad(loss)(at)
        return found

    expected = permute(gradients(net.params, net.buffers), orders, net.blueprint)
    found = gradients(params, buffers)
    scale = max(float(value.abs().max()) for value in expected.values())
    for each in net.params:
        torch.testing.assert_close(found[each], expected[each], rtol=1e-10, atol=1e-12 * scale)
    seen = apply(net.blueprint, net.params, net.buffers, net.inputs, COLLECT)[1]
    own = apply(net.blueprint, params, buffers, net.inputs, COLLECT)[1]
    for each, value in permute(seen, orders, net.blueprint).items():
        torch.testing.assert_close(own[each], value)


@pytest.mark.parametrize("name", ["vgg_batch", "mobilenet", "grouped", "language_by_hand"])
def test_the_inverse_order_restores_every_bit(name: str) -> None:
    net = network(name)
    everything = {**net.params, **net.buffers}
    orders = mixed(net.blueprint)
    there = permute(everything, orders, net.blueprint)
    back = permute(there, inverse(orders), net.blueprint)
    assert back.keys() == everything.keys()
    assert all(torch.equal(back[each], everything[each]) for each in everything)
    some = {each: everything[each] for each in list(everything)[::3]}
    for each, value in permute(some, orders, net.blueprint).items():
        assert torch.equal(value, there[each])


def test_buffers_move_with_their_channels() -> None:
    net = network("vgg_batch")
    order = (3, 0, 1, 2, 7, 6, 5, 4)
    found = permute(net.buffers, {"0": order}, net.blueprint)
    assert torch.equal(found["1.running_mean"], net.buffers["1.running_mean"][list(order)])
    assert torch.equal(found["5.running_mean"], net.buffers["5.running_mean"])
    assert torch.equal(found["1.num_batches_tracked"], net.buffers["1.num_batches_tracked"])


# --- what is no order -------------------------------------------------------------------------

MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"c9": (0, 1)}, "unknown axis 'c9'; axes that can be cut: c1, c2, f1"),
    "fixed": ({"f2": (1, 0, 2, 3, 4)}, "axis 'f2' cannot be cut"),
    "short": ({"c1": (1, 0)}, "axis 'c1' has 4 indices, and an order names each of them once"),
    "long": ({"c1": (0, 1, 2, 3, 3)}, "names each of them once; got 5"),
    "twice": ({"c1": (0, 1, 1, 2)}, "axis 'c1' has repeated indices"),
    "outside": ({"c1": (1, 2, 3, 4)}, "axis 'c1' has indices 0 to 3"),
    "fractions": ({"c1": (0.5, 1, 2, 3)}, "takes whole numbers"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_is_no_order_is_refused(mistake: str) -> None:
    net = network("lenet")
    orders, message = MISTAKES[mistake]
    with pytest.raises(SliceError, match=message):
        permute(net.params, orders, net.blueprint)


def test_constants_that_no_tree_holds_are_told_of() -> None:
    net = network("vision")
    orders = channel_order(net.params, net.blueprint)
    with pytest.raises(SliceError, match=r"axis 'patch' cannot be reordered: .*\(sinusoid\)"):
        permute(net.params, orders, net.blueprint)
    assert set(orders) - set(movable(net, orders)) == {"patch"}


class Scaled(nn.Module):
    """Constants: one that is the same for all channels, and moves with them for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.a(x) * torch.tensor([2.0, 2.0, 2.0, 2.0]))
        return out


def test_constants_that_stay_the_same_are_no_obstacle() -> None:
    net = nets.of(Scaled(), torch.randn(3, 3))
    params = permute(net.params, {"a": (3, 1, 0, 2)}, net.blueprint)
    expected, _ = apply(net.blueprint, net.params, {}, net.inputs, EVALUATE)
    torch.testing.assert_close(apply(net.blueprint, params, {}, net.inputs, EVALUATE)[0], expected)


# --- the order by norm ------------------------------------------------------------------------


def test_1_12_1_order_example() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    blueprint = trace(module, torch.zeros(1, 2))
    params = {name: p.detach().clone() for name, p in module.named_parameters()}
    params["0.weight"] = torch.tensor([[1.0, 0.0], [3.0, 4.0], [0.0, 2.0]])
    params["0.bias"] = torch.tensor([9.0, 0.0, -7.0])  # does not count
    assert channel_order(params, blueprint) == {"0": (1, 2, 0)}
    sorted_ = permute(params, channel_order(params, blueprint), blueprint)
    assert sorted_["0.weight"].tolist() == [[3.0, 4.0], [0.0, 2.0], [1.0, 0.0]]
    assert sorted_["0.bias"].tolist() == [0.0, -7.0, 9.0]
    assert torch.equal(sorted_["2.weight"], params["2.weight"][:, [1, 2, 0]])
    params["0.weight"] = torch.tensor([[0.0, 5.0], [3.0, 4.0], [-5.0, 0.0]])
    assert channel_order(params, blueprint) == {"0": (0, 1, 2)}  # ties by index


def by_norm(*weights: Tensor) -> tuple[int, ...]:
    """Of weights whose first dimension are the channels."""
    squares = torch.stack([w.flatten(1).square().sum(1) for w in weights]).sum(0)
    return tuple(squares.argsort(descending=True).tolist())


def test_one_order_for_all_that_is_added_together() -> None:
    net = network("resnet_bottleneck")
    p, orders = net.params, channel_order(net.params, net.blueprint)
    summands = [p["stem.weight"], p["blocks.0.c3.weight"], p["blocks.1.c3.weight"]]
    assert orders["stem"] == by_norm(*summands)
    assert orders["stem"] not in {by_norm(each) for each in summands}
    assert orders["blocks.0.c2"] == by_norm(p["blocks.0.c2.weight"])


def test_depthwise_layers_and_gates_count_with_what_they_belong_to() -> None:
    net = network("mobilenet")
    p, orders = net.params, channel_order(net.params, net.blueprint)
    grown, deep = p["blocks.0.grow.weight"], p["blocks.0.deep.weight"]
    assert orders["blocks.0.grow"] == by_norm(grown, deep)
    gated = network("squeeze_excite")
    orders = channel_order(gated.params, gated.blueprint)
    assert orders["c1"] == by_norm(gated.params["c1.weight"], gated.params["up.weight"])


class Various(nn.Module):
    """Outputs that are not the first dimension, and products on several sides."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.up = nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 6, 2, 2)
        self.w, self.v = nn.Parameter(torch.randn(6, 5)), nn.Parameter(torch.randn(7, 5))
        self.s, self.p = nn.Parameter(torch.randn(9, 7)), nn.Parameter(torch.randn(8, 9))
        self.scale, self.head = nn.Parameter(torch.randn(8)), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(self.a(x)).mean((2, 3)) @ self.w
        x = functional.linear(x.relu(), self.v)
        x = functional.linear(x, self.s - self.s.mean()).relu()
        out: Tensor = self.head((x @ self.p.transpose(-1, 0)) * self.scale)
        return out


def test_outputs_are_found_whichever_dimension_they_are() -> None:
    torch.manual_seed(5)
    net = nets.of(Various(), torch.randn(2, 3, 8, 8))
    p, orders = net.params, channel_order(net.params, net.blueprint)
    assert orders == {
        "a": by_norm(p["a.weight"]),
        "up": by_norm(p["up.weight"].transpose(0, 1)),
        "w": by_norm(p["w"].t()),
        "v": by_norm(p["v"]),
        "s": by_norm(p["s"]),
        "p": by_norm(p["p"]),
    }


def test_embeddings_heads_and_groups() -> None:
    net = network("Transformer")
    p, orders = net.params, channel_order(net.params, net.blueprint)
    layers = ("attention.out", "contract")
    added = [p[f"blocks.{i}.{layer}.weight"] for i in range(4) for layer in layers]
    tables = [p["tokens.weight"].t(), p["positions.weight"].t()]
    assert orders["tokens"] == by_norm(*tables, *added)
    split = [p[f"blocks.1.attention.{part}.weight"] for part in ("query", "key")]
    heads = [w.reshape(8, 32, 256) for w in (*split, p["blocks.1.attention.value.weight"])]
    assert orders["blocks.1.attention.query.heads"] == by_norm(*heads)
    grouped = network("grouped")
    orders = channel_order(grouped.params, grouped.blueprint)
    weight = grouped.params["c2.weight"].reshape(4, 3, -1)
    deep = grouped.params["c3.weight"].reshape(4, 3, -1)
    inner = next(o for axis, o in orders.items() if grouped.blueprint.axes[axis].size == 3)
    assert inner == by_norm(weight.transpose(0, 1), deep.transpose(0, 1))


def test_fused_projections_are_summed_over_their_parts() -> None:
    torch.manual_seed(6)
    layer = nn.TransformerEncoderLayer(8, 4, 6, batch_first=True)
    net = nets.of(nn.Sequential(nn.Linear(5, 8), layer, nn.Linear(8, 2)), torch.randn(2, 3, 5))
    orders = channel_order(net.params, net.blueprint)
    fused = net.params["1.self_attn.in_proj_weight"].reshape(3, 4, 2, 8)
    assert orders["1.self_attn.heads"] == by_norm(fused.transpose(0, 1))
    assert orders["1.self_attn.head_dim"] == by_norm(fused.permute(2, 0, 1, 3))


class Unweighted(nn.Module):
    """Only parameters of one dimension say what a channel is."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x.mean(1, keepdim=True) * self.scale + self.shift)
        return out


def test_an_axis_that_no_weight_produces_keeps_its_order() -> None:
    net = nets.of(Unweighted(), torch.randn(2, 3))
    assert channel_order(net.params, net.blueprint) == {"scale": (0, 1, 2, 3)}


def test_other_names_and_precisions_do_not_matter() -> None:
    net = network("vgg_batch")
    orders = channel_order(net.params, net.blueprint)
    more = {**net.params, "1.weight@0.5-abc": torch.full((8,), 100.0)}
    assert channel_order(more, net.blueprint) == orders
    single = {name: value.float() for name, value in net.params.items()}
    assert channel_order(single, net.blueprint) == orders
    assert all(type(index) is int for order in orders.values() for index in order)
