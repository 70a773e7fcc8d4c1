"""Our pure optimisers against torch's."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap

from anyfleet.parts.train import AdamW, Decaying, Inverse, Sgd
from anyfleet.parts.train.optimisers import Optimiser, clipped

SHAPES = {"weight": (4, 3), "bias": (4,)}
Theirs = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

PAIRS: list[tuple[Optimiser, Theirs]] = [
    (Sgd(), lambda p: torch.optim.SGD(p, lr=0.1)),
    (Sgd(momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    (
        Sgd(momentum=0.9, nesterov=True, weight_decay=1e-2),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-2),
    ),
    (AdamW(), lambda p: torch.optim.AdamW(p, lr=0.1)),
    (
        AdamW(betas=(0.8, 0.9), epsilon=1e-4, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.8, 0.9), eps=1e-4, weight_decay=0.1),
    ),
]


def random(seed: int) -> dict[str, Tensor]:
    noise = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=noise).double() for name, shape in SHAPES.items()}


@pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=[str(pair[0]) for pair in PAIRS])
def test_five_steps_agree_with_torch(ours: Optimiser, theirs: Theirs) -> None:
    params = random(0)
    modules = {name: nn.Parameter(value.clone()) for name, value in params.items()}
    optimiser = theirs(list(modules.values()))
    state = ours.init(params)
    for step in range(1, 6):
        gradients = random(step)
        params, state = ours.update(
            params, gradients, state, torch.tensor(0.1, dtype=torch.float64)
        )
        for name, parameter in modules.items():
            parameter.grad = gradients[name]
        optimiser.step()
    for name, parameter in modules.items():
        torch.testing.assert_close(params[name], parameter.detach(), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("ours", [Sgd(), Sgd(momentum=0.9), Sgd(weight_decay=1e-2)], ids=str)
@pytest.mark.parametrize("count", [1, 3])
def test_a_step_that_is_written_over_the_parameters_has_the_same_bits(
    ours: Sgd, count: int
) -> None:
    stacks = [{n: torch.stack([v] * count) for n, v in random(seed).items()} for seed in (0, 1)]
    params, gradients = ({n: v if count > 1 else v[0] for n, v in s.items()} for s in stacks)
    lr = torch.linspace(0.1, 0.3, count).double() if count > 1 else torch.tensor(0.1).double()

    def after(rule: Callable[..., tuple[dict[str, Tensor], object]]) -> dict[str, Tensor]:
        own = {name: value.clone() for name, value in params.items()}
        before = dict(own)

        def one(own: dict[str, Tensor], found: dict[str, Tensor], lr: Tensor) -> dict[str, Tensor]:
            return rule(own, found, ours.init(own), lr)[0]

        new: dict[str, Tensor] = (vmap(one) if count > 1 else one)(own, gradients, lr)
        written = rule == ours.overwrite and ours == Sgd()
        moved = [not torch.equal(before[name], params[name]) for name in params]
        assert moved == [written] * len(params)
        return new

    expected, found = after(ours.update), after(ours.overwrite)
    assert all(torch.equal(expected[name], found[name]) for name in params)


@pytest.mark.parametrize("norm", [0.1, 1.0, 1e3])
def test_clipping_agrees_with_torch(norm: float) -> None:
    gradients = random(3)
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES.values()]
    for parameter, gradient in zip(parameters, gradients.values(), strict=True):
        parameter.grad = gradient.float()
    nn.utils.clip_grad_norm_(parameters, norm)
    for parameter, gradient in zip(parameters, clipped(gradients, norm).values(), strict=True):
        torch.testing.assert_close(parameter.grad, gradient.float())


def test_rates() -> None:
    assert Decaying(0.1, 0.5)(3) == pytest.approx(0.0125)
    assert Decaying(0.1)(1000) == 0.1
    assert Inverse(mu=0.5, epsilon=4.0, offset=3.0)(2) == pytest.approx(2 / (0.5 * 4 * 5))


def test_impossible_values_are_refused() -> None:
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: Sgd(momentum=1.0), "momentum"),
        (lambda: Sgd(nesterov=True), "nesterov"),
        (lambda: Sgd(weight_decay=-1), "weight_decay"),
        (lambda: AdamW(betas=(0.9, 1.0)), "betas"),
        (lambda: Decaying(0.0), "start"),
        (lambda: Decaying(0.1, 1.5), "factor"),
        (lambda: Inverse(0.0, 1.0), "mu"),
    ]
    for make, complaint in cases:
        with pytest.raises(ValueError, match=complaint):
            make()
