"""Two traces of one module: what may follow from the batch size, and what may not change at all."""

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from anyfleet.elastic import EVALUATE, Blueprint, TraceError, apply, trace, verify
from anyfleet.elastic.program import Linear

Change = Callable[[Tensor], Tensor]


class Changed(nn.Module):
    def __init__(self, change: Change) -> None:
        super().__init__()
        self.change, self.inner = change, nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self.inner(x))


# What Python computes from the batch size, in a straight line.
LINES: dict[str, Change] = {
    "a multiple": lambda z: z.sum(0) * (3 * z.shape[0]) + z,
    "one less": lambda z: z.sum(0) / (z.shape[0] - 1) + z,
    "a tenth": lambda z: z * (z.shape[0] * 0.1),
    "a half": lambda z: z * (z.shape[0] / 2 + 1),
    "from the end": lambda z: z[torch.arange(z.shape[0] - 1, -1, -1)],
    "a range": lambda z: torch.cat([z[: z.shape[0] - 1], z[:1]]),
    "a shape": lambda z: z + torch.zeros(z.shape[0] + 2, 4)[2:],
    "pairs": lambda z: z + (z @ z.t()).reshape(z.shape[0] ** 2).reshape(z.shape[0], -1)[:, :1],
    # The batch of the trace is 211.
    "a number of one's own": lambda z: z * 422 + 211,
}


@pytest.mark.parametrize("name", LINES)
def test_a_number_in_a_straight_line_follows_the_batch(name: str) -> None:
    torch.manual_seed(0)
    module = Changed(LINES[name])
    blueprint = trace(module, torch.randn(2, 3))
    blueprint = Blueprint.from_bytes(blueprint.to_bytes())
    params = {n: p.detach() for n, p in module.named_parameters()}
    for count in (2, 5, 16, 300):
        x = torch.randn(count, 3)
        got, _ = apply(blueprint, params, {}, x, EVALUATE)
        torch.testing.assert_close(got, module(x))


def test_only_what_is_no_multiple_is_written_as_a_line() -> None:
    blueprint = trace(Changed(LINES["one less"]), torch.randn(2, 3))
    found = [a for n in blueprint.program.nodes for a in n.args if isinstance(a, Linear)]
    assert found == [Linear(1, -1)]
    plain = trace(Changed(LINES["a multiple"]), torch.randn(2, 3)).program
    assert not [a for n in plain.nodes for a in n.args if isinstance(a, Linear)]


REFUSED: dict[str, tuple[Change, str]] = {
    "root": (lambda z: z / z.shape[0] ** 0.5, "aten.div.Tensor gets 14.5"),
    "half": (lambda z: torch.cat([z[z.shape[0] // 2 :], z[: z.shape[0] // 2]]), "gets 105"),
    "half as a float": (lambda z: z * float(z.shape[0] // 2), "gets 105.0"),
    "even": (lambda z: z * (z.shape[0] - z.shape[0] % 2), "aten.mul.Tensor"),
    "reciprocal": (lambda z: z * (1 / z.shape[0]), "aten.mul.Tensor"),
    "at most five": (lambda z: z * min(z.shape[0], 5), "aten.mul.Tensor gets 5"),
    "a branch": (lambda z: z.relu() if z.shape[0] > 8 else z, "for another batch size"),
    "a loop": (lambda z: torch.stack(z.unbind(0)), "for another batch size"),
    "a tensor": (lambda z: z / torch.tensor(float(z.shape[0])), "makes a tensor"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_else_python_makes_of_the_batch_size_is_refused(name: str) -> None:
    change, words = REFUSED[name]
    with pytest.raises(TraceError, match=words) as caught:
        trace(Changed(change), torch.randn(2, 3))
    assert Path(__file__).name in str(caught.value) or "makes a tensor" in words


def test_a_network_that_needs_many_samples_is_traced_with_many() -> None:
    module = Changed(lambda z: z + z.topk(10, 0)[0].mean())
    assert trace(module, torch.randn(2, 3)).params


@pytest.fixture
def outside() -> Iterator[None]:
    """Generators outside torch are left as they were."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    yield
    random.setstate(python)
    np.random.set_state(numpy)  # noqa: NPY002


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "draw",
    [
        lambda z: z.relu() if random.random() < 0.5 else z,
        lambda z: z * random.random(),
        lambda z: z * float(np.random.rand()),  # noqa: NPY002
        lambda z: z + torch.tensor([random.gauss(0, 1)]),
    ],
    ids=["branch", "number", "numpy", "tensor"],
)
def test_a_forward_that_is_not_the_same_twice_is_refused(draw: Change, seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    with pytest.raises(TraceError, match="not the same twice"):
        trace(Changed(draw), torch.randn(2, 3))


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize("seed", range(8))
def test_a_branch_on_random_numbers_is_refused_whatever_is_drawn(seed: int) -> None:
    # The traces of other batch sizes alone would miss some of these.
    random.seed(seed)
    with pytest.raises(TraceError, match="not the same twice"):
        trace(Changed(lambda z: z.relu() if random.random() < 0.5 else z), torch.randn(2, 3))


def test_what_counts_outside_is_refused() -> None:
    numbers = itertools.count()
    with pytest.raises(TraceError, match="not the same twice"):
        trace(Changed(lambda z: z * next(numbers)), torch.randn(2, 3))


@pytest.mark.usefixtures("outside")
def test_draws_that_decide_nothing_are_allowed() -> None:
    blueprint = trace(Changed(lambda z: z if random.random() < 2 else z.relu()), torch.randn(2, 3))
    assert not [node for node in blueprint.program.nodes if "relu" in node.op]


class Ghost(nn.Module):
    """Normalises halves of an even batch by themselves: an odd one is normalised whole."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        parts = x.chunk(2) if x.shape[0] % 2 == 0 else (x,)
        out: Tensor = self.head(torch.cat([self.norm(part) for part in parts]))
        return out


def test_what_asks_for_a_remainder_of_the_batch_is_refused() -> None:
    with pytest.raises(TraceError):
        trace(Ghost(), torch.randn(4, 4))


@pytest.mark.parametrize(
    "forward",
    [
        lambda h: torch.fft.irfft2(torch.fft.rfft2(h[:, None]), s=h[:, None].shape[-2:])[:, 0],
        lambda h: h / (1 + h.abs().amax()),
        lambda h: h + (1 - torch.eye(h.shape[0], dtype=h.dtype)) @ h,
    ],
    ids=["defaults that are lists", "the largest of all", "a table of the batch"],
)
def test_odd_calls_over_the_batch_are_traced_and_right(
    forward: Callable[[Tensor], Tensor],
) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(4, 6), nn.Parameter(torch.tensor(1.5))

        def forward(self, x: Tensor) -> Tensor:
            return forward(self.layer(x)) * self.scale

    verify(Odd(), torch.randn(4, 4)).require()
