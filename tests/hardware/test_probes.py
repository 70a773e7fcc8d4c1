"""What planners count of memory, against the tensors that training really holds."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from anyfleet.hardware.probes import weigh
from anyfleet.parts.train import AdamW, Gradient, Sgd
from anyfleet.tasks import Data, Split, Task, zoo

IMAGE, TOKENS = (3, 32, 32), (32,)
NETS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: zoo.perceptron(3 * 32 * 32, hidden=(60, 40)),
    "convolutional": zoo.cnn_cifar,
    "normalised": lambda: zoo.resnet18(widths=(8, 16, 16, 32)),
    "one layer": lambda: zoo.logistic(3 * 32 * 32),
    "transformer": lambda: zoo.Transformer(layers=2, width=32, heads=4, hidden=64),
}
TRAINERS = {
    "sgd": Gradient(),
    "momentum": Gradient(optimiser=Sgd(momentum=0.9)),
    "all of sgd": Gradient(optimiser=Sgd(momentum=0.9, nesterov=True, weight_decay=1e-3)),
    "adamw": Gradient(optimiser=AdamW()),
    "proximal": Gradient(proximal=0.1, clip=1.0),
}


# Planners count new parameters and a temporary tensor in every update; a plain step of SGD writes
# over the parameters that the one before made.
LEAST = {"sgd": 0.55}


def problem(net: str, batch: int) -> Task:
    """Two batches of whatever the network takes, all on one device."""
    torch.manual_seed(0)
    count = 2 * batch
    inputs: Tensor = torch.randn(count, *IMAGE)
    targets = torch.arange(count) % 10
    if net == "transformer":
        inputs = targets = torch.randint(0, 100, (count, *TOKENS))
    data = Data(inputs, targets)
    module = NETS[net]()
    return Task.of(module, data, data, split=Split(devices=1, test_share=0.0))


def ratio(task: Task, batch: int, share: float, depth: float, trainer: Gradient) -> float:
    """Of what is measured to what planners count; `depth` is the part that is not trained."""
    first = int(depth * len(task.blueprint.layers))
    slice_ = replace(task.blueprint.prefix(share), first_trained_layer=first)
    found = weigh("net", task, batch, slice_=slice_, train=trainer)
    return found.measured / found.predicted


@pytest.mark.parametrize("batch", [4, 32])
@pytest.mark.parametrize("net", NETS)
def test_slices_take_what_planners_count(net: str, batch: int) -> None:
    task = problem(net, batch)
    for share, depth in ((1.0, 0.0), (0.5, 0.0), (0.25, 0.0), (1.0, 0.6), (0.5, 0.9)):
        found = ratio(task, batch, share, depth, TRAINERS["sgd"])
        assert LEAST["sgd"] < found < 1.1, (share, depth)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_trainers_take_what_planners_count(trainer: str) -> None:
    for net, batch in (("plain", 4), ("normalised", 16)):
        found = ratio(problem(net, batch), batch, 1.0, 0.0, TRAINERS[trainer])
        assert LEAST.get(trainer, 0.75) < found < 1.1, net


def test_a_device_alone_holds_no_state_twice_but_in_the_update() -> None:
    """Where the model is all there is: as it came, as it was, as it becomes, and its gradient."""
    task = problem("plain", 1)
    model = 4 * task.blueprint.numel()
    assert 4 * model < weigh("net", task, 1).measured < 5.1 * model
