"""What a forward pass does behind its graph: a backward of its own is refused, with its line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from anyfleet.elastic import TraceError, trace
from tests.helpers.plain import agrees, every_other

X = torch.linspace(-2, 2, 20).reshape(5, 4)


class Straight(Function):
    """Rounds; the gradient passes."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return torch.round(x)

    @staticmethod
    def backward(_ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class Stepped(Straight):
    """A step; the gradient passes."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return torch.relu(x.sign())


class Reversed(Function):
    """The identity; the gradient changes its sign. Written in the newer style."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, _factor: float) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, _output: Any) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return -ctx.factor * grads[0], None


# Bound when the file is read, as many write it.
straight: Callable[[Tensor], Tensor] = Straight.apply


def stepped(h: Tensor) -> Tensor:
    out: Tensor = Stepped.apply(h)  # type: ignore[no-untyped-call]
    return out


def reversed_by_half(h: Tensor) -> Tensor:
    out: Tensor = Reversed.apply(h, 0.5)  # type: ignore[no-untyped-call]
    return out


class Net(nn.Module):
    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.between = nn.Linear(4, 6), nn.Linear(6, 3), between

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.between(self.a(x)))
        return out


OWN: dict[str, Callable[[Tensor], Tensor]] = {
    "Stepped": stepped,
    "Straight": straight,
    "Reversed": reversed_by_half,
}


@pytest.mark.parametrize("name", OWN)
def test_a_backward_of_its_own_is_refused_with_its_line(name: str) -> None:
    with pytest.raises(TraceError) as caught:
        trace(Net(OWN[name]), X)
    text = str(caught.value)
    assert text.startswith(f"{name} is a torch.autograd.Function")
    assert Path(__file__).name in text
    assert "x + (q(x) - x).detach()" in text
    assert "(1 + s) * x.detach() - s * x" in text


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (lambda h: h + (torch.relu(h.sign()) - h).detach(), stepped),
        (lambda h: 1.5 * h.detach() - 0.5 * h, reversed_by_half),
    ],
)
def test_what_the_error_advises_is_the_same(
    written: Callable[[Tensor], Tensor], meant: Callable[[Tensor], Tensor]
) -> None:
    h = torch.linspace(-2, 2, 8, requires_grad=True)
    weights = torch.arange(8.0)
    (want,) = torch.autograd.grad((meant(h) * weights).sum(), h)
    (got,) = torch.autograd.grad((written(h) * weights).sum(), h)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(written(h), meant(h))
    module = Net(written)
    agrees(module, X, every_other(agrees(module, X)))


class OnInputs(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            mask = straight(self.a(x)) > 0
        out: Tensor = self.b(self.a(straight(x)) * mask)
        return out


class OnlyInEvaluation(Net):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.a(x))
        return out if self.training else straight(out)


def test_where_no_gradient_passes_nothing_is_lost() -> None:
    agrees(OnInputs(torch.relu), X)
    module = OnlyInEvaluation(torch.relu)
    blueprint = trace(module, X)
    assert blueprint.evaluation is not None


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_are_run_as_what_they_hold(reentrant: bool) -> None:
    def saving(h: Tensor) -> Tensor:
        out: Tensor = checkpoint(torch.relu, h, use_reentrant=reentrant)
        return out

    module = Net(saving)
    agrees(module, X, every_other(agrees(module, X)))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_checkpoint_without_gradients_at_its_door_has_none_inside() -> None:
    class First(Net):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.b(checkpoint(self.a, x, use_reentrant=True))
            return out

    blueprint = agrees(First(torch.relu), X)
    assert any("detach" in node.op for node in blueprint.program.nodes)


def test_a_package_beside_torch_is_the_users_code() -> None:
    """Its name may begin like that of torch: torchvision looks at its mode, too."""
    code = "def forward(self, x):\n    return x if self.training else x.softmax(-1)"
    home = f"{Path(torch.__file__).parent}vision"
    space: dict[str, Any] = {}
    exec(compile(code, f"{home}/ops.py", "exec"), space)
    last = type("Last", (nn.Module,), {"forward": space["forward"]})
    assert trace(nn.Sequential(nn.Linear(4, 3), last()), X).evaluation is not None


def test_nothing_of_torch_stays_changed() -> None:
    net = Net(torch.relu)
    trace(net, X)
    with pytest.raises(TraceError):
        trace(Net(straight), X)
    assert "apply" not in vars(Function.__mro__[1])
    assert "training" not in vars(nn.Module)
    h = torch.linspace(-2, 2, 8, requires_grad=True)
    (got,) = torch.autograd.grad(straight(h).sum(), h)
    assert torch.equal(got, torch.ones(8))
