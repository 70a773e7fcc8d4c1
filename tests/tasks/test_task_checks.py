"""What a user hands in at the front door: targets of any meaning, and all that can be wrong."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from anyfleet import Experiment, methods, play
from anyfleet.errors import AnyfleetWarning, Refusal
from anyfleet.tasks import ByOwner, Data, Flip, Given, Split, Task, accuracy, squared_error, zoo
from anyfleet.tasks.losses import Objective
from tests.tasks.test_task import SPLIT, flat, net

# --- what targets are -------------------------------------------------------------------------


class Squeezed(nn.Module):
    """One logit per sample, as [B]."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net(1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x).squeeze(-1)
        return out


def yes_or_no(output: Tensor, target: Tensor) -> Tensor:
    losses = functional.binary_cross_entropy_with_logits(
        output, target.reshape(output.shape).to(output.dtype), reduction="none"
    )
    return losses.reshape(len(losses), -1).mean(1)


def counts(output: Tensor, target: Tensor) -> Tensor:
    return functional.poisson_nll_loss(output, target.reshape(output.shape), reduction="none")[:, 0]


@pytest.mark.parametrize(
    ("module", "targets", "loss"),
    [
        (Squeezed(), torch.arange(88) % 2, yes_or_no),
        (net(1), torch.arange(88) % 2, yes_or_no),
        (net(5), torch.arange(88 * 5).reshape(88, 5) % 2, yes_or_no),
        (net(1), torch.arange(88), counts),
        (net(1), torch.arange(88)[:, None], counts),
        (net(1), torch.arange(88), squared_error),
        (net(2), torch.randn(88, 2), squared_error),
    ],
    ids=["logit", "logit [B, 1]", "labels", "counts", "counts [B, 1]", "whole numbers", "numbers"],
)
def test_targets_that_are_no_classes(module: nn.Module, targets: Tensor, loss: Objective) -> None:
    task = Task.of(module, Data(flat().x, targets), split=SPLIT, loss=loss)
    assert task.metrics == {}
    assert not task.classified
    assert task.labels(0).tolist() == [True] * task.classes


@pytest.mark.parametrize("outputs", [1, 5])
def test_heterofl_trains_like_fedavg_where_there_are_no_classes(outputs: int) -> None:
    targets = (flat().x[:, :outputs] > 2.0).long()  # most devices see zeros only
    task = Task.of(net(outputs), Data(flat().x, targets), split=SPLIT, loss=yes_or_no)
    whole = methods.heterofl(widths=(1.0,), count=4, lr=0.1, static_norm=False, scaler=False)
    plain = replace(methods.fedavg(count=4, lr=0.1), norm=whole.norm)
    (one,), (other,) = (play(Experiment(task, m, rounds=1)) for m in (whole, plain))
    for name, value in one.round.params.items():
        assert torch.equal(value, other.round.params[name]), name


def test_classes_on_another_axis_are_not_looked_for() -> None:
    images = torch.randn(40, 1, 8, 8)
    net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 1))

    def per_pixel(output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output, target, reduction="none").mean((1, 2))

    data = Data(images, (images[:, 0] > 0).long())
    task = Task.of(net, data, split=Split(4), loss=per_pixel)
    assert task.metrics == {}
    assert task.labels(0).tolist() == [True] * 8
    with pytest.raises(ValueError, match=r"of shape \[n, 3, 8\].*or give a loss"):
        Task.of(net, data, split=Split(4))


def test_a_loss_of_ones_own_may_leave_targets_out() -> None:
    tokens = torch.arange(40 * 8).reshape(40, 8) % 7
    targets = tokens.clamp(max=5).clone()
    targets[:, 4:] = -100
    net = zoo.Transformer(7, layers=1, width=8, heads=2, hidden=8, length=8)

    def left_out(output: Tensor, target: Tensor) -> Tensor:
        losses = functional.cross_entropy(output.transpose(1, 2), target, reduction="none")
        return losses.mean(1)

    data = Data(tokens, targets)
    assert Task.of(net, data, split=Split(4), loss=left_out).labels(0).tolist() == [True] * 7
    task = Task.of(net, data, split=Split(4), loss=left_out, classified=True)
    assert task.metrics == {}
    assert task.labels(0).tolist() == [True] * 6 + [False]


