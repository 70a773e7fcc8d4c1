"""The check that every task makes: what it finds, what it says, what it costs and leaves alone."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from anyfleet.elastic import Blueprint, Report, VerifyError, require_faithful, trace, verify
from anyfleet.elastic.execution import replaced_operators as replaced
from anyfleet.elastic.program import Items, Node, Value
from anyfleet.elastic.verification import faithful
from anyfleet.tasks import Data, Split, Task
from tests.helpers.nets import traced


class Small(nn.Module):
    """Two layers; `factor` and `function` are content, the weights are not."""

    def __init__(
        self, factor: float = 1.0, function: Callable[[Tensor], Tensor] = torch.relu
    ) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.factor, self.function = factor, function

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.function(self.norm(self.a(x)))) * self.factor
        return out


def changed(blueprint: Blueprint, change: Callable[[Node], Node]) -> Blueprint:
    nodes = tuple(change(node) for node in blueprint.program.nodes)
    assert nodes != blueprint.program.nodes
    return replace(blueprint, program=replace(blueprint.program, nodes=nodes))


def instead(old: str, new: str) -> Callable[[Blueprint], Blueprint]:
    """Another operator in place of one."""
    return lambda blueprint: changed(
        blueprint, lambda node: replace(node, op=new) if node.op == old else node
    )


def halved(blueprint: Blueprint) -> Blueprint:
    """The second factor of a product becomes another number."""
    return changed(
        blueprint,
        lambda node: replace(node, args=(node.args[0], 0.5)) if "mul" in node.op else node,
    )


# A fault of the trace, and what the refusal says of it.
FAULTS = {
    "another function": (
        instead("aten.relu.default", "aten.tanh.default"),
        "evaluating: the output for batch 2 differs by .* first in forward.. between norm and b",
    ),
    "a layer without its bias": (
        lambda blueprint: changed(
            blueprint,
            lambda node: replace(node, args=node.args[:2]) if node.where == "b" else node,
        ),
        "evaluating: the output for batch 2 differs by .* first inside b",
    ),
    "the end of forward": (halved, "evaluating: .* first in forward.. after b"),
    "a lost gradient": (
        lambda blueprint: changed(
            blueprint,
            lambda node: (
                Node(node.name, "aten.detach.default", node.args, {}, node.dims)
                if node.op == "aten.alias.default"
                else node
            ),
        ),
        "training: the gradient of a.weight differs by .* first between norm and what follows it",
    ),
}


class Scaled(Small):
    """Has an alias to lose the gradient at, and a factor at the end."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.a(x)))
        out: Tensor = self.b(torch.ops.aten.alias(hidden)) * 3.0
        return out


@pytest.mark.parametrize("fault", FAULTS)
def test_a_refusal_names_the_place_and_the_way_out(fault: str) -> None:
    torch.manual_seed(0)
    module, x = Scaled(), torch.randn(2, 6)
    spoil, said = FAULTS[fault]
    blueprint = trace(module, x)
    require_faithful(module, (x,), blueprint)
    with pytest.raises(VerifyError, match=said) as refused:
        require_faithful(module, (x,), spoil(blueprint))
    text = str(refused.value)
    assert text.startswith("Scaled: the traced network is not the function that the module is")
    assert text.splitlines()[-1].endswith(".")
    assert isinstance(refused.value, ValueError)


def test_padding_that_reaches_other_rows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if batch norm forgot its mask."""
    net = traced("vgg_batch")

    def unmasked(x: Tensor, weight: Any, bias: Any, rows: Tensor, eps: float) -> Tensor:
        assert len(rows)
        return torch.batch_norm(x, weight, bias, None, None, True, 0.0, eps, False)

    assert verify(net.module, net.inputs, net.blueprint, trials=1).ok
    monkeypatch.setattr(replaced, "masked_batch_norm", unmasked)
    (problem,) = verify(net.module, net.inputs, net.blueprint, trials=1).problems
    assert problem.startswith("padding: with padded rows the output for the other rows differs")
    assert problem.endswith("in training, first at batch_norm.default in 1")


def test_the_narrowest_width_is_tried() -> None:
    """Right at every width but one: what is squeezed away is an axis that was cut to one."""
    net = traced("perceptron")
    last = net.blueprint.program.nodes[-1]
    source = last.args[0]
    assert isinstance(source, Value)
    squeezed = Node("squeezed", "aten.squeeze.default", (source,), {}, last.dims)
    nodes = (
        *net.blueprint.program.nodes[:-1],
        squeezed,
        replace(last, args=(Value("squeezed"), *last.args[1:])),
    )
    program = replace(net.blueprint.program, nodes=nodes)
    report = verify(net.module, net.inputs, replace(net.blueprint, program=program), trials=1)
    assert any(problem.startswith("narrowest") for problem in report.problems)


def test_the_batch_must_not_be_a_number() -> None:
    net = traced("lenet")
    wrong = changed(
        net.blueprint,
        lambda n: (
            replace(n, op="aten.view.default", args=(n.args[0], Items((3, 24))))
            if n.op.startswith("aten.flatten")
            else n
        ),
    )
    report = verify(net.module, net.inputs, wrong, trials=1)
    assert report.problems[0].startswith("evaluating")


def test_zeros_hide_nothing() -> None:
    """A branch that starts at zero and without a gradient is looked into."""

    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.scale = nn.Linear(6, 6), nn.Parameter(torch.zeros(6))
            self.b = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.b(x + self.scale.square() * torch.relu(self.a(x)))
            return out

    module, x = Branch(), torch.randn(2, 6)
    wrong = instead("aten.relu.default", "aten.tanh.default")(trace(module, x))
    assert not verify(module, x, wrong, trials=1).ok


# --- once for the same content ----------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The modules that were really looked at."""
    seen: list[nn.Module] = []

    def noted(module: nn.Module, *args: Any, **given: Any) -> Report:
        seen.append(module)
        return verify(module, *args, **given)

    monkeypatch.setattr(faithful, "verify", noted)
    return seen


