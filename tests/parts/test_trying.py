"""Parts tried by themselves: the numbers of a run, and its checks, without a run."""

import doctest
from collections.abc import Sequence
from dataclasses import dataclass
from inspect import isabstract
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anyfleet import parts
from anyfleet.errors import BadReturn
from anyfleet.parts import (
    Aggregate,
    Aggregated,
    Clipped,
    Codec,
    CoordinateMedian,
    Decaying,
    ErrorFeedback,
    ErrorWeighted,
    Fjord,
    Gradient,
    Mean,
    MessageLayout,
    Params,
    Qsgd,
    Raw,
    ServerOptimised,
    ServerSgd,
    Sgd,
    State,
    Stc,
    Subset,
    Symbols,
    TopK,
    Updates,
    View,
    add_delta,
    codec,
    rng,
    try_aggregate,
    try_codec,
    try_train,
    trying,
)

MODEL = {"w": torch.tensor([1.0, 2.0, 3.0]), "b": torch.zeros(2, 2)}
DELTAS = [
    {"w": torch.tensor([1.0, 0.0, 1.0]), "b": torch.eye(2)},
    {"w": torch.tensor([3.0, 0.0, -1.0])},
    {"w": torch.tensor([5.0, 9.0, 0.0]), "b": -torch.eye(2)},
]


def test_the_examples_of_the_docstrings_work() -> None:
    for module in (parts, trying):
        failed, tried = doctest.testmod(module)
        assert tried
        assert not failed


# --- aggregators ------------------------------------------------------------------------------


def test_an_aggregator_is_tried_on_three_tensors() -> None:
    found = try_aggregate(CoordinateMedian(), MODEL, DELTAS)
    assert found.model["w"].tolist() == [4.0, 2.0, 3.0]
    assert found.model["b"].tolist() == [[0.0, 0.0], [0.0, 0.0]]
    weighed = try_aggregate(Mean(), MODEL, DELTAS, samples=[2, 1, 1]).model
    assert weighed["w"].tolist() == [1 + 2.5, 2 + 2.25, 3 + 0.25]
    torch.testing.assert_close(weighed["b"], torch.eye(2) / 3)  # the second device has no say
    old = try_aggregate(Mean("equal", discount=1.0), MODEL, DELTAS[:2], staleness=[0, 1]).model
    torch.testing.assert_close(old["w"], MODEL["w"] + torch.tensor([5 / 3, 0.0, 1 / 3]))
    reports = [{"distortion": 0.0}, {"distortion": 1.0}]
    exact = try_aggregate(ErrorWeighted(), MODEL, DELTAS[:2], reports=reports).model
    torch.testing.assert_close(exact["w"], MODEL["w"] + torch.tensor([5 / 3, 0.0, 1 / 3]))


def test_entries_that_a_device_did_not_train_are_not_its_own() -> None:
    covered = [{"w": torch.tensor([1.0, 1.0, 0.0])}, {}]
    found = try_aggregate(Mean("equal"), MODEL, DELTAS[:2], covered=covered).model["w"]
    assert found.tolist() == [3.0, 2.0, 2.0]


def test_a_state_goes_on() -> None:
    part = ServerOptimised(Mean(), ServerSgd(momentum=0.5))
    one = try_aggregate(part, MODEL, DELTAS[:1])
    two = try_aggregate(part, one.model, DELTAS[:1], state=one.state)
    assert two.model["w"].tolist() == [1 + 1 + 1.5, 2.0, 3 + 1 + 1.5]


def test_the_loss_of_the_server_is_the_authors() -> None:
    asked: list[float] = []

    def loss(model: Params) -> float:
        asked.append(float(model["w"][0]))
        return asked[-1]

    found = try_aggregate(Subset(share=0.5), MODEL, DELTAS, server_loss=loss)
    assert asked
    assert found.diagnostics["labelled_count"] >= 1
    with pytest.raises(ValueError, match=r"server_loss=lambda model"):
        try_aggregate(Subset(share=0.5), MODEL, DELTAS)


