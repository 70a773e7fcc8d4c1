"""The program as a pure function: modes, padding, dropout keys, vmap."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from anyfleet import rng
from anyfleet.elastic import (
    COLLECT,
    EVALUATE,
    EVALUATE_BATCH,
    STATIC,
    TRAIN,
    Mode,
    ProgramError,
    apply,
    cut,
    trace,
)
from anyfleet.elastic.verification.witnesses import WithoutDropout
from tests.helpers.nets import FAMILIES, NETS, Traced, of, traced

KEY = rng.root(0, "test")
MOVING = Mode(dropout=False, statistics="batch", update="module")


@pytest.mark.parametrize("size", [2, 80], ids=["few", "many"])
@pytest.mark.parametrize(
    "pool",
    [
        nn.MaxPool2d(2),
        nn.MaxPool2d(3, stride=2),
        nn.MaxPool2d((2, 3), stride=(1, 2)),
        nn.MaxPool2d(1, stride=2),
        nn.MaxPool2d(3, padding=1),
        nn.MaxPool2d(2, dilation=2),
        nn.MaxPool2d(2, ceil_mode=True),
    ],
    ids=str,
)
def test_max_pooling_is_that_of_torch_with_its_gradient(pool: nn.Module, size: int) -> None:
    x = torch.randn(3, size, 11, 8, generator=torch.Generator().manual_seed(1)).relu()
    x[0, 0, 4, 4] = torch.nan
    x.requires_grad_()
    blueprint = trace(nn.Sequential(pool), x.detach())

    def loss(each: Tensor, pooled: Callable[[Tensor], Tensor]) -> Tensor:
        y = pooled(each)
        return (y * torch.arange(1.0, 1 + y.numel()).view_as(y)).nansum()

    def ours(each: Tensor) -> Tensor:
        return apply(blueprint, {}, {}, each, TRAIN)[0]

    exactly = partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)
    want, slope = pool(x), torch.autograd.grad(loss(x, pool), x)[0]
    for given in (x.detach(), x):
        got = ours(given)
        exactly(got, want)
        assert got.is_contiguous()
    exactly(torch.autograd.grad(loss(x, ours), x)[0], slope)
    stack = torch.stack([x.detach(), x.detach()])
    exactly(vmap(ours)(stack)[1], want)
    exactly(vmap(grad(partial(loss, pooled=ours)))(stack)[1], slope)


@pytest.mark.parametrize("name", NETS)
def test_training_equals_the_module_with_its_buffers(name: str) -> None:
    net = traced(name)
    net.module.train()
    moved = {n: b.clone() for n, b in net.buffers.items()}
    with WithoutDropout():
        want = functional_call(net.module, {**net.params, **moved}, (net.inputs,))
    kept = {n: b.clone() for n, b in net.buffers.items()}
    got, updated = apply(net.blueprint, net.params, net.buffers, net.inputs, MOVING)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    for buffer, tensor in moved.items():
        torch.testing.assert_close(updated[buffer], tensor, rtol=1e-9, atol=1e-9)
        assert torch.equal(net.buffers[buffer], kept[buffer])


def cumulative() -> Traced:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 2))
    return of(module, torch.randn(6, 3))


def test_cumulative_momentum_averages_batches() -> None:
    net = cumulative()
    net.module.train()
    state = {n: b.clone() for n, b in net.buffers.items()}
    buffers = net.buffers
    for batch in (net.inputs, net.inputs * 2, net.inputs + 1):
        functional_call(net.module, {**net.params, **state}, (batch,))
        _, buffers = apply(net.blueprint, net.params, buffers, batch, TRAIN, key=KEY)
    for name, tensor in state.items():
        torch.testing.assert_close(buffers[name], tensor)


def test_collect_returns_exact_statistics_of_the_batch() -> None:
    net = cumulative()
    hidden = torch.nn.functional.linear(net.inputs, net.params["0.weight"], net.params["0.bias"])
    _, seen = apply(net.blueprint, net.params, net.buffers, net.inputs, COLLECT)
    torch.testing.assert_close(seen["1.running_mean"], hidden.mean(0))
    torch.testing.assert_close(seen["1.running_var"], hidden.var(0))
    padded = torch.cat([net.inputs, torch.full((2, 3), 9.0, dtype=torch.float64)])
    valid = torch.arange(8) < 6
    _, masked = apply(net.blueprint, net.params, net.buffers, padded, COLLECT, valid=valid)
    torch.testing.assert_close(masked["1.running_var"], hidden.var(0))


@pytest.mark.parametrize("mode", [TRAIN, COLLECT])
def test_a_batch_of_padding_moves_no_statistics(mode: Mode) -> None:
    net = cumulative()
    nobody = torch.zeros(6, dtype=torch.bool)
    _, after = apply(net.blueprint, net.params, net.buffers, net.inputs, mode, valid=nobody)
    assert all(torch.equal(after[n], b) for n, b in net.buffers.items())


def test_static_mode_keeps_the_buffers() -> None:
    net = traced("vgg_batch")
    _, after = apply(net.blueprint, net.params, net.buffers, net.inputs, STATIC, key=KEY)
    assert all(torch.equal(after[n], b) for n, b in net.buffers.items())
    with_batch, _ = apply(net.blueprint, net.params, net.buffers, net.inputs, EVALUATE_BATCH)
    with_running, _ = apply(net.blueprint, net.params, net.buffers, net.inputs, EVALUATE)
    assert not torch.allclose(with_batch, with_running)


def gradient(net: Traced, x: Tensor, valid: Tensor) -> dict[str, Tensor]:
    def loss(params: dict[str, Tensor]) -> Tensor:
        out, _ = apply(net.blueprint, params, net.buffers, x, STATIC, valid=valid, key=KEY)
        return torch.where(valid, out.flatten(1).pow(2).sum(1), 0.0).sum()

    found: dict[str, Tensor] = grad(loss)(net.params)
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_padding_changes_nothing(name: str) -> None:
    """Statistics, dropout masks and gradients of the valid rows do not see the padding."""
    net = traced(name)
    filler = torch.ones_like(net.inputs[:3]) * 2
    padded = torch.cat([net.inputs, filler])
    few, many = torch.ones(4, dtype=torch.bool), torch.arange(7) < 4
    want, got = gradient(net, net.inputs, few), gradient(net, padded, many)
    for key in want:
        torch.testing.assert_close(got[key], want[key], rtol=1e-9, atol=1e-9)
    own, _ = apply(net.blueprint, net.params, net.buffers, net.inputs, STATIC, key=KEY)
    masked, moved = apply(
        net.blueprint, net.params, net.buffers, padded, TRAIN, valid=many, key=KEY
    )
    torch.testing.assert_close(masked[:4], own, rtol=1e-9, atol=1e-9)
    _, unpadded = apply(net.blueprint, net.params, net.buffers, net.inputs, TRAIN, key=KEY)
    for key in moved:
        torch.testing.assert_close(moved[key], unpadded[key])


def test_without_a_mask_padding_would_change_batch_norm() -> None:
    net = traced("vgg_batch")
    padded = torch.cat([net.inputs, torch.ones_like(net.inputs)])
    own, _ = apply(net.blueprint, net.params, net.buffers, net.inputs, STATIC, key=KEY)
    wrong, _ = apply(net.blueprint, net.params, net.buffers, padded, STATIC, key=KEY)
    assert not torch.allclose(wrong[:4], own)


@pytest.mark.parametrize("name", NETS)
def test_vmap_equals_a_loop(name: str) -> None:
    net = traced(name)
    slice = net.blueprint.prefix(0.5)
    local = net.blueprint.local(slice)
    small = cut(net.params, slice, net.blueprint)
    buffers = cut(net.buffers, slice, net.blueprint)
    params = [{n: p * (1 + 0.1 * i) for n, p in small.items()} for i in range(3)]
    inputs = [net.inputs.roll(i, 0) for i in range(3)]
    valid = [torch.arange(4) < n for n in (4, 2, 3)]
    keys = [rng.fold(KEY, i) for i in range(3)]

    def step(
        params: dict[str, Tensor], x: Tensor, valid: Tensor, key: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        def total(p: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            out, moved = apply(local, p, buffers, x, TRAIN, valid=valid, key=key)
            return torch.where(valid, out.flatten(1).pow(2).sum(1), 0.0).sum(), moved

        found: tuple[dict[str, Tensor], dict[str, Tensor]] = grad(total, has_aux=True)(params)
        return found

    stacked = {n: torch.stack([p[n] for p in params]) for n in small}
    together = vmap(step)(stacked, torch.stack(inputs), torch.stack(valid), torch.stack(keys))
    for i in range(3):
        alone = step(params[i], inputs[i], valid[i], keys[i])
        for one, other in zip(together, alone, strict=True):
            for tensor in other:
                torch.testing.assert_close(one[tensor][i], other[tensor], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN, partial(nn.RNN, nonlinearity="relu")])
def test_recurrent_layers_are_stacked_without_a_gradient_too(layer: Callable[..., nn.RNN]) -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = layer(3, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.rnn(x)[0]
            return out

    module, x = Last().double(), torch.randn(2, 5, 6, 3, dtype=torch.float64)
    blueprint = trace(module, x[0])
    params = {n: torch.stack([p, 2 * p]).detach() for n, p in module.named_parameters()}
    stacked = vmap(lambda p, each: apply(blueprint, p, {}, each, EVALUATE)[0])(params, x)
    for i, out in enumerate(stacked):
        own = {name: value[i] for name, value in params.items()}
        torch.testing.assert_close(out, functional_call(module, own, (x[i],)))


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by_unit, self.by_channel = nn.Dropout(0.5), nn.Dropout2d(0.5)
        self.by_selu = nn.AlphaDropout(0.3)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.scale * x
        units = self.by_unit(x)
        return torch.stack([units, self.by_channel(x), self.by_selu(x), self.by_unit(x)], 1)


def test_dropout_is_addressed_by_key_and_site() -> None:
    module = Drops()
    x = torch.ones(50, 8, 5, 5)
    blueprint = trace(module, x)
    params = {n: p.detach() for n, p in module.named_parameters()}
    one, _ = apply(blueprint, params, {}, x, STATIC, key=KEY)
    again, _ = apply(blueprint, params, {}, x, STATIC, key=KEY)
    other, _ = apply(blueprint, params, {}, x, STATIC, key=rng.fold(KEY, 1))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert not torch.equal(one[:, 0], one[:, 3])
    assert set(one[:, 0].flatten().tolist()) == {0.0, 2.0}
    assert abs(float(one[:, 0].mean()) - 1) < 0.05
    channels = one[:, 1].flatten(2)
    assert torch.equal(channels.amin(2), channels.amax(2))
    normal = torch.randn(50, 8, 5, 5)
    alpha = apply(blueprint, params, {}, normal, STATIC, key=KEY)[0][:, 2]
    assert abs(float(alpha.mean())) < 0.1
    assert abs(float(alpha.std()) - 1) < 0.1
    off, _ = apply(blueprint, params, {}, x, EVALUATE)
    assert torch.equal(off, torch.ones_like(off))
    with pytest.raises(ValueError, match="key"):
        apply(blueprint, params, {}, x, STATIC)


class DroppedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (2, 4)).transpose(1, 2)
        rate = 0.4 if self.training else 0.0
        out = nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=rate, is_causal=True)
        return out.transpose(1, 2).flatten(2)


def test_attention_dropout_is_keyed_and_right_on_average() -> None:
    net = of(DroppedAttention(), torch.randn(2, 5, 4))
    plain, _ = apply(net.blueprint, net.params, {}, net.inputs, EVALUATE)
    draws = vmap(lambda key: apply(net.blueprint, net.params, {}, net.inputs, STATIC, key=key)[0])(
        torch.stack([rng.fold(KEY, i) for i in range(4000)])
    )
    assert not torch.allclose(draws[0], plain)
    torch.testing.assert_close(draws.mean(0), plain, rtol=0, atol=0.1)


def test_float32_and_float64_drop_the_same() -> None:
    net = traced("vgg_batch")
    out, _ = apply(net.blueprint, net.params, net.buffers, net.inputs, STATIC, key=KEY)
    single = {n: p.float() for n, p in net.params.items()}
    buffers = {n: b.float() if b.is_floating_point() else b for n, b in net.buffers.items()}
    low, _ = apply(net.blueprint, single, buffers, net.inputs.float(), STATIC, key=KEY)
    assert low.dtype == torch.float32
    torch.testing.assert_close(low.double(), out, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", FAMILIES)
def test_everything_follows_the_device_of_the_parameters(name: str) -> None:
    """The meta device stands for any other than the CPU; keys and masks may come from the CPU."""
    net = traced(name)
    params = {n: p.to("meta") for n, p in net.params.items()}
    buffers = {n: b.to("meta") for n, b in net.buffers.items()}
    valid = torch.ones(4, dtype=torch.bool)
    out, moved = apply(
        net.blueprint, params, buffers, net.inputs.to("meta"), TRAIN, valid=valid, key=KEY
    )
    assert {t.device.type for t in (out, *moved.values())} == {"meta"}


@pytest.mark.parametrize(
    "op",
    ["os.system", "aten.from_file.default", "aten.nothing.default", "prims.add.default", "aten"],
)
def test_program_may_only_call_aten(op: str) -> None:
    net = traced("lenet")
    nodes = (replace(net.blueprint.program.nodes[0], op=op), *net.blueprint.program.nodes[1:])
    program = replace(net.blueprint.program, nodes=nodes)
    with pytest.raises(ProgramError, match="ATen"):
        apply(replace(net.blueprint, program=program), net.params, {}, net.inputs, EVALUATE)