def test_the_targets_of_the_test_set_are_checked_too() -> None:
    test = Data(torch.randn(4, 6), torch.tensor([0, 1, 2, 3]))
    with pytest.raises(ValueError, match="from 0 to 3"):
        Task.of(net(), flat(), test, split=SPLIT)


def test_cross_entropy_wants_classes() -> None:
    numbers = Data(flat().x, torch.randn(88))
    with pytest.raises(ValueError, match=r"got torch\.float32 of shape \[n\]"):
        Task.of(net(), numbers, split=SPLIT)
    column = Data(flat().x, flat().y[:, None])
    with pytest.raises(ValueError, match=r"of shape \[n\] for outputs of shape \[n, 3\]"):
        Task.of(net(), column, split=SPLIT)


# --- the front door ---------------------------------------------------------------------------


def test_augmentation_and_name_are_taken() -> None:
    task = Task.of(net(), flat(), split=SPLIT, augment=Flip(), name="mine")
    assert (task.augment, task.name) == (Flip(), "mine")
    assert Task.of(net(), flat(), split=SPLIT).name == "Sequential"


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="Flatten has no parameters"):
        Task.of(nn.Flatten(), flat(), split=SPLIT)


def test_lazy_layers_must_be_initialised() -> None:
    lazy = nn.Sequential(nn.LazyLinear(5), nn.ReLU(), nn.Linear(5, 3))
    with pytest.raises(ValueError, match=r"0\.weight, 0\.bias.*call the module once"):
        Task.of(lazy, flat(), split=SPLIT)
    lazy(flat().x)
    assert Task.of(lazy, flat(), split=SPLIT).blueprint.shape("0.weight") == (5, 6)


def test_inputs_of_another_precision_are_refused_with_a_way_out() -> None:
    data = Data(flat().x.double(), flat().y)
    with pytest.raises(ValueError, match=r"float64, but the model is torch\.float32.*task\.to"):
        Task.of(net(), data, split=SPLIT)


def test_a_model_that_cannot_take_the_inputs_is_refused() -> None:
    class Two(nn.Linear):
        def forward(self, x: Tensor, other: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x + other)

    with pytest.raises(ValueError, match=r"'other'.*one tensor"):
        Task.of(Two(6, 3), TensorDataset(flat().x, flat().x, flat().y), split=SPLIT)
    with pytest.raises(ValueError, match=r"inputs of shape \[2, 6\]"):
        Task.of(nn.Linear(7, 3), flat(), split=SPLIT)


def test_a_loss_that_fails_is_named() -> None:
    with pytest.raises(ValueError, match=r"loss fails on outputs of shape \[2, 3\]"):
        Task.of(net(), flat(), split=SPLIT, loss=squared_error)


def test_names_under_which_a_metric_could_not_be_found_are_refused_together() -> None:
    """`loss` would replace the task's own, and what follows "@" is read as a width."""
    named: Any = {"loss": accuracy, "hits@2": accuracy, 3: accuracy, " ": accuracy}
    with pytest.raises(Refusal) as refused:
        Task.of(net(), flat(), split=SPLIT, metrics={**named, "test_loss": accuracy})
    texts = refused.value.problems
    assert len(texts) == len(named)
    told = ('called "loss"', "'hits_at_2'", "names of metrics must be text, got 3", "empty name")
    assert all(words in text for words, text in zip(told, texts, strict=True))


def test_a_task_says_briefly_what_it_is() -> None:
    task = Task.of(net(), flat(), split=SPLIT, name="mine")
    assert repr(task) == f"Task('mine', devices=4, parameters={6 * 5 + 5 + 10 + 15 + 3})"


# --- numbers that are none --------------------------------------------------------------------


