"""Tensors under several names: one counts, the others follow, and a state_dict has them all."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from anyfleet import methods, tasks
from anyfleet.elastic import TRAIN, Blueprint, apply, dense, trace, verify
from anyfleet.experiment import Experiment, play
from anyfleet.names import Factory
from anyfleet.store import Recording
from anyfleet.tasks import zoo
from anyfleet.world import levels
from tests.helpers.plain import agrees, every_other, held

X = torch.linspace(-2, 2, 20).reshape(5, 4)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.linear(x)))


class Twice(nn.Module):
    """One block under two attributes, called by both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        self.one = self.other = Block()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.other(self.one(self.first(x))))
        return out


class ByTheOther(Twice):
    """Called only by the attribute that comes second."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.other(self.first(x)))
        return out


@pytest.mark.parametrize("make", [Twice, ByTheOther])
def test_a_module_under_two_attributes_runs(make: type[Twice]) -> None:
    module = make()
    blueprint = agrees(module, X)
    names = ("running_mean", "running_var", "num_batches_tracked")
    assert set(blueprint.buffers) == {f"one.norm.{name}" for name in names}
    assert not blueprint.program.constants
    assert {f"other.norm.{name}" for name in names} < blueprint.aliases.keys()
    assert Blueprint.from_bytes(blueprint.to_bytes()) == blueprint
    params, buffers = held(module, blueprint)
    _, moved = apply(blueprint, params, buffers, X, TRAIN)
    module.train()(X)
    for name in blueprint.buffers:
        torch.testing.assert_close(moved[name], module.state_dict()[name])
    verify(make(), X).require()


class Buffers(nn.Module):
    """Shared buffers; of `plain` and `kept`, only the second is in the state_dict."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)
        self.up: Tensor
        self.same: Tensor
        self.plain: Tensor
        self.kept: Tensor
        self.register_buffer("up", torch.linspace(1, 2, 6))
        self.register_buffer("same", self.up)
        self.register_buffer("plain", torch.linspace(2, 3, 6), persistent=False)
        self.register_buffer("kept", self.plain)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.training:
            self.same.mul_(0.5)
        out: Tensor = self.b(h * self.up * self.plain * self.kept)
        return out


def test_shared_buffers_are_one_tensor() -> None:
    module = Buffers()
    blueprint = trace(module, X)
    assert set(blueprint.buffers) == {"up", "kept"}
    assert blueprint.aliases == {"same": "up"}
    assert blueprint.axes["a"].kind == "channels"
    params, buffers = held(module, blueprint)
    out, moved = apply(blueprint, params, buffers, X, TRAIN)
    assert torch.equal(moved["up"], buffers["up"] * 0.5)
    torch.testing.assert_close(out, module.train()(X))
    assert trace(Buffers(), X).local(every_other(blueprint)).shape("up") == (3,)
    verify(Buffers(), X).require()


@pytest.mark.parametrize("make", [Twice, ByTheOther, Buffers])
def test_a_dense_model_has_all_names(make: type[nn.Module]) -> None:
    module = make()
    blueprint = trace(module, X)
    small = dense(blueprint, blueprint.prefix(1.0), *held(module, blueprint))
    assert small.state_dict().keys() == module.state_dict().keys()
    for training in (True, False):
        torch.testing.assert_close(small.train(training)(X), module.train(training)(X))
    fresh = make()
    fresh.load_state_dict(small.state_dict())
    for name, tensor in module.state_dict().items():
        torch.testing.assert_close(fresh.state_dict()[name], tensor)


DATA = tasks.Data(
    torch.randn(60, 4, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3
)


def test_a_run_saves_all_names_and_a_task_takes_them(tmp_path: Path) -> None:
    module = Twice()
    task = tasks.Task.of(module, DATA, split=tasks.Split(devices=4))
    spec = tasks.Own(Factory.of(zoo.logistic), Factory.of(zoo.logistic))  # only to be written down
    experiment = Experiment(spec, methods.fedavg(count=4), levels(speeds=(1e9,)), rounds=1)
    with Recording(tmp_path, experiment) as recording:
        result = next(play(experiment, task))
        recording.append(result)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == module.state_dict().keys()
    fresh = Twice()
    fresh.load_state_dict(saved)
    assert torch.equal(fresh.one.linear.weight, result.round.params["one.linear.weight"])
    again = tasks.Task.of(Twice(), DATA, split=tasks.Split(devices=4), state=saved)
    # One name of a shared tensor is enough.
    short = {n: t for n, t in saved.items() if not n.startswith("other")}
    once = tasks.Task.of(Twice(), DATA, split=tasks.Split(devices=4), state=short)
    for name, tensor in {**result.round.params, **result.round.buffers}.items():
        for started in (again, once):
            assert torch.equal({**started.params, **started.buffers}[name], tensor)
