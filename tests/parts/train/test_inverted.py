"""Inverted dropout of cut models, against activations that are scaled by hand."""

from itertools import combinations

import torch
from torch import Tensor, nn
from torch.nn import functional

from anyfleet.core.local_training import training_context as make_site
from anyfleet.core.messages import Params
from anyfleet.core.slots import Minibatch, TrainingStart
from anyfleet.elastic import EVALUATE, Blueprint, Slice, apply, cut, trace
from anyfleet.methods import fedavg
from anyfleet.parts.train import Gradient
from anyfleet.parts.train.inverted import inverted
from tests.helpers import nets, small


def tensors(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().double() for name, value in module.named_parameters()}


def output(blueprint: Blueprint, slice_: Slice, params: Params, x: Tensor) -> Tensor:
    """What a device computes in training with a slice."""
    local = blueprint.local(slice_)
    return apply(local, inverted(cut(params, slice_, blueprint), local), {}, x, EVALUATE)[0]


def changed(blueprint: Blueprint, slice_: Slice, params: Params) -> dict[str, Tensor]:
    """The factors that differ from one, by parameter."""
    part = cut(params, slice_, blueprint)
    new = inverted(part, blueprint.local(slice_))
    assert new.keys() == part.keys()
    factors = {name: new[name] / part[name] for name in part}
    return {name: value for name, value in factors.items() if (value - 1).abs().max() > 1e-9}


class Net(nn.Module):
    """Two convolutions, flatten, two linear layers; scales kept activations by given factors."""

    def __init__(self, widths: tuple[int, int, int], factors: tuple[float, float, float]) -> None:
        super().__init__()
        one, two, three = widths
        self.c1, self.c2 = nn.Conv2d(1, one, 3, padding=1), nn.Conv2d(one, two, 3, padding=1)
        self.f1, self.f2 = nn.Linear(two * 4, three), nn.Linear(three, 5)
        self.factors = factors

    def forward(self, x: Tensor) -> Tensor:
        x = functional.avg_pool2d(torch.tanh(self.c1(x)) * self.factors[0], 2)
        x = functional.max_pool2d(torch.tanh(self.c2(x)) * self.factors[1], 2)
        out: Tensor = self.f2(torch.tanh(self.f1(x.flatten(1))) * self.factors[2])
        return out


def test_1_4_the_same_as_scaling_the_kept_activations() -> None:
    torch.manual_seed(0)
    whole = Net((4, 6, 8), (1.0, 1.0, 1.0))
    x = torch.randn(3, 1, 8, 8, dtype=torch.float64)
    blueprint, params = trace(whole, x.float()), tensors(whole)
    slice_ = Slice.of({"c1": [3, 0, 1], "c2": [1, 4], "f1": [0, 2, 5, 6, 7]}, blueprint)
    by_hand = Net((3, 2, 5), (4 / 3, 6 / 2, 8 / 5)).double()
    by_hand.load_state_dict(cut(params, slice_, blueprint))
    torch.testing.assert_close(output(blueprint, slice_, params, x), by_hand(x))


def test_the_mean_over_all_parts_is_the_whole() -> None:
    """What inverted dropout is for: the model can be tested without scaling."""
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    x = torch.randn(4, 3, dtype=torch.float64)
    blueprint, params = trace(module, x.float()), tensors(module)
    slices = [Slice.of({"0": kept}, blueprint) for kept in combinations(range(5), 2)]
    mean = torch.stack([output(blueprint, s, params, x) for s in slices]).mean(0)
    torch.testing.assert_close(mean, module.double()(x))


def test_what_only_passes_channels_on_stays() -> None:
    known = nets.traced("mobilenet")
    found = changed(known.blueprint, known.blueprint.prefix(0.5), known.params)
    takes_in = ["blocks.0.grow", "blocks.0.shrink", "blocks.1.grow", "blocks.1.shrink", "head"]
    assert sorted(found) == [f"{name}.weight" for name in takes_in]
    # 9 channels: 5 are left.
    torch.testing.assert_close(found["blocks.1.shrink.weight"].max(), torch.tensor(1.8).double())


def test_only_cut_layers_are_made_up_for() -> None:
    known = nets.traced("lenet")
    linear = Slice.of({"f1": range(3)}, known.blueprint)
    found = changed(known.blueprint, linear, known.params)
    assert sorted(found) == ["f2.weight"]
    assert float(found["f2.weight"].min()) == float(found["f2.weight"].max()) == 4.0
    assert small.identical(inverted(known.params, known.blueprint), known.params)


class Odd(nn.Module):
    """A concatenation, a product with a parameter, and a weight that is used in two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 4), nn.Linear(6, 6)
        self.both = nn.Linear(10, 8)
        self.product = nn.Parameter(torch.randn(8, 6))
        self.tied = nn.Parameter(torch.randn(6, 6))
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.both(torch.cat([self.a(x), self.b(x)], -1)))
        x = torch.tanh(x @ self.product)
        out: Tensor = self.head(torch.tanh(functional.linear(x, self.tied)) @ self.tied)
        return out


def test_a_product_with_a_parameter_is_a_layer_but_a_weight_used_twice_stays() -> None:
    module = Odd()
    blueprint, params = trace(module, torch.randn(2, 6)), tensors(module)
    assert set(blueprint.counts(1.0)) == {"both", "product", "tied"}
    found = changed(
        blueprint, blueprint.prefix({"both": 0.5, "product": 0.5, "tied": 1 / 3}), params
    )
    assert sorted(found) == ["head.weight", "product"]
    torch.testing.assert_close(found["product"].mean(), torch.tensor(2.0).double())


def test_the_trainer_scales_while_it_trains() -> None:
    task = small.task(dropout=0.0)
    half = task.blueprint.prefix(0.5)
    part, data = cut(task.params, half, task.blueprint), task.data(0)
    batch = Minibatch(data.x, data.y, torch.ones(len(data), dtype=torch.bool), torch.tensor(0))

    def loss(trainer: Gradient, params: Params, slice_: Slice) -> Tensor:
        where = make_site(task, fedavg().norm, slice_)
        state = trainer.start(where, TrainingStart(params, task.buffers, task.labels(0)))
        return trainer.loss(where, params, state, batch)[0]

    made_up = inverted(part, task.blueprint.local(half))
    plain, scaled = Gradient(), Gradient(inverted=True)
    assert torch.equal(loss(scaled, part, half), loss(plain, made_up, half))
    assert not torch.equal(loss(scaled, part, half), loss(plain, part, half))
    whole = Slice()
    assert torch.equal(loss(scaled, task.params, whole), loss(plain, task.params, whole))
