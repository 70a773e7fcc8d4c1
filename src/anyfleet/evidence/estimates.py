"""Estimates: about how much computing an item takes, before anything of it is run.

It is counted as if every device that is asked trained the whole network, from what recipes say
and from the published sizes of data sets: without data, and without tracing a network. Narrow
sub-models take less, the measuring of Fisher information more.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from math import prod
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from anyfleet.core.local_training import local_steps, samples_processed
from anyfleet.core.slots import Select
from anyfleet.evidence.items import Item
from anyfleet.evidence.tuning import trials_of
from anyfleet.experiment import Experiment
from anyfleet.names import Factory
from anyfleet.parts.select import Everyone
from anyfleet.tasks.digits import DOMAINS
from anyfleet.tasks.specs import (
    Cifar10,
    DigitsFive,
    FashionMnist,
    Har,
    Mnist,
    Shakespeare,
    Synthetic,
)

CORE = 20e9  # FLOP that one core of a server carries out in a second, with a network of some size
_BACKWARD = 2  # times the forward pass
_VOCABULARY = 80  # characters, about
# Training and test samples of whole data sets, and the shape of a sample.
_SIZES: Mapping[type, tuple[int, int]] = MappingProxyType(
    {
        Mnist: (60_000, 10_000),
        FashionMnist: (60_000, 10_000),
        Cifar10: (50_000, 10_000),
        Har: (7_100, 2_900),
        DigitsFive: (7_430, 2_000),  # of each domain
        Shakespeare: (100_000, 0),
    }
)
_SHAPES: Mapping[type, tuple[int, ...]] = MappingProxyType(
    {
        Mnist: (1, 28, 28),
        FashionMnist: (1, 28, 28),
        Cifar10: (3, 32, 32),
        Har: (6, 128),
        DigitsFive: (3, 28, 28),
    }
)


def flops_of(item: Item, experiments: Iterable[Experiment]) -> float | None:
    """Return the FLOP of all runs of an item, about; None if a task has no known size.

    `experiments` are its own, equal ones once.
    """
    runs = item.seeds
    if item.tuning:
        runs += item.tuning["length"] * trials_of(item)
    found = [run_flops(experiment) for experiment in experiments]
    return None if None in found else runs * sum(each for each in found if each is not None)


def core_hours(flops: float | None) -> str:
    """Return about how long an amount of computing takes one core, in words; "–": not known."""
    if flops is None:
        return "–"
    hours = flops / CORE / 3600
    return f"{float(f'{hours:.2g}'):,g} h" if hours >= 1 else f"{max(1, round(60 * hours))} min"


def run_flops(experiment: Experiment) -> float | None:
    """Return the FLOP of one run, about: training and tests; None if its size is not known."""
    size = _sizes(experiment.task)
    if size is None:
        return None
    samples, devices, test = size
    forward = forward_flops(_network(experiment.task), _shape(experiment.task))
    train, asked = experiment.method.train, _asked(experiment.method.select, devices)
    own = train.hyperparameters(0, np.array([samples]))
    (steps,) = local_steps(own, [samples])
    used = samples_processed(steps, samples, int(own.batch_size[0]))
    passes = 1 + getattr(train, "samples", 0)  # of nested models, and of the whole one
    every = experiment.evaluate_every
    evaluations = experiment.rounds / every if isinstance(every, int) else 20
    trained = experiment.rounds * asked * used * passes * (1 + _BACKWARD)
    return forward * (trained + evaluations * test * len(experiment.widths))


def _sizes(task: Any) -> tuple[int, int, int] | None:
    """Return the training samples of a device, the devices and the test samples of a task."""
    if isinstance(task, Synthetic):
        kept = int(task.data.samples * (1 - task.test_share))
        test = task.data.devices * (task.data.samples - kept)
        return kept, task.data.devices, test
    if type(task) not in _SIZES:
        return None
    train, test = (min(size, task.limit or size) for size in _SIZES[type(task)])
    if isinstance(task, DigitsFive):
        train *= len(DOMAINS) if "all" in task.trained else len(task.trained)
    given = getattr(task.partition, "samples", None)
    shared = getattr(task.partition, "share", 1.0) * (train - task.server) / task.devices
    samples = max(1, int((given or shared) * (1 - task.test_share)))
    return samples, task.devices, test or int(train * task.test_share)


def _shape(task: Any) -> tuple[int, ...]:
    if isinstance(task, Synthetic):
        return (60,)
    return (task.length,) if isinstance(task, Shakespeare) else _SHAPES[type(task)]


def _network(task: Any) -> Factory:
    if not isinstance(task, Shakespeare):
        return Factory(task.model.use, task.model.options)
    sizes = {"vocabulary": _VOCABULARY, "length": task.length}
    return Factory(task.model.use, {**task.model.options, **sizes})


def _asked(select: Select, devices: int) -> int:
    """Return how many devices train in a round."""
    if isinstance(select, Everyone):
        return devices
    counts = getattr(select, "counts", ()) or ()
    drawn = getattr(select, "draw", None) or getattr(select, "count", None) or sum(counts)
    return min(int(drawn or devices), devices)


# --- networks -------------------------------------------------------------------------------------

_CONVOLUTIONS = (functional.conv1d, functional.conv2d)
# What changes numbers alone, which nobody looks at here; attention adds little to its layers.
_IDLE = (
    functional.batch_norm,
    functional.dropout,
    functional.scaled_dot_product_attention,
    torch.relu,
    Tensor.uniform_,
)


class _Counting(TorchFunctionMode):
    """Counts the FLOP of linear layers and convolutions, a multiply-add as two.

    It computes nothing of them: their results have the right shapes, and are zero. Parameters are
    not initialised.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _IDLE:
            return args[0]
        if func is not functional.linear and func not in _CONVOLUTIONS:
            return func(*args, **(kwargs or {}))
        weight = args[1]
        wide = (*args[0].shape[:-1], weight.shape[0])
        shape = _convolved(args[0], weight, *args[3:5]) if func in _CONVOLUTIONS else wide
        self.flops += 2 * prod(shape) * prod(weight.shape[1:])
        return torch.zeros(()).expand(shape)


def _convolved(
    batch: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int]
) -> tuple[int, ...]:
    """Return the shape of the result of a convolution."""
    sides = zip(batch.shape[2:], weight.shape[2:], stride, padding, strict=True)
    kept = ((size + 2 * pad - kernel) // step + 1 for size, kernel, step, pad in sides)
    return (batch.shape[0], weight.shape[0], *kept)


@lru_cache(maxsize=64)
def forward_flops(network: Factory, shape: tuple[int, ...]) -> float:
    """Return the FLOP of one sample's forward pass: those of linear layers and convolutions."""
    text = len(shape) == 1 and "Transformer" in network.use
    sample = torch.zeros((1, *shape), dtype=torch.int64 if text else torch.float32)
    counting = _Counting()
    with torch.no_grad(), counting:
        network.make()(sample)
    return float(counting.flops)
