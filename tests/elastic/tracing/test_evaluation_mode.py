"""A forward pass that is another function in evaluation: both are kept, over the same axes."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from anyfleet.elastic import (
    COLLECT,
    EVALUATE,
    TRAIN,
    Blueprint,
    SliceError,
    TraceError,
    apply,
    cost,
    dense,
    permute,
    trace,
)
from tests.helpers.plain import agrees, every_other, first, held

Forward = Callable[["Net", Tensor], Tensor | tuple[Tensor, Tensor]]
X = torch.linspace(-2, 2, 20).reshape(5, 4)


class Net(nn.Module):
    """Two layers, and whatever else a case needs; `way` is its forward pass."""

    c: nn.Module
    d: nn.Module
    n: nn.Module
    hot: bool

    def __init__(self, way: Forward, **parts: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.way = nn.Linear(4, 6), nn.Linear(6, 3), way
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        return self.way(self, x)


class Switched(Net):
    """Its mode is a flag of its own."""

    def train(self, mode: bool = True) -> "Switched":
        super().train(mode)
        self.hot = mode
        return self


class Moving(nn.Module):
    """Centres by the batch in training, by a moving mean in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)
        self.mean: Tensor
        self.register_buffer("mean", torch.linspace(0, 1, 6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
            h = h - h.mean(0)
        else:
            h = h - self.mean
        out: Tensor = self.b(torch.relu(h))
        return out


def hidden(net: Net, x: Tensor) -> Tensor:
    return torch.relu(net.a(x))


def probabilities(net: Net, x: Tensor) -> Tensor:
    out: Tensor = net.b(hidden(net, x))
    return out if net.training else out.softmax(-1)


def other_head(net: Net, x: Tensor) -> Tensor:
    out: Tensor = (net.b if net.training else net.c)(hidden(net, x))
    return out


def by_flag(net: Net, x: Tensor) -> Tensor:
    out: Tensor = net.b(hidden(net, x))
    return out if net.hot else out * 3


def scaled(net: Net, x: Tensor) -> Tensor:
    out: Tensor = net.b(hidden(net, x) * (0.5 if net.training else 2.0))
    return out


def constants(net: Net, x: Tensor) -> Tensor:
    h = hidden(net, x)
    factors = [1.0, 2, 3, 4, 5, 6] if net.training else [6.0, 5, 4, 3, 2, 1]
    out: Tensor = net.b(h * torch.tensor(factors))
    return out


def normed(net: Net, x: Tensor) -> Tensor:
    out: Tensor = net.b(net.n(net.a(x)).relu())
    return out if net.training else out.softmax(-1)


DIFFERENT: dict[str, Callable[[], nn.Module]] = {
    "softmax": lambda: Net(probabilities),
    "head": lambda: Net(other_head, c=nn.Linear(6, 3)),
    "flag": lambda: Switched(by_flag),
    "factor": lambda: Net(scaled),
    "constant": lambda: Net(constants),
    "moving mean": Moving,
    "batch norm": lambda: Net(normed, n=nn.BatchNorm1d(6)),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_both_functions_are_those_of_the_module(name: str) -> None:
    module = DIFFERENT[name]()
    blueprint = agrees(module, X)
    assert blueprint.evaluation is not None
    assert "forward() is another function in evaluation: both are kept" in blueprint.remarks
    assert blueprint.axes["a"].kind == "channels"
    if name not in ("batch norm", "moving mean"):
        agrees(module, X, every_other(blueprint))
    assert Blueprint.from_bytes(blueprint.to_bytes()) == blueprint


def same(net: Net, x: Tensor) -> Tensor:
    out: Tensor = net.b(hidden(net, x))
    return out


def dropped_by_hand(net: Net, x: Tensor) -> Tensor:
    h = hidden(net, x)
    out: Tensor = net.b(functional.dropout(h, 0.5) if net.training else h)
    return out


def with_help(net: Net, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
    h = hidden(net, x)
    return (net.b(h), net.c(h)) if net.training else net.b(h)


def one_norm(net: Net, x: Tensor) -> Tensor:
    out: Tensor = net.b(net.d(net.n(net.a(x))))
    return out


def by_the_batch(net: Net, x: Tensor) -> Tensor:
    out: Tensor = net.b(functional.dropout(hidden(net, x), 0.5, net.training))
    return out * (1 + 0.1 * x.shape[0])


ALIKE: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: Net(same),
    "a look at the mode": lambda: Net(lambda net, x: (net.training, same(net, x))[1]),
    "dropout": lambda: Net(one_norm, n=nn.Identity(), d=nn.Dropout(0.4)),
    "dropout by hand": lambda: Net(dropped_by_hand),
    "a number of the batch": lambda: Net(by_the_batch),
    "a second output": lambda: Net(with_help, c=nn.Linear(6, 2)),
    "batch norm": lambda: Net(one_norm, n=nn.BatchNorm1d(6, momentum=None), d=nn.Dropout(0.1)),
}


@pytest.mark.parametrize("name", ALIKE)
def test_what_modes_settle_is_no_difference(name: str) -> None:
    blueprint = trace(ALIKE[name](), X)
    assert blueprint.evaluation is None
    assert not any("another function" in note for note in blueprint.remarks)
    # The bytes are those of a blueprint that knows of one program only.
    assert not {"evaluation", "aliases"} & msgspec.msgpack.decode(blueprint.to_bytes()).keys()


def test_attention_with_dropout_is_alike() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, dropout=0.2)
    frozen = nn.Sequential(layer.requires_grad_(False), nn.Linear(8, 3))
    assert trace(frozen, torch.zeros(2, 5, 8)).evaluation is None


def test_a_cut_is_the_same_in_both() -> None:
    module = Net(lambda net, x: net.b(net.a(x)) if net.training else net.b(net.a(x).softmax(-1)))
    blueprint = agrees(module, X)
    assert blueprint.axes["a"].kind == "fixed"
    assert any("softmax" in note and "fixed a" in note for note in blueprint.remarks)


def test_costs_are_those_of_training() -> None:
    plain = trace(Net(same), X)
    longer = trace(
        Net(
            lambda net, x: same(net, x) if net.training else net.b(net.c(net.a(x))),
            c=nn.Linear(6, 6),
        ),
        X,
    )
    assert longer.evaluation is not None
    own = plain.numel()
    assert cost(longer).flops == cost(plain).flops
    assert cost(longer).params == own + 42
    assert "c.weight is used in evaluation only: nothing trains it" in longer.remarks


def test_evaluation_by_batch_and_collecting_take_the_program_of_evaluation() -> None:
    module = Net(normed, n=nn.BatchNorm1d(6))
    blueprint = trace(module, X)
    params, buffers = held(module, blueprint)
    _, seen = apply(blueprint, params, buffers, X, COLLECT)
    h = module.a(X).detach()
    torch.testing.assert_close(seen["n.running_mean"], h.mean(0))
    torch.testing.assert_close(seen["n.running_var"], h.var(0))


def test_training_moves_the_buffers_as_the_module_does() -> None:
    module = Moving()
    blueprint = trace(module, X)
    params, buffers = held(module, blueprint)
    before = buffers["mean"].clone()
    _, moved = apply(blueprint, params, buffers, X, TRAIN)
    functional_call(module.train(), {**params, "mean": buffers["mean"]}, (X,))
    torch.testing.assert_close(moved["mean"], buffers["mean"])
    assert not torch.equal(moved["mean"], before)
    _, kept = apply(blueprint, params, {"mean": before}, X, EVALUATE)
    assert torch.equal(kept["mean"], before)


def test_a_dense_model_has_both_modes() -> None:
    module = Net(probabilities)
    blueprint = trace(module, X)
    small = dense(blueprint, blueprint.prefix(1.0), *held(module, blueprint))
    for training in (True, False):
        torch.testing.assert_close(small.train(training)(X), first(module.train(training)(X)))


def test_constants_of_both_programs_are_cut_and_not_permuted() -> None:
    module = Net(constants)
    blueprint = trace(module, X)
    params, _ = held(module, blueprint)
    small = blueprint.local(every_other(blueprint))
    assert all(c.shape == (3,) for p in small.programs for c in p.constants.values())
    with pytest.raises(SliceError, match="constants of the network"):
        permute(params, {"a": [1, 0, 2, 3, 4, 5]}, blueprint)


def test_instance_norm_evaluates_by_its_running_statistics() -> None:
    torch.manual_seed(0)
    norm = nn.InstanceNorm1d(6, affine=True, track_running_stats=True)
    module = nn.Sequential(nn.Conv1d(4, 6, 3), norm, nn.Flatten(), nn.Linear(36, 3))
    x = torch.randn(5, 4, 8)
    module(x)
    blueprint = agrees(module, x)
    agrees(module, x, every_other(blueprint))
    params, buffers = held(module, blueprint)
    before = {name: tensor.clone() for name, tensor in buffers.items()}
    valid = torch.tensor([True] * 3 + [False] * 2)
    _, moved = apply(blueprint, params, buffers, x, TRAIN, valid=valid)
    assert all(torch.equal(buffers[name], before[name]) for name in before)
    functional_call(module.train(), {**params, **buffers}, (x[:3],))
    for name in before:
        torch.testing.assert_close(moved[name], buffers[name])
    _, kept = apply(blueprint, params, before, x, TRAIN, valid=torch.zeros(5, dtype=torch.bool))
    assert all(torch.equal(kept[name], before[name]) for name in before)


def test_what_evaluation_cannot_express_is_refused_with_its_place() -> None:
    def deciding(net: Net, x: Tensor) -> Tensor:
        out = same(net, x)
        return out if net.training or float(out.sum()) > 0 else -out

    with pytest.raises(TraceError) as caught:
        trace(Net(deciding), X)
    assert "In evaluation" in str(caught.value)
    assert Path(__file__).name in str(caught.value)
    assert "torch.where" in str(caught.value)
