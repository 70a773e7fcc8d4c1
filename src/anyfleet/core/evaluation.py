"""Losses and metrics of a model: on the server or on a device, whole or at some width."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from anyfleet import rng
from anyfleet.arrays import Floats, Ints
from anyfleet.core.messages import Params
from anyfleet.core.objectives import Data, Task, losses, scores
from anyfleet.core.slots import Norm
from anyfleet.elastic import COLLECT, EVALUATE_BATCH, WHOLE, Blueprint, Mode, Slice, apply, cut

EVALUATION_BATCH = 256  # large enough for batch statistics; see specification §C, notes
SERVER_LOSS_SAMPLES = 128  # that one server loss is measured on (specification §1.18)


@dataclass(frozen=True, eq=False)
class TestedModel:
    """The whole model or a sub-model, as it meets test data."""

    blueprint: Blueprint
    params: Params
    buffers: Params
    mode: Mode


def evaluate(
    task: Task, params: Params, buffers: Params, *, norm: Norm, slice_: Slice | None = None
) -> dict[str, float]:
    """Return loss and metrics of the whole model, or of a slice of it, on the task's test set."""
    return score(task, to_test(task, params, buffers, norm=norm, slice_=slice_))


def score(task: Task, model: TestedModel) -> dict[str, float]:
    """Return loss and metrics of a model on the task's test set."""
    return measure(task, model.blueprint, model.params, model.buffers, task.test, model.mode)


def to_test(
    task: Task, params: Params, buffers: Params, *, norm: Norm, slice_: Slice | None = None
) -> TestedModel:
    """Return the server's model or a slice of it, with the normalisation that belongs to it."""
    slice_ = slice_ or WHOLE
    local = task.blueprint.local(slice_)
    small = cut(served(params, task.blueprint, norm, slice_), slice_, task.blueprint)
    statistics = cut(served(buffers, task.blueprint, norm, slice_), slice_, task.blueprint)
    if norm.calibrated and local.norms:
        statistics |= calibrate(local, small, statistics, _pool(task))
    # Where normalisation never leaves the devices, the server has no statistics to test with.
    mode = EVALUATE_BATCH if norm.stays(local) else norm.evaluation
    return TestedModel(local, small, statistics, mode)


def served(tree: Params, blueprint: Blueprint, norm: Norm, slice_: Slice) -> dict[str, Tensor]:
    """Return the tree with the normalisation that the server keeps for this width."""
    suffix = "@" + norm.variant(blueprint, slice_)
    return {name: tree.get(name + suffix, value) for name, value in tree.items() if "@" not in name}


@torch.no_grad()
def measure(
    task: Task, blueprint: Blueprint, params: Params, buffers: Params, data: Data, mode: Mode
) -> dict[str, float]:
    """Return the mean loss and metrics over the samples of `data`; NaN without samples."""
    totals = dict.fromkeys(("loss", *task.metrics), 0.0)
    for x, y in batches(data):
        output, _ = apply(blueprint, params, buffers, x, mode)
        values = {"loss": losses(task, output, y)}
        values |= {name: scores(task, name, output, y) for name in task.metrics}
        for name, value in values.items():
            totals[name] += float(value.double().sum())
    count = len(data)
    return {name: total / count if count else float("nan") for name, total in totals.items()}


@torch.no_grad()
def sample_scores(task: Task, model: TestedModel, data: Data, metric: str) -> Floats:
    """Return a metric of every sample, in the order of the data.

    Batches are those that `measure` makes.
    """
    found = np.empty(len(data))
    for rows in _rows(data, EVALUATION_BATCH):
        output, _ = apply(model.blueprint, model.params, model.buffers, data.x[rows], model.mode)
        values = scores(task, metric, output, data.y[rows])
        found[rows.cpu().numpy()] = values.double().cpu().numpy()
    return found


@torch.no_grad()
def calibrate(
    blueprint: Blueprint, params: Params, buffers: Params, data: Data
) -> dict[str, Tensor]:
    """Return normalisation statistics of one pass over data; {} if there is nothing to measure.

    They are the plain mean over batches, of their means and of their unbiased variances
    (specification §1.5 d).
    """
    names = [n for site in blueprint.norms for n in (site.mean, site.variance) if n is not None]
    totals = {name: torch.zeros_like(buffers[name]) for name in names}
    if not names or not len(data):
        return {}
    count = 0
    for x, _ in batches(data):
        _, seen = apply(blueprint, params, buffers, x, COLLECT)
        for name in names:
            totals[name] += seen[name]
        count += 1
    return {name: total / count for name, total in totals.items()}


def batches(data: Data, size: int = EVALUATION_BATCH) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches (x, y) of at most `size`, shuffled in a fixed way and of nearly equal length.

    They are shuffled and equal because batch statistics come from the batch: a sorted test set or a
    last batch of one sample would be normalised with the wrong ones.
    """
    for rows in _rows(data, size):
        yield data.x[rows], data.y[rows]


def _rows(data: Data, size: int) -> Iterator[Tensor]:
    """Yield the rows of each batch."""
    everything = torch.ones(len(data), dtype=torch.bool)
    order = rng.permutation(rng.root(0, "evaluate"), everything).to(data.x.device)
    for rows in torch.tensor_split(order, max(1, -(-len(data) // size))):
        if len(rows):
            yield rows


def server_loss(task: Task, params: Params, buffers: Params, norm: Norm, key: Tensor) -> float:
    """Return the loss of the whole model on some of the server's samples, which `key` draws."""
    size = len(task.server)
    rows = rng.sample(key, size, min(SERVER_LOSS_SAMPLES, size))
    data = _Store(task.server.x[rows], task.server.y[rows])
    shared = served(params, task.blueprint, norm, WHOLE)
    mode = replace(norm.evaluation, statistics="batch") if norm.calibrated else norm.evaluation
    return measure(task, task.blueprint, shared, buffers, data, mode)["loss"]


@lru_cache(maxsize=1)
def _pool(task: Task) -> Data:
    """Return the training data of all devices together."""
    return _joined([task.data(device) for device in range(task.devices)])


@lru_cache(maxsize=1)
def own_tests(task: Task) -> tuple[Data, Ints]:
    """Return the test data of all devices together, and whose each sample is."""
    owned = [task.own_test(device) for device in range(task.devices)]
    return _joined(owned), np.repeat(np.arange(task.devices), [len(data) for data in owned])


def _joined(owned: Sequence[Data]) -> Data:
    return _Store(torch.cat([data.x for data in owned]), torch.cat([data.y for data in owned]))


class _Store:
    """Samples in memory."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)
