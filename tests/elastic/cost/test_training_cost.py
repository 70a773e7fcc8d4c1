"""Cost of a slice: exact against torch's own counter and against what autograd really saves."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from anyfleet import rng
from anyfleet.elastic import STATIC, Blueprint, Slice, apply, cost, cut, dense, trace
from anyfleet.elastic.cost.memory import Ledger
from anyfleet.tasks import zoo
from tests.helpers.nets import FAMILIES, Inverted, LeNet, Residual, traced

# Networks of specification §C: name, network, input shape.
ZOO: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "C.1": (zoo.perceptron, (1, 28, 28)),
    "C.2": (zoo.cnn_mnist, (1, 28, 28)),
    "C.3": (zoo.cnn_cifar, (3, 32, 32)),
    "C.4": (zoo.mcmahan_cnn, (1, 28, 28)),
    "C.5": (zoo.logistic, (1, 28, 28)),
    "C.6": (zoo.cnn_m, (1, 28, 28)),
    "C.7": (zoo.cnn_c, (3, 32, 32)),
    "C.8": (zoo.vgg9, (3, 32, 32)),
    "C.9": (zoo.resnet_s2, (3, 32, 32)),
    "C.10": (zoo.digits_net, (3, 28, 28)),
    "C.11": (zoo.resnet18, (3, 32, 32)),
    "C.12": (zoo.har_cnn, (6, 128)),
    "C.13": (zoo.wide_resnet, (3, 32, 32)),
}


@cache
def from_zoo(name: str) -> tuple[nn.Module, Blueprint]:
    make, shape = ZOO[name]
    torch.manual_seed(0)
    module = make().train()
    return module, trace(module, torch.zeros(2, *shape))


def trees(module: nn.Module, blueprint: Blueprint) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    state = module.state_dict()
    return {n: state[n] for n in blueprint.params}, {n: state[n] for n in blueprint.buffers}


def counted(run: Callable[[], Tensor]) -> tuple[int, int]:
    """Forward and backward work according to torch."""
    forward, backward = FlopCounterMode(display=False), FlopCounterMode(display=False)
    with forward:
        out = run()
    with backward:
        torch.autograd.backward(out.sum())
    return forward.get_total_flops(), backward.get_total_flops()


def saved(run: Callable[[], Tensor], held: tuple[Tensor, ...]) -> int:
    """Bytes that autograd keeps for the backward pass."""
    ledger = Ledger(held)
    with saved_tensors_hooks(ledger.save, lambda kept: kept):
        run()
    return ledger.nbytes


def prepared(
    blueprint: Blueprint, slice: Slice, module: nn.Module
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Tensors of the small model; only those that the slice trains require a gradient."""
    params, buffers = trees(module, blueprint)
    trained = set(slice.sent(blueprint))
    small = {
        n: p.detach().clone().requires_grad_(n in trained)
        for n, p in cut(params, slice, blueprint).items()
    }
    return small, cut(buffers, slice, blueprint)


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize(("share", "depth"), [(1.0, 0.0), (0.5, 0.5)])
def test_zoo_costs_exactly_what_torch_counts_and_saves(
    name: str, share: float, depth: float
) -> None:
    module, blueprint = from_zoo(name)
    first = int(depth * len(blueprint.layers))
    slice = blueprint.prefix(share, first_trained_layer=first)
    small, buffers = prepared(blueprint, slice, module)
    local, x = blueprint.local(slice), torch.randn(2, *ZOO[name][1])

    def run() -> Tensor:
        return apply(local, small, buffers, x, STATIC, key=rng.root(0, "cost"))[0]

    found = cost(blueprint, slice, batch=2)
    assert (found.forward_flops, found.backward_flops) == counted(run)
    assert found.activation_bytes == saved(run, (*small.values(), *buffers.values()))
    assert found.params == sum(p.numel() for p in small.values())
    assert found.sent_params == sum(p.numel() for p in small.values() if p.requires_grad)
    assert found.nbytes == 4 * found.params
    assert found.memory == found.nbytes + 4 * found.sent_params + found.activation_bytes


def test_language_model_of_the_zoo_saves_what_is_predicted() -> None:
    torch.manual_seed(0)
    module = zoo.Transformer(dropout=0.1).train()
    tokens = torch.zeros(2, 12, dtype=torch.int64)
    blueprint = trace(module, tokens)
    slice = blueprint.prefix(0.5)
    small, buffers = prepared(blueprint, slice, module)
    local = blueprint.local(slice)

    def run() -> Tensor:
        return apply(local, small, buffers, tokens, STATIC, key=rng.root(0, "cost"))[0]

    found = cost(blueprint, slice, batch=2)
    assert found.activation_bytes == saved(run, (*small.values(), *buffers.values()))
    assert found.params == sum(p.numel() for p in small.values())
    whole = saved(lambda: module(tokens), (*module.parameters(), *module.buffers()))
    assert cost(blueprint, batch=2).activation_bytes == whole


@pytest.mark.parametrize("name", ZOO)
def test_the_module_itself_saves_the_same(name: str) -> None:
    """The plain module in training mode, dropout and all."""
    module, blueprint = from_zoo(name)
    x = torch.randn(2, *ZOO[name][1])
    real = saved(lambda: module(x), (*module.parameters(), *module.buffers()))
    assert cost(blueprint, batch=2).activation_bytes == real