def test_the_same_content_is_checked_once(asked: list[nn.Module]) -> None:
    x = torch.randn(2, 6)
    for seed in (1, 2):
        torch.manual_seed(seed)
        module = Small(factor=0.123)
        require_faithful(module, (x + seed,), trace(module, x))
    assert len(asked) == 1


def test_other_content_is_checked_again(asked: list[nn.Module]) -> None:
    x = torch.randn(2, 6)
    double = Small(0.25).double()
    for module, example in (
        (Small(0.25), x),
        (Small(0.26), x),
        (Small(0.25, torch.tanh), x),
        (double, x.double()),
    ):
        require_faithful(module, (example,), trace(module, example))
    assert len(asked) == 4
    # What forward() might look at, though the trace does not show it.
    for label in ("one", "other"):
        module = Small(0.25)
        module.label = label  # type: ignore[assignment]
        require_faithful(module, (x,), trace(module, x))
    assert len(asked) == 6
    # A trace of the same module that is another one.
    module = Small(0.25)
    wrong = instead("aten.relu.default", "aten.tanh.default")(trace(module, x))
    for _ in range(2):
        with pytest.raises(VerifyError):
            require_faithful(module, (x,), wrong)
    assert len(asked) == 7


def test_what_cannot_be_told_is_checked_every_time(asked: list[nn.Module]) -> None:
    x = torch.randn(2, 6)
    module = Small()
    module.strange = object()  # type: ignore[assignment]
    for _ in range(2):
        require_faithful(module, (x,), trace(module, x))
    assert len(asked) == 2


def test_the_same_code_of_another_class_is_checked_again(asked: list[nn.Module]) -> None:
    """A new class of the same name may have other methods."""
    x = torch.randn(2, 6)
    for _ in range(2):

        class Net(Small):
            pass

        module = Net(0.5)
        require_faithful(module, (x,), trace(module, x))
    assert len(asked) == 2


# --- what it leaves alone ---------------------------------------------------------------------


class Drawing(Small):
    """Moves every generator there is, and a buffer."""

    def forward(self, x: Tensor) -> Tensor:
        torch.rand(1), random.random(), np.random.rand()  # noqa: NPY002
        return super().forward(x)


def test_the_module_and_all_generators_stay_as_they_were() -> None:
    torch.manual_seed(0)
    module, x = Drawing().eval(), torch.randn(2, 6)
    blueprint = trace(Small(), x)
    before = {n: t.clone() for n, t in module.state_dict().items()}
    states = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())  # noqa: NPY002
    # What Python and numpy draw decides nothing here; torch's own draws are counted.
    (problem,) = verify(module, x, blueprint, trials=1).problems
    assert problem.startswith("drawing: 1 calls of the module draw at random in evaluation")
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert repr(np.random.get_state()) == states[2]  # noqa: NPY002
    assert torch.get_default_dtype() == torch.float32
    assert not module.training
    assert all(torch.equal(before[n], t) for n, t in module.state_dict().items())
    assert all(p.grad is None and p.dtype == torch.float32 for p in module.parameters())


class Deciding(Small):
    """Has a factor that Python draws."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.0 if random.random() < 0.5 else 2.0)


def test_numbers_that_python_draws_are_found() -> None:
    torch.manual_seed(0)
    module, x = Deciding(), torch.randn(2, 6)
    before = random.getstate()
    problems = verify(module, x, trace(Small(), x), trials=1).problems
    assert random.getstate() == before
    assert problems[0] == (
        "drawing: forward() draws from Python's random, and its output depends on that"
    )


# --- a task -----------------------------------------------------------------------------------


def test_no_task_is_made_of_a_network_that_was_traced_wrongly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    data = Data(torch.randn(20, 6), torch.arange(20) % 3)
    assert Task.of(Small(), data, split=Split(2)).devices == 2

    def spoiled(module: nn.Module, inputs: tuple[Tensor, ...]) -> Blueprint:
        return instead("aten.relu.default", "aten.tanh.default")(trace(module, inputs))

    monkeypatch.setattr("anyfleet.elastic.tracing.tracer.trace", spoiled)
    with pytest.raises(VerifyError, match="Small: the traced network is not the function"):
        Task.of(Small(), data, split=Split(2))
