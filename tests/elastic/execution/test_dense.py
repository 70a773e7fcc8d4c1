"""A dense small model is the masked large one, in value and gradient."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.func import functional_call

from anyfleet.elastic import EVALUATE, EVALUATE_BATCH, Slice, apply, cut, dense, paste
from anyfleet.elastic.verification.verify import statistical_axes
from anyfleet.elastic.verification.witnesses import WithoutDropout
from tests.elastic.test_slicing import slices
from tests.helpers.nets import NETS, Traced, traced


def gradients(
    function: Callable[[dict[str, Tensor]], Tensor], params: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    leaves = {n: p.detach().clone().requires_grad_() for n, p in params.items()}
    out = function(leaves)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
    found = torch.autograd.grad(
        (out * weights).sum(), list(leaves.values()), allow_unused=True, materialize_grads=True
    )
    return out.detach(), dict(zip(leaves, found, strict=True))


def masked(net: Traced, params: dict[str, Tensor], *, training: bool) -> Tensor:
    """The module itself, everything outside the slice being zero."""
    net.module.train(training)
    buffers = {n: b.clone() for n, b in net.buffers.items()}
    with WithoutDropout():
        out: Tensor = functional_call(net.module, {**params, **buffers}, (net.inputs,))
    return out


def check_slice(net: Traced, slice: Slice, *, training: bool) -> None:
    blueprint, mode = net.blueprint, EVALUATE_BATCH if training else EVALUATE
    small = cut(net.params, slice, blueprint)
    buffers = cut(net.buffers, slice, blueprint)
    zeros = {n: torch.zeros_like(p) for n, p in net.params.items()}
    large = paste(small, zeros, slice, blueprint)
    local = blueprint.local(slice)
    want, large_gradients = gradients(lambda p: masked(net, p, training=training), large)
    got, small_gradients = gradients(lambda p: apply(local, p, buffers, net.inputs, mode)[0], small)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    expected = cut(large_gradients, slice, blueprint)
    for name, gradient in small_gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", NETS)
def test_dense_equals_masked(name: str) -> None:
    net = traced(name)

    @given(slices(net.blueprint, statistical_axes(net.blueprint)))
    @settings(max_examples=6)
    def check(slice: Slice) -> None:
        check_slice(net, slice, training=False)
        check_slice(net, slice, training=True)

    check()


@pytest.mark.parametrize("name", NETS)
def test_every_axis_can_be_reordered(name: str) -> None:
    net = traced(name)
    orders = {
        axis: torch.randperm(found.size).tolist()
        for axis, found in net.blueprint.axes.items()
        if found.free
    }
    slice = Slice.of(orders, net.blueprint)
    small, buffers = cut(net.params, slice, net.blueprint), cut(net.buffers, slice, net.blueprint)
    got, _ = apply(net.blueprint.local(slice), small, buffers, net.inputs, EVALUATE)
    want, _ = apply(net.blueprint, net.params, net.buffers, net.inputs, EVALUATE)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["vgg_batch", "vision", "mobilenet"])
def test_dense_module_is_small_and_of_its_own(name: str) -> None:
    net = traced(name)
    slice = net.blueprint.prefix(0.5)
    model = dense(net.blueprint, slice, net.params, net.buffers).eval()
    small = cut(net.params, slice, net.blueprint)
    buffers = cut(net.buffers, slice, net.blueprint)
    assert {n: p.shape for n, p in model.named_parameters()} == {
        n: p.shape for n, p in small.items()
    }
    assert sum(p.numel() for p in model.parameters()) == net.blueprint.local(slice).numel()
    want, _ = apply(net.blueprint.local(slice), small, buffers, net.inputs, EVALUATE)
    assert torch.equal(model(net.inputs), want)
    with torch.no_grad():
        next(model.parameters()).zero_()
    assert float(next(iter(net.params.values())).abs().sum()) > 0


def test_dense_module_trains_its_statistics() -> None:
    net = traced("vgg_batch")
    model = dense(net.blueprint, Slice(), net.params, net.buffers).train()
    before = model.state_dict()["1.running_mean"].clone()
    model(net.inputs).sum().backward()
    assert not torch.equal(model.state_dict()["1.running_mean"], before)
    assert int(model.state_dict()["1.num_batches_tracked"]) == 1
    assert all(p.grad is not None for p in model.parameters())


def test_dense_module_can_be_exported() -> None:
    net = traced("resnet_basic")
    model = dense(net.blueprint, net.blueprint.prefix(0.5), net.params, net.buffers).eval()
    exported = torch.export.export(model, (net.inputs,), strict=False)
    assert torch.allclose(exported.module()(net.inputs), model(net.inputs))


def test_only_what_is_trained_requires_a_gradient() -> None:
    net = traced("lenet")
    model = dense(net.blueprint, Slice((), 2), net.params, net.buffers)
    wanted = {name for name, param in model.named_parameters() if param.requires_grad}
    assert wanted == {"f1.weight", "f1.bias", "f2.weight", "f2.bias"}
    frozen = replace(net.blueprint, frozen=("f1.bias", "c1.bias"))
    model = dense(frozen, Slice((), 2), net.params, net.buffers)
    assert not model.get_parameter("f1.bias").requires_grad
    assert not model.get_parameter("c1.bias").requires_grad
    assert model.get_parameter("f1.weight").requires_grad