# Torch's counter ignores groups backward, and fused attention on a CPU altogether.
MISCOUNTED = ("mobilenet", "grouped", "language_fused", "vision")


@pytest.mark.parametrize("name", [n for n in FAMILIES if n not in MISCOUNTED])
def test_families_cost_what_torch_counts(name: str) -> None:
    net = traced(name)
    model = dense(net.blueprint, Slice(), net.params, net.buffers).train()
    forward, backward = counted(lambda: model(net.inputs))
    found = cost(net.blueprint, batch=4)
    assert (found.forward_flops, found.backward_flops) == (forward, backward)


def test_fused_attention_counts_the_scores_once_more_backward() -> None:
    fused = cost(traced("language_fused").blueprint, batch=4)
    by_hand = cost(traced("language_by_hand").blueprint, batch=4)
    scores = 2 * 4 * 2 * 7 * 7 * 4  # 2 FLOP, batch, heads, steps², width of a head
    assert fused.forward_flops == by_hand.forward_flops
    assert fused.backward_flops == by_hand.backward_flops + 2 * scores


def test_depthwise_backward_is_corrected() -> None:
    """Each channel meets only itself, so both gradients cost as much as the forward pass."""
    conv = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
    blueprint = trace(nn.Sequential(nn.Conv2d(3, 8, 1, bias=False), conv), torch.zeros(2, 3, 6, 6))
    pointwise, deep = 2 * 8 * 3 * 36, 2 * 8 * 9 * 36
    found = cost(blueprint)
    assert found.forward_flops == pointwise + deep
    assert found.backward_flops == pointwise + 2 * deep
    model = nn.Sequential(nn.Conv2d(3, 8, 1, bias=False), conv)
    assert counted(lambda: model(torch.zeros(1, 3, 6, 6)))[1] > found.backward_flops


def test_grouped_backward_is_corrected() -> None:
    module = nn.Conv2d(8, 12, 3, groups=4, bias=False)
    found = cost(trace(module, torch.zeros(2, 8, 5, 5)))
    assert found.forward_flops == 2 * 12 * 2 * 9 * 9
    assert found.backward_flops == found.forward_flops


def test_backward_stops_at_the_first_trained_layer() -> None:
    blueprint = traced("lenet").blueprint
    costs = [cost(blueprint, Slice((), first), batch=3) for first in range(4)]
    layer = [2 * 3 * n for n in (4 * 9 * 144, 6 * 36 * 16, 24 * 12, 12 * 5)]
    assert [c.forward_flops for c in costs] == [sum(layer)] * 4
    assert [c.backward_flops for c in costs] == [
        layer[0] + 2 * sum(layer[1:]),
        layer[1] + 2 * sum(layer[2:]),
        layer[2] + 2 * layer[3],
        layer[3],
    ]
    saves = [c.activation_bytes for c in costs]
    assert saves == sorted(saves, reverse=True)
    assert len(set(saves)) == 4


def test_frozen_parameters_train_nothing() -> None:
    module = LeNet()
    for name in ("c1", "c2"):
        module.get_submodule(name).requires_grad_(False)
    blueprint = trace(module, torch.zeros(2, 1, 14, 14))
    free = traced("lenet").blueprint
    found = cost(blueprint)
    assert found.backward_flops == cost(free, Slice((), 2)).backward_flops
    assert found.activation_bytes == cost(free, Slice((), 2)).activation_bytes
    assert found.sent_params == free.numel(free.trained(2))
    assert found.params == free.numel()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_cost_does_not_depend_on_the_mode_of_the_caller(mode: Callable[[], Any]) -> None:
    blueprint = trace(
        nn.Sequential(nn.Linear(3, 17), nn.ReLU(), nn.Linear(17, 2)), torch.ones(2, 3)
    )
    batch = 5 if mode is torch.no_grad else 6
    with mode():
        found = cost(blueprint, batch=batch)
    assert found.activation_bytes == 4 * batch * (3 + 17)


def test_cost_depends_on_the_shape_of_a_slice_only() -> None:
    blueprint = traced("resnet_basic").blueprint
    leading, scattered = (0, 1, 2), (7, 0, 4)
    assert cost(blueprint, Slice.of({"stem": leading}, blueprint)) == cost(
        blueprint, Slice.of({"stem": scattered}, blueprint)
    )


def test_costs_fall_with_every_cut() -> None:
    torch.manual_seed(0)
    blueprint = trace(Residual(Inverted(6, 12), width=6, out=6), torch.zeros(2, 3, 8, 8))
    costs = [cost(blueprint, blueprint.prefix(share), batch=2) for share in (1, 0.7, 0.4, 0.1)]
    for field in ("params", "nbytes", "forward_flops", "backward_flops", "activation_bytes"):
        values = [getattr(c, field) for c in costs]
        assert values == sorted(values, reverse=True)
        assert len(set(values)) == len(values)


def test_slices_of_one_shape_are_counted_once_also_along_constants() -> None:
    blueprint = traced("vision").blueprint
    one, other = (Slice.of({"patch": kept}, blueprint) for kept in ((0, 2, 5), (7, 1, 4)))
    assert blueprint.local(one) != blueprint.local(other)
    assert cost(blueprint, one, 3) is cost(blueprint, other, 3)
