"""Constants of a program are plain tensors, whoever needs them first."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from anyfleet.elastic import EVALUATE, Blueprint, apply, cost, trace


class Causal(nn.Module):
    """A non-persistent mask and a lifted constant."""

    mask: Tensor

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.a = nn.Linear(4, 6)
        self.register_buffer("mask", torch.tril(torch.ones(steps, steps)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        weights = (h @ h.transpose(1, 2)).masked_fill(self.mask == 0, -1e9).softmax(-1)
        out: Tensor = (weights @ h) * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
        return out


Tree = dict[str, Tensor]
First = Callable[[Blueprint, Tree, Tensor], object]


def by_cost(blueprint: Blueprint, params: Tree, x: Tensor) -> object:
    del params, x
    return cost(blueprint)


def by_applying(blueprint: Blueprint, params: Tree, x: Tensor) -> object:
    return apply(blueprint, params, {}, x, EVALUATE)


def by_inference(blueprint: Blueprint, params: Tree, x: Tensor) -> object:
    with torch.inference_mode():
        return apply(blueprint, params, {}, x, EVALUATE)


def by_gradient(blueprint: Blueprint, params: Tree, x: Tensor) -> object:
    return grad(lambda p: apply(blueprint, p, {}, x, EVALUATE)[0].sum())(params)


def by_stack(blueprint: Blueprint, params: Tree, x: Tensor) -> object:
    run = vmap(grad(lambda p, one: apply(blueprint, p, {}, one, EVALUATE)[0].sum()), (None, 0))
    return run(params, torch.stack([x, x]))


# Steps differ so that every case has a program of its own, and no cache has seen it.
FIRST: dict[int, First] = {
    3: by_cost,
    4: by_applying,
    5: by_inference,
    6: by_gradient,
    7: by_stack,
}


@pytest.mark.parametrize("steps", FIRST)
def test_constants_survive_whoever_is_first(steps: int) -> None:
    torch.manual_seed(0)
    module, x = Causal(steps), torch.randn(2, steps, 4)
    blueprint = trace(module, x)
    params = {n: p.detach().clone().requires_grad_() for n, p in module.named_parameters()}
    FIRST[steps](blueprint, params, x)
    out, _ = apply(blueprint, params, {}, x, EVALUATE)
    assert type(out) is Tensor
    torch.testing.assert_close(out, module(x))
    torch.autograd.backward(out.sum())
    assert params["a.weight"].grad is not None
    torch.autograd.backward(module(x).sum())
    torch.testing.assert_close(params["a.weight"].grad, module.a.weight.grad)
    # The other way round works too.
    assert cost(blueprint, batch=2).activation_bytes > 0
    assert by_stack(blueprint, params, x) is not None
