"""Random operators of a network: by key, repeatable, and known in evaluation."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from anyfleet import rng
from anyfleet.elastic import EVALUATE, STATIC, Blueprint, TraceError, apply, cost, trace, verify
from anyfleet.elastic.execution.kept_units import kept

KEY = rng.root(0, "draws")
Between = Callable[[nn.Module, Tensor], Tensor]


class Noisy(nn.Module):
    def __init__(self, between: Between) -> None:
        super().__init__()
        self.a, self.b, self.between = nn.Linear(4, 6), nn.Linear(6, 3), between

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.between(self, self.a(x)))
        return out


# What is between the layers, and the mean and standard deviation of what it draws.
DRAWS: dict[str, tuple[Callable[[Tensor], Tensor], float, float]] = {
    "rand": (lambda h: torch.rand(h.shape), 0.5, 12**-0.5),
    "randn": (lambda h: torch.randn(*h.shape), 0.0, 1.0),
    "rand_like": (torch.rand_like, 0.5, 12**-0.5),
    "randn_like": (torch.randn_like, 0.0, 1.0),
    "bernoulli": (lambda h: torch.bernoulli(torch.full_like(h, 0.3)), 0.3, 0.21**0.5),
    "bernoulli.p": (lambda h: torch.bernoulli(h.detach(), 0.3), 0.3, 0.21**0.5),
    "uniform": (lambda h: torch.empty_like(h).uniform_(-1, 3), 1.0, 4 * 12**-0.5),
    "exponential": (lambda h: torch.empty_like(h).exponential_(2.0), 0.5, 0.5),
}


def noisy(name: str) -> tuple[Noisy, Blueprint, dict[str, Tensor], Tensor]:
    torch.manual_seed(0)
    draw = DRAWS[name][0]
    module, x = Noisy(lambda _, h: h + draw(h)), torch.randn(5, 4)
    params = {n: p.detach() for n, p in module.named_parameters()}
    return module, trace(module, x), params, x


@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_keyed_and_not_taken_from_torch(name: str) -> None:
    _, blueprint, params, x = noisy(name)
    one, other = (apply(blueprint, params, {}, x, STATIC, key=rng.fold(KEY, i))[0] for i in (0, 1))
    torch.manual_seed(123)
    before = torch.random.get_rng_state()
    again, _ = apply(blueprint, params, {}, x, STATIC, key=rng.fold(KEY, 0))
    assert torch.equal(again, one)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not torch.equal(other, one)
    # Padding at the end changes nothing.
    more, _ = apply(blueprint, params, {}, torch.cat([x, x]), STATIC, key=rng.fold(KEY, 0))
    torch.testing.assert_close(more[:5], one)
    with pytest.raises(ValueError, match="pass a key"):
        apply(blueprint, params, {}, x, STATIC)


@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_those_of_the_operator(name: str) -> None:
    _, blueprint, params, _ = noisy(name)
    # Only the noise reaches the output.
    quiet = {"a.weight": torch.zeros(6, 4), "a.bias": torch.zeros(6)}
    last = {"b.weight": torch.eye(6)[:3], "b.bias": torch.zeros(3)}
    zeros = torch.zeros(4000, 4)
    out, _ = apply(blueprint, {**params, **quiet, **last}, {}, zeros, STATIC, key=KEY)
    _, mean, deviation = DRAWS[name]
    assert abs(float(out.mean()) - mean) < 0.05
    assert abs(float(out.std()) - deviation) < 0.05


@pytest.mark.parametrize("name", DRAWS)
def test_draws_work_stacked_and_are_cut(name: str) -> None:
    module, blueprint, params, x = noisy(name)
    keys = torch.stack([rng.fold(KEY, i) for i in range(3)])

    def loss(params: dict[str, Tensor], key: Tensor) -> Tensor:
        return apply(blueprint, params, {}, x, STATIC, key=key)[0].square().sum()

    stacked = vmap(grad(loss), (None, 0))(params, keys)
    for i in range(3):
        one = grad(loss)(params, keys[i])
        for tensor in one:
            torch.testing.assert_close(stacked[tensor][i], one[tensor])
    assert blueprint.axes["a"].kind == "channels"
    assert cost(blueprint, blueprint.prefix(0.5)).params == 5 * 3 + 3 * 3 + 3
    verify(module, x, blueprint).require()


def test_draws_in_evaluation_are_repeatable_and_noted() -> None:
    _, blueprint, params, x = noisy("randn_like")
    (note,) = blueprint.remarks
    assert "randn_like" in note
    assert "evaluation" in note
    one, other = (apply(blueprint, params, {}, x, EVALUATE)[0] for _ in range(2))
    assert torch.equal(one, other)
    keyed, _ = apply(blueprint, params, {}, x, EVALUATE, key=KEY)
    assert not torch.equal(keyed, one)


def test_noise_of_training_is_absent_in_evaluation() -> None:
    torch.manual_seed(0)
    module = Noisy(lambda own, h: h + 0.1 * torch.randn_like(h) if own.training else h)
    x = torch.randn(5, 4)
    blueprint = trace(module, x)
    params = dict(module.named_parameters())
    assert any("only in training" in note for note in blueprint.remarks)
    got, _ = apply(blueprint, params, {}, x, EVALUATE)
    torch.testing.assert_close(got, module.eval()(x))
    drawn, _ = apply(blueprint, params, {}, x, STATIC, key=KEY)
    assert not torch.allclose(drawn, got)
    verify(module, x, blueprint).require()


def test_draws_within_a_function_of_torch_are_known() -> None:
    module = Noisy(lambda _, h: functional.gumbel_softmax(h, dim=-1))
    report = verify(module, torch.randn(5, 4))
    assert report.ok, report.problems


def always(own: nn.Module, h: Tensor) -> Tensor:
    return functional.dropout(functional.dropout(h, 0.5, training=True), 0.2, own.training)


def test_dropout_that_is_always_on_stays_on() -> None:
    torch.manual_seed(0)
    module, x = Noisy(always), torch.randn(5, 4)
    blueprint = trace(module, x)
    assert [node.always for node in blueprint.program.nodes if node.site] == [True, False]
    assert any("dropout" in note and "evaluation" in note for note in blueprint.remarks)
    params = {n: p.detach() for n, p in module.named_parameters()}
    keys = torch.stack([rng.fold(KEY, i) for i in range(4000)])
    outs = vmap(lambda key: apply(blueprint, params, {}, x, EVALUATE, key=key)[0])(keys)
    plain = module.b(module.a(x)).detach()
    assert float(outs.std(0).min()) > 0.01
    torch.testing.assert_close(outs.mean(0), plain, rtol=0, atol=0.1)
    fixed = (apply(blueprint, params, {}, x, EVALUATE)[0] for _ in range(2))
    assert torch.equal(*fixed)
    verify(module, x, blueprint).require()


def test_verify_sees_dropout_that_the_blueprint_would_switch_off() -> None:
    module, x = Noisy(always), torch.randn(5, 4)
    blueprint = trace(module, x)
    nodes = tuple(replace(node, always=False) for node in blueprint.program.nodes)
    wrong = replace(blueprint, program=replace(blueprint.program, nodes=nodes))
    (problem,) = verify(module, x, wrong).problems
    assert "draw at random in evaluation" in problem


def test_dropout_that_is_always_off_stays_off() -> None:
    module, x = Noisy(lambda _, h: functional.dropout(h, 0.5, training=False)), torch.randn(5, 4)
    blueprint = trace(module, x)
    out, _ = apply(blueprint, dict(module.named_parameters()), {}, x, STATIC, key=KEY)
    torch.testing.assert_close(out, module(x))
    assert blueprint.remarks == ()


REFUSED: dict[str, Between] = {
    "randint": lambda _, h: h + torch.randint(0, 2, h.shape),
    "randperm": lambda _, h: h[:, torch.randperm(6)],
    "multinomial": lambda _, h: h + torch.multinomial(h.softmax(-1), 6, replacement=True),
    "normal": lambda _, h: torch.normal(h, 1.0),
    "rrelu": lambda own, h: functional.rrelu(h, training=own.training),
}


@pytest.mark.parametrize("name", REFUSED)
def test_draws_without_a_key_are_refused(name: str) -> None:
    with pytest.raises(TraceError) as caught:
        trace(Noisy(REFUSED[name]), torch.zeros(5, 4))
    assert name in str(caught.value)
    assert "torch.rand" in str(caught.value)
    assert Path(__file__).name in str(caught.value)


def test_dropout_within_a_recurrent_layer_is_refused() -> None:
    class Stacked(nn.Module):
        def __init__(self, rate: float) -> None:
            super().__init__()
            self.rnn = nn.LSTM(4, 5, 2, batch_first=True, dropout=rate)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.rnn(x)[0]
            return out

    with pytest.raises(TraceError, match="one module per layer"):
        trace(Stacked(0.1), torch.zeros(2, 3, 4))
    module, x = Stacked(0.0), torch.randn(2, 3, 4)
    got, _ = apply(trace(module, x), dict(module.named_parameters()), {}, x, EVALUATE)
    torch.testing.assert_close(got, functional_call(module, {}, (x,)))


@pytest.mark.parametrize("make", [nn.Dropout, nn.AlphaDropout, nn.Dropout2d])
def test_dropping_saves_what_torch_saves(make: Callable[[float], nn.Module]) -> None:
    module = nn.Sequential(nn.Conv2d(1, 3, 1), make(0.3))
    x = torch.randn(2, 1, 4, 4)
    sizes: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        sizes.append(tensor.untyped_storage().nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        module(x)
    held = 4 * 3
    assert cost(trace(module, x), batch=2).activation_bytes == sum(sizes) - held


@pytest.mark.parametrize("rate", [2.0**-60, 0.1, 0.25, 1 / 3, 0.5, 1 - 2.0**-53])
def test_units_are_kept_where_a_uniform_number_is_at_least_the_rate(rate: float) -> None:
    key = rng.fold(KEY, torch.arange(3))
    drawn = rng.uniform(key, 5000)
    assert torch.equal(kept(key, 5000, rate), drawn >= rate)
    # On the very border, too: a number that is drawn is a rate that keeps it.
    border = float(drawn[0, 7])
    assert kept(key, 5000, border)[0, 7]
    assert not kept(key, 5000, border + 2.0**-53)[0, 7]