@dataclass(frozen=True)
class Noisy(Aggregate):
    """The mean with noise, or something that is no model at all."""

    broken: bool = False

    def __call__(
        self, model: Params, updates: Updates, view: View, state: State, key: Tensor
    ) -> Aggregated:
        if self.broken:
            return Aggregated({"w": model["w"]})
        noise = {"w": rng.normal(key, 3, torch.float32)}
        return Aggregated(add_delta(add_delta(model, updates.mean(updates.samples)), noise))


def test_randomness_is_fixed_and_what_comes_back_is_checked() -> None:
    one, two, three = (try_aggregate(Noisy(), MODEL, DELTAS, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(one.model["w"], two.model["w"])
    assert not torch.equal(one.model["w"], three.model["w"])
    with pytest.raises(BadReturn, match=r"aggregate=Noisy\(broken=True\) returned"):
        try_aggregate(Noisy(broken=True), MODEL, DELTAS)


def test_what_a_try_does_not_have_says_so() -> None:
    @dataclass(frozen=True)
    class Curious(Clipped):
        def __call__(
            self, model: Params, updates: Updates, view: View, state: State, key: Tensor
        ) -> Aggregated:
            assert view.idle.tolist() == [0, 1, 2]
            view.conditions(view.idle)
            return super().__call__(model, updates, view, state, key)

    with pytest.raises(ValueError, match="no conditions of devices: try this part in a run"):
        try_aggregate(Curious(), MODEL, DELTAS)


# --- codecs -----------------------------------------------------------------------------------

TENSORS = {
    "conv": rng.normal(rng.root(1, "conv"), 72, torch.float32).reshape(4, 2, 3, 3),
    "bias": torch.tensor([0.5, -0.25, 0.0, 8.0]),
}


CODECS = [
    kind
    for kind in (getattr(codec, name) for name in codec.__all__)
    if isinstance(kind, type) and Codec in kind.__mro__ and not isabstract(kind)
]


@pytest.mark.parametrize("kind", CODECS)
def test_every_codec_can_be_tried(kind: type[Codec]) -> None:
    tried = try_codec(kind(), TENSORS)
    assert 8 * sum(map(len, tried.packed)) <= tried.bits
    assert all(value.shape == TENSORS[each].shape for each, value in tried.restored.items())
    error = sum(float((TENSORS[n] - v).double().square().sum()) for n, v in tried.restored.items())
    total = sum(float(value.double().square().sum()) for value in TENSORS.values())
    if tried.restored:
        assert tried.distortion == pytest.approx(error / total, rel=1e-4, abs=1e-9)


def test_a_codec_costs_what_it_says() -> None:
    whole = try_codec(Raw(), TENSORS)
    assert whole.bits == 32 * 76
    assert all(torch.equal(whole.restored[name], value) for name, value in TENSORS.items())
    few = try_codec(TopK(keep=0.25), TENSORS)
    assert {n: int((v != 0).sum()) for n, v in few.restored.items()} == {"conv": 18, "bias": 1}
    assert few.bits < whole.bits / 2
    one, two, three = (try_codec(Qsgd(), TENSORS, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(one.restored["conv"], two.restored["conv"])
    assert not torch.equal(one.restored["conv"], three.restored["conv"])


def test_a_codec_follows_the_sent_fraction_that_is_asked_for() -> None:
    less, more = (try_codec(codec.Fgc(), TENSORS, sent_fraction=part).bits for part in (0.1, 0.5))
    assert less < more


def test_what_was_left_out_is_sent_later() -> None:
    part = ErrorFeedback(Stc(0.25))
    one = try_codec(part, TENSORS)
    torch.testing.assert_close(one.state["bias"], TENSORS["bias"] - one.restored["bias"])
    two = try_codec(part, {name: torch.zeros_like(value) for name, value in TENSORS.items()})
    again = {name: torch.zeros_like(value) for name, value in TENSORS.items()}
    rest = try_codec(part, again, state=one.state)
    assert not two.restored["bias"].any()
    assert rest.restored["bias"].any()


@dataclass(frozen=True)
class Sloppy(Raw):
    """Packs something else than it promised, or more than it said."""

    fault: str = "numbers"

    def restore(self, symbols: Symbols, layout: MessageLayout) -> tuple[Params, Params]:
        tree, kept = super().restore(symbols, layout)
        wrong = self.fault == "numbers"
        return {name: value + 1 if wrong else value for name, value in tree.items()}, kept

    def pack(self, symbols: Symbols, layout: MessageLayout) -> tuple[bytes, ...]:
        packed = super().pack(symbols, layout)
        return packed if self.fault == "numbers" else (*packed[:-1], packed[-1] + b"more")

    def unpack(self, columns: Sequence[bytes], layout: MessageLayout) -> Symbols:
        return super().unpack([column.removesuffix(b"more") for column in columns], layout)


def test_a_codec_that_breaks_its_word_is_refused() -> None:
    with pytest.raises(BadReturn, match="other numbers for 'conv' from `restore`"):
        try_codec(Sloppy(), TENSORS)
    with pytest.raises(BadReturn, match=r"packed bits where `bits` says 2432"):
        try_codec(Sloppy(fault="length"), TENSORS)
    with pytest.raises(ValueError, match="at least one tensor"):
        try_codec(Raw(), {})


# --- trainers ---------------------------------------------------------------------------------


def net() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


X = rng.normal(rng.root(2, "x"), 36, torch.float32).reshape(12, 3)
Y = (X[:, 0] > 0).long()


def test_one_step_of_training_is_torchs() -> None:
    module = nn.Linear(3, 2)
    nn.functional.cross_entropy(module(X), Y).backward()  # type: ignore[no-untyped-call]
    found = try_train(Gradient(Decaying(0.1), Sgd(), batch_size=12), module, X, Y)
    for name, value in module.named_parameters():
        assert value.grad is not None
        torch.testing.assert_close(found.params[name], value.detach() - 0.1 * value.grad)
    loss = nn.functional.cross_entropy(module(X), Y).item()
    assert float(found.report["loss"]) == pytest.approx(loss, rel=1e-5)


def test_a_trainer_is_tried_without_changing_the_network() -> None:
    module = net()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    part = Gradient(Decaying(0.1), Sgd(), epochs=3, batch_size=4)
    one, two, three = (try_train(part, module, X, Y, seed=seed) for seed in (0, 0, 1))
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(torch.equal(one.params[name], two.params[name]) for name in one.params)
    assert not torch.equal(one.params["0.weight"], three.params["0.weight"])
    assert not torch.equal(one.params["0.weight"], before["0.weight"])
    assert one.params.keys() | one.buffers.keys() <= before.keys()


def squared(output: Tensor, target: Tensor) -> Tensor:
    return (output[:, 0] - target).square()


def test_a_loss_of_ones_own_and_a_trainer_of_many_widths() -> None:
    plain = Gradient(Decaying(0.05), Sgd(), batch_size=6)
    found = try_train(plain, net(), X, X[:, 0], loss=squared)
    assert float(found.report["loss"]) > 0
    widths = Fjord(plain, (0.5, 1.0))
    assert all(value.isfinite().all() for value in try_train(widths, net(), X, Y).params.values())
    with pytest.raises(ValueError, match="the targets of this task are none"):
        try_train(widths, net(), X, X[:, 0], loss=squared)


def test_a_trainer_that_breaks_its_word_is_refused() -> None:
    @dataclass(frozen=True)
    class Forgetful(Gradient):
        def finish(self, context: Any, state: Any) -> Any:
            found = super().finish(context, state)
            return found._replace(params={})

    part = Forgetful(Decaying(0.1), Sgd())
    with pytest.raises(BadReturn, match=r"train=.*Forgetful"):
        try_train(part, net(), X, Y)
    with pytest.raises(ValueError, match="12 samples and 3 targets"):
        try_train(Gradient(Decaying(0.1), Sgd()), net(), X, Y[:3])
