"""Linear models on which trainers can be compared with the formulas, number by number."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from anyfleet.arrays import Floats
from anyfleet.core import local_training as local_training
from anyfleet.core.slots import Minibatch, Train, TrainingContext, TrainingStart, TrainingState
from anyfleet.elastic import Slice
from anyfleet.formulas.reference.distillation import LinearBatch, Moved
from anyfleet.methods import fedavg
from anyfleet.tasks import Data, Split, Task

HIDDEN, CLASSES = 8, 3
ROWS = 6  # samples of a minibatch, one of which is padding
Reference = Callable[[Moved, LinearBatch, tuple[float, ...]], Moved]


def two_columns() -> Task:
    """specification §1.7: one input of 1, a binary logit θ₁ + θ₂ with θ = (0.2, 0.4), label 1."""
    net = nn.Sequential(
        nn.Linear(1, 2, bias=False), nn.Linear(2, 1, bias=False), nn.Linear(1, 2, bias=False)
    )
    for layer, weight in zip(net, ([[1.0], [1.0]], [[0.2, 0.4]], [[0.0], [1.0]]), strict=True):
        layer.weight = nn.Parameter(torch.tensor(weight, dtype=torch.float64))
    for at in (0, 2):
        net[at].weight.requires_grad_(False)
    data = Data(torch.ones(4, 1, dtype=torch.float64), torch.ones(4, dtype=torch.long))
    return Task.of(net, data, data, split=Split(devices=1, test_share=0))


def site(task: Task, train: Train, share: float = 1.0, first: int = 0) -> TrainingContext:
    """Of a device with that share of the width."""
    slice_ = task.blueprint.prefix(share) if share < 1 else Slice()
    method = replace(fedavg(), train=train)
    return local_training.training_context(
        task, method.norm, replace(slice_, first_trained_layer=first), share
    )


def stepped(task: Task, train: Train, choice: tuple[float, ...], lr: float = 0.5) -> TrainingState:
    """The trainer's state after one minibatch of all data of the first device."""
    where = site(task, train)
    state = train.start(where, TrainingStart(task.params, task.buffers, task.labels(0)))
    x, y = task.data(0).x, task.data(0).y
    batch = Minibatch(x, y, torch.ones(len(y), dtype=torch.bool), torch.tensor(0))
    return train.step(where, state, batch, {"lr": torch.tensor(lr, dtype=x.dtype)}, choice)


@dataclass(frozen=True, eq=False)
class Hidden:
    """A frozen layer of eight units, and a trained output layer with a bias."""

    task: Task
    x: Tensor
    y: Tensor

    def theta(self, weight: Tensor, bias: Tensor) -> Floats:
        """The coordinates in the order of the formulas; columns that a device lacks are zero."""
        full = torch.zeros(CLASSES, HIDDEN, dtype=torch.float64)
        full[:, : weight.shape[1]] = weight
        return torch.cat([full.flatten(), bias]).numpy()

    def batch(self, rows: slice) -> LinearBatch:
        """The valid samples of a minibatch: all but its last."""
        inputs = self.x[rows][:-1] @ self.task.params["0.weight"].T
        samples = len(inputs)
        design = torch.zeros(samples, CLASSES, CLASSES * HIDDEN + CLASSES, dtype=torch.float64)
        for c in range(CLASSES):
            design[:, c, c * HIDDEN : (c + 1) * HIDDEN] = inputs
            design[:, c, CLASSES * HIDDEN + c] = 1.0
        # A share p keeps ⌈p × 8⌉ units: unit h is there from shares above h / 8 on.
        first = np.concatenate([np.tile((np.arange(HIDDEN) + 1e-6) / HIDDEN, CLASSES), np.zeros(3)])
        return LinearBatch(design.numpy(), self.y[rows][:-1].numpy(), first)


def hidden() -> Hidden:
    """With data for three minibatches."""
    noise = torch.Generator().manual_seed(4)
    net = nn.Sequential(nn.Linear(5, HIDDEN, bias=False), nn.Linear(HIDDEN, CLASSES))
    net[0].weight.requires_grad_(False)
    for parameter in net.parameters():
        parameter.data = torch.randn(parameter.shape, generator=noise)
    x = torch.randn(3 * ROWS, 5, generator=noise)
    y = torch.randint(0, CLASSES, (3 * ROWS,), generator=noise)
    task = Task.of(net, Data(x, y), Data(x, y), split=Split(devices=1, test_share=0))
    return Hidden(task.to(torch.float64), x.double(), y)


def three_steps(trainer: Train, share: float, lr: float, reference: Reference) -> None:
    """Asserts that a trainer does at a device of that share what the reference does."""
    model = hidden()
    where = site(model.task, trainer, share)
    units = where.blueprint.shape("1.weight")[1]
    params = dict(model.task.params)
    params["0.weight"] = params["0.weight"][:units]
    params["1.weight"] = params["1.weight"][:, :units]
    state = trainer.start(where, TrainingStart(params, {}, model.task.labels(0)))
    start = model.theta(params["1.weight"], params["1.bias"])
    expected = Moved(start, np.zeros_like(start))
    valid = torch.arange(ROWS) < ROWS - 1
    for i, choice in enumerate(trainer.shared_draws(3, torch.tensor(7))):
        rows = slice(i * ROWS, (i + 1) * ROWS)
        batch = Minibatch(model.x[rows], model.y[rows], valid, torch.tensor(i))
        rate = {"lr": torch.tensor(lr, dtype=torch.float64)}
        state = trainer.step(where, state, batch, rate, choice)
        expected = reference(expected, model.batch(rows), choice)
    found = model.theta(state["params"]["1.weight"], state["params"]["1.bias"])
    np.testing.assert_allclose(found, expected.theta, rtol=0, atol=1e-12)
