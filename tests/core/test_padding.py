"""Training through the library against a plain loop in PyTorch, with short last minibatches."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from anyfleet.core import local_training as local
from anyfleet.core.client import work
from anyfleet.core.device_state import DeviceState
from anyfleet.core.padding import unpaddable
from anyfleet.elastic import Slice
from anyfleet.measure import fisher
from anyfleet.methods import fedavg
from anyfleet.parts.norm import Tracked
from anyfleet.parts.train import Gradient
from anyfleet.runtime import Sequential, Stacked, Threads
from anyfleet.tasks import Data, Split, Task
from anyfleet.tasks.partition import LogNormalSizes
from tests.core.test_local_training import orders
from tests.helpers import small
from tests.helpers.row_nets import APART, TOGETHER

RATE, BATCH, DEVICES = 0.05, 8, 4
METHOD = replace(fedavg(lr=RATE, batch_size=BATCH, epochs=1), norm=Tracked())
Loss = Callable[[Tensor, Tensor], Tensor]


def entropy(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target, reduction="none")


def contrasted(output: Tensor, target: Tensor) -> Tensor:
    """Every sample against all the others of its minibatch."""
    z = nn.functional.normalize(output, dim=1)
    alike = target[:, None] == target[None]
    return -((z @ z.t() / 0.5).log_softmax(1) * alike).sum(1) / alike.sum(1)


class Standardising(nn.Module):
    """Every sample by its own mean and deviation: one of zeros is NaN, and has a NaN gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(64, 12, bias=False), nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x.flatten(1))
        out: Tensor = self.head((h - h.mean(1, keepdim=True)) / h.std(1, keepdim=True))
        return out


CASES: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    **{
        name: (APART[name], entropy)
        for name in ("standardised weights", "joined images", "time first", "two views, chunk")
    },
    **{
        name: (TOGETHER[name][0], entropy)
        for name in ("centred", "similar", "number", "own running mean")
    },
    "standardised samples": (Standardising, entropy),
    "contrastive loss": (lambda: small.net(dropout=0.0), contrasted),
}
SEEN = {"centred", "similar", "number", "own running mean", "contrastive loss"}


@cache
def built(name: str) -> tuple[nn.Module, Task]:
    make, loss = CASES[name]
    with torch.random.fork_rng():
        torch.manual_seed(4)
        module = make()
    split = Split(devices=DEVICES, partition=LogNormalSizes(), test_share=0.2, seed=5)
    data = small.patterns(150, 1), small.patterns(40, 2)
    task = Task.of(module, *data, split=split, loss=loss, classified=True)
    return module.double(), task.to(torch.float64)


def by_hand(name: str, device: int, key: Tensor) -> dict[str, Tensor]:
    """Parameters and buffers after an epoch of plain steps over the device's minibatches."""
    module, task = built(name)
    module.load_state_dict({**task.params, **task.buffers}, strict=False)
    module.train()
    data = task.data(device)
    numbers = METHOD.train.hyperparameters(0, torch.tensor([len(data)]).numpy())
    bounds = local.extent(numbers, [len(data)])
    everything = torch.ones(len(data), dtype=torch.bool)
    drawn = local._schedule(key, everything, torch.tensor(BATCH), bounds)
    assert not bool(drawn.valid.all())  # the last minibatch is short
    optimiser = torch.optim.SGD(module.parameters(), lr=RATE)
    for rows, valid in zip(drawn.rows, drawn.valid, strict=True):
        own = rows[valid]
        optimiser.zero_grad()
        torch.autograd.backward(task.loss(module(data.x[own]), data.y[own]).mean())
        optimiser.step()
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("name", CASES)
def test_training_is_that_of_a_plain_loop(name: str) -> None:
    task = built(name)[1]
    assert bool(unpaddable(task)) == (name in SEEN)
    sizes = [len(task.data(device)) for device in range(DEVICES)]
    assert len(set(sizes)) > 2
    devices = [d for d, n in enumerate(sizes) if n % BATCH > 1 and n > BATCH][:2]
    asked = orders(METHOD, task, devices)
    together = work(asked, (DeviceState(),) * len(devices), task)
    for row, device in enumerate(devices):
        want = by_hand(name, device, asked.key[row])
        alone = work(asked.take([row]), (DeviceState(),), task)
        for done, at in ((alone, 0), (together, row)):
            trees = done.replies.trees_of(at)
            got = {n: task.params[n] + v for n, v in trees["delta"].items()}
            got |= trees.get("buffers", {})
            assert set(task.params) <= set(got)
            for each, value in got.items():
                torch.testing.assert_close(value, want[each], rtol=1e-8, atol=1e-9, msg=each)


@pytest.mark.parametrize("name", ["time first", "similar", "contrastive loss"])
def test_all_engines_agree(name: str) -> None:
    task = built(name)[1]
    one, two, three = (
        small.steps(METHOD, task, 2, engine=engine)[-1].params
        for engine in (Sequential(), Threads(allow=("tests",)), Stacked())
    )
    assert small.identical(one, two)
    assert small.distance(one, three) < 1e-10


def test_a_loss_that_cannot_be_tried_is_not_padded() -> None:
    def picky(output: Tensor, target: Tensor) -> Tensor:
        if float(output.detach().min()) > 0:
            raise ValueError("outputs must have both signs")
        return entropy(output, target)

    task = built("time first")[1]
    assert not unpaddable(task)
    assert unpaddable(replace(task, loss=picky))
    # Without test data, a device's own targets tell as much.
    nothing = Data(task.test.x[:0], task.test.y[:0])
    assert not unpaddable(replace(task, test=nothing))
    assert unpaddable(replace(task, test=nothing, loss=contrasted))


def test_a_stack_that_cannot_be_padded_is_refused() -> None:
    task = built("centred")[1]
    where = local.training_context(task, METHOD.norm, Slice())
    with pytest.raises(ValueError, match=r"cannot be stacked: mean \(the outermost module\)"):
        local._counts(where, torch.ones(2, 3, 4, dtype=torch.bool))


def test_single_samples_have_no_gradient_where_they_see_each_other() -> None:
    task = built("contrastive loss")[1]
    observed = fisher.Observed(Gradient(), fisher.Fisher())
    assert "samples see each other" in observed.misfit(task)
    assert not replace(observed, fisher=fisher.Fisher(estimate="mean")).misfit(task)
    assert not observed.misfit(built("time first")[1])