def spoilt(
    place: tuple[int | slice, ...], value: float = math.nan, data: Data | None = None
) -> Data:
    found = flat() if data is None else data
    x = found.x.clone()
    x[place] = value
    return Data(x, found.y)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_data_that_are_not_finite_are_named_when_the_task_is_built(value: float) -> None:
    rows = tuple(tuple(range(start, start + 22)) for start in range(0, 88, 22))
    split = Split(4, Given(rows), test_share=0.25)
    data = spoilt((87, 1), value, spoilt((66, 0), value, spoilt((45, 5), value)))
    with pytest.raises(Refusal) as told:
        Task.of(net(), data, split=split)
    one, three = told.value.problems
    expected = "with a number that is infinite or NaN, first in the input of row"
    assert one.startswith(f"Task: device 2 has 1 of 22 samples {expected} 45. Leave such")
    assert three.startswith(f"Task: device 3 has 2 of 22 samples {expected} 66. Leave such")


def test_targets_the_server_and_the_test_set_are_looked_at_too() -> None:
    x = flat().x
    y = torch.arange(88.0)
    y[10:12] = math.nan
    split = Split(1, test_share=0.25)
    with pytest.raises(ValueError, match=r"device 0 has 2 of 88 .* in the target of row 10"):
        Task.of(net(1), Data(x, y), split=split, loss=squared_error)
    with pytest.raises(ValueError, match=r"the test set has 1 of 88 .* in the input of its row 3"):
        Task.of(net(), flat(), spoilt((3, 0)), split=split)
    bad = spoilt((slice(None), 2))
    with pytest.raises(ValueError, match=r"the server has 8 of 8 samples .* of its row 0"):
        Task.of(net(), bad, split=SPLIT)


def test_of_many_devices_some_are_named_and_the_others_counted() -> None:
    with pytest.raises(Refusal) as told:
        Task.of(net(), spoilt((slice(None), 2)), flat(), split=Split(8))
    assert len(told.value.problems) == 6
    assert told.value.problems[-1] == "Task: 3 more devices have such samples."


def test_rows_that_nobody_has_may_be_anything() -> None:
    rows = (tuple(range(40)), tuple(range(40, 80)))
    assert Task.of(net(), spoilt((85, 0)), split=Split(2, Given(rows))).devices == 2


def test_empty_training_and_test_sets_say_so() -> None:
    nothing = Data(torch.zeros(0, 6), torch.zeros(0, dtype=torch.int64))
    with pytest.raises(ValueError, match="The training data set is empty"):
        Task.of(net(), nothing, split=SPLIT)
    with pytest.raises(ValueError, match="The test data set is empty"):
        Task.of(net(), flat(), nothing, split=SPLIT)


def test_a_task_knows_whose_data_each_device_has() -> None:
    data = flat()
    owners = torch.arange(88) // 22
    named = Data(data.x, data.y, owners, ("ada", "bob", "eve", "zoe"))
    assert Task.of(net(), named, split=Split(4, ByOwner())).owners == named.names
    numbered = Data(data.x, data.y, owners + 7)
    assert Task.of(net(), numbered, split=Split(4, ByOwner())).owners == ("7", "8", "9", "10")
    assert Task.of(net(), data, split=SPLIT).owners == ("",) * 4
    with pytest.warns(AnyfleetWarning, match="ByOwner"):
        assert Task.of(net(), named, split=SPLIT).owners == ("",) * 4


def test_a_loss_that_is_not_finite_is_refused_before_anybody_trains() -> None:
    def logarithm(output: Tensor, target: Tensor) -> Tensor:
        return (output.detach() * 0).sum(-1).log() + target

    with pytest.raises(ValueError, match=r"loss gives \[-inf, -inf\] for the first samples"):
        Task.of(net(), flat(), split=SPLIT, loss=logarithm)


def test_what_devices_do_not_do_while_they_train_is_said() -> None:
    class Counting(nn.Module):
        seen: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.inner = net()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.seen.add_(1.0)
            out: Tensor = self.inner(x)
            return out

    with pytest.warns(AnyfleetWarning, match="forward.. itself changes seen"):
        Task.of(Counting(), flat(), split=SPLIT)
