"""Blocks within a forward pass: written out in their place, or refused with line and cause."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from anyfleet.elastic import TRAIN, TraceError, apply, trace
from tests.helpers.plain import agrees, every_other, held

X = torch.linspace(-2, 2, 20).reshape(5, 4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.t, self.b = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 3)
        self.seen: Tensor
        self.register_buffer("seen", torch.linspace(0, 1, 6))


class Taught(Net):
    """A teacher without gradients, and a gradient switched on again inside."""

    @torch.no_grad()
    def teach(self, x: Tensor) -> Tensor:
        out: Tensor = self.t(x)
        return out

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        t = self.teach(x)
        with torch.no_grad():
            doubled = h * 2
        with torch.no_grad():
            shift = torch.full((6,), 0.5)
        with torch.no_grad():
            with torch.enable_grad():
                again = self.a(x) * doubled
            mask = again > 0
        out: Tensor = self.b(h * t + again * mask + doubled + shift)
        return out


def test_what_is_computed_without_gradients_passes_none() -> None:
    module = Taught()
    blueprint = agrees(module, X)
    assert blueprint.axes["a"].kind == "channels"
    agrees(module, X, every_other(blueprint))


class Watching(Net):
    """A buffer that follows the activations, and is read afterwards."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) + self.t(x)
        with torch.no_grad():
            self.seen.mul_(0.9).add_(h.mean(0) * 0.1)
        out: Tensor = self.b(torch.relu(h - self.seen))
        return out


def test_a_buffer_changed_without_gradients_passes_none() -> None:
    module = Watching()
    blueprint = agrees(module, X)
    params, buffers = held(module, blueprint)
    _, moved = apply(blueprint, params, buffers, X, TRAIN)
    h = (module.a(X) + module.t(X)).detach()
    torch.testing.assert_close(moved["seen"], 0.9 * buffers["seen"] + 0.1 * h.mean(0))


class Exact(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            h = self.a(x)
        out: Tensor = self.b(torch.relu(h) + self.t(x))
        return out


def test_a_block_that_switches_autocast_off_is_plain() -> None:
    module = Exact()
    agrees(module, X, every_other(agrees(module, X)))


class Halved(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.a(x)
        out: Tensor = self.b(h.float())
        return out


class Deciding(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        out: Tensor = torch.cond(h.sum() > 0, lambda h: self.b(h) * 2, lambda h: -self.b(h), (h,))
        return out


class Clamped(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        with torch.no_grad():
            h.clamp_(0, 1)
        out: Tensor = self.b(h)
        return out


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (Halved, "task.to(dtype)"),
        (Deciding, "torch.where"),
        (Clamped, "only buffers may be changed there"),
    ],
)
def test_what_stays_refused_names_its_line_and_cause(make: type[Net], cause: str) -> None:
    with pytest.raises(TraceError) as caught:
        trace(make(), X)
    assert cause in str(caught.value)
    assert Path(__file__).name in str(caught.value)
