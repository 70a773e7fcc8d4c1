"""Losses and metrics of a model: on the server or on a device, whole or at some width."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from anyfleet import rng
from anyfleet.arrays import Floats, Ints
from anyfleet.core.messages import Params
from anyfleet.core.objectives import Data, Task, losses, scores
from anyfleet.core.padding import unpaddable
from anyfleet.core.slots import Norm
from anyfleet.elastic import (
    COLLECT,
    EVALUATE_BATCH,
    WHOLE,
    Blueprint,
    Mode,
    Slice,
    apply,
    cut,
    mixed_rows,
)

EVALUATION_BATCH = 256  # large enough for batch statistics; see specification §C, notes
LARGE_BATCH = 1024  # on an accelerator, where no sample sees another
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
    return examine(task, [model], task.test).means()[0]


def to_test(
    task: Task, params: Params, buffers: Params, *, norm: Norm, slice_: Slice | None = None
) -> TestedModel:
    """Return the server's model or a slice of it, with the normalisation that belongs to it."""
    return to_test_each(task, params, buffers, norm=norm, slices=[slice_ or WHOLE])[0]


def to_test_each(
    task: Task,
    params: Params,
    buffers: Params,
    *,
    norm: Norm,
    slices: Sequence[Slice],
    workers: int = 1,
) -> list[TestedModel]:
    """Return slices of the server's model, each with the normalisation that belongs to it.

    Statistics that are measured come of one pass over the data for all of them, on a processor in
    so many threads.
    """
    models = [_uncalibrated(task, params, buffers, norm, slice_) for slice_ in slices]
    if not norm.calibrated or not task.blueprint.norms:
        return models
    found = calibrate_each(models, _pool(task), workers)
    return [
        replace(model, buffers={**model.buffers, **statistics})
        for model, statistics in zip(models, found, strict=True)
    ]


def _uncalibrated(
    task: Task, params: Params, buffers: Params, norm: Norm, slice_: Slice
) -> TestedModel:
    """Return a slice of the server's model with the statistics that the server has."""
    local = task.blueprint.local(slice_)
    small = cut(served(params, task.blueprint, norm, slice_), slice_, task.blueprint)
    statistics = cut(served(buffers, task.blueprint, norm, slice_), slice_, task.blueprint)
    # Where normalisation never leaves the devices, the server has no statistics to test with.
    mode = EVALUATE_BATCH if norm.stays(local) else norm.evaluation
    return TestedModel(local, small, statistics, mode)


def served(tree: Params, blueprint: Blueprint, norm: Norm, slice_: Slice) -> dict[str, Tensor]:
    """Return the tree with the normalisation that the server keeps for this width."""
    suffix = "@" + norm.variant(blueprint, slice_)
    return {name: tree.get(name + suffix, value) for name, value in tree.items() if "@" not in name}


@dataclass(frozen=True, eq=False)
class Examination:
    """What models do on data, batch by batch; an accelerator may not have computed it yet.

    Nothing is fetched from it before one of the two functions is called.
    """

    models: int  # how many
    names: tuple[str, ...]  # of what is measured: the loss and the metrics
    rows: tuple[Tensor, ...]  # of the data, in each batch
    totals: tuple[Tensor, ...]  # over each batch: float64 [models, names]
    kept: tuple[Tensor, ...]  # of each batch: float64 [models, samples]; empty if nothing is kept

    def means(self) -> list[dict[str, float]]:
        """Return the mean loss and metrics of every model; NaN without samples."""
        count, sums = sum(map(len, self.rows)), np.zeros((self.models, len(self.names)))
        if count:
            for total in torch.stack(self.totals).cpu().numpy():  # batch after batch, as ever
                sums += total
        means = sums / count if count else np.full_like(sums, np.nan)
        return [dict(zip(self.names, row, strict=True)) for row in means.tolist()]

    def samples(self) -> Floats:
        """Return the metric that was kept of every sample, in the order of the data: [models, …].

        Without a metric, or without data, there are none.
        """
        if not self.kept:
            return np.empty((self.models, 0))
        found = torch.cat(self.kept, dim=1).cpu().numpy()
        ordered = np.empty_like(found)
        ordered[:, torch.cat(self.rows).cpu().numpy()] = found
        return ordered


def examine(
    task: Task,
    models: Sequence[TestedModel],
    data: Data,
    *,
    keep: str = "",
    workers: int = 1,
) -> Examination:
    """Measure models on data; `keep` names a metric whose value for every sample is kept.

    A batch is read once for all models. Nothing here waits for an accelerator. On a processor
    batches are shared out among so many threads (`workers`), with the same results.
    """
    names = ("loss", *task.metrics)

    def on_batch(rows: Tensor) -> tuple[Tensor, Tensor | None]:
        x, y = data.x[rows], data.y[rows]
        found = [_per_sample(task, model, x, y) for model in models]
        totals = torch.stack([torch.stack([v.sum() for v in each.values()]) for each in found])
        return totals, torch.stack([each[keep] for each in found]) if keep else None

    rows = _rows(len(data), _batch_size(task, models, data), data.x.device)
    results = _map(on_batch, rows, workers)
    kept = tuple(values for _, values in results if values is not None)
    return Examination(len(models), names, rows, tuple(total for total, _ in results), kept)


def _per_sample(task: Task, model: TestedModel, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Return loss and metrics of every sample in double precision."""
    output, _ = apply(model.blueprint, model.params, model.buffers, x, model.mode)
    found = {"loss": losses(task, output, y)}
    found |= {name: scores(task, name, output, y) for name in task.metrics}
    return {name: values.double() for name, values in found.items()}


def measure(
    task: Task, blueprint: Blueprint, params: Params, buffers: Params, data: Data, mode: Mode
) -> dict[str, float]:
    """Return the mean loss and metrics over the samples of `data`; NaN without samples."""
    return examine(task, [TestedModel(blueprint, params, buffers, mode)], data).means()[0]


def calibrate(
    blueprint: Blueprint, params: Params, buffers: Params, data: Data
) -> dict[str, Tensor]:
    """Return normalisation statistics of one pass over data; {} if there is nothing to measure.

    They are the plain mean over batches, of their means and of their unbiased variances
    (specification §1.5 d).
    """
    return calibrate_each([TestedModel(blueprint, params, buffers, COLLECT)], data)[0]


def calibrate_each(
    models: Sequence[TestedModel], data: Data, workers: int = 1
) -> list[dict[str, Tensor]]:
    """Return normalisation statistics of several models, as `calibrate` does, of the same pass."""
    names = [_statistics(model.blueprint) for model in models]
    if not any(names) or not len(data):
        return [{} for _ in models]

    def on_batch(rows: Tensor) -> list[dict[str, Tensor]]:
        x = data.x[rows]
        seen = [apply(each.blueprint, each.params, each.buffers, x, COLLECT)[1] for each in models]
        return [{n: one[n] for n in some} for one, some in zip(seen, names, strict=True)]

    rows = _rows(len(data), EVALUATION_BATCH, data.x.device)
    totals = [
        {n: torch.zeros_like(model.buffers[n]) for n in some}
        for model, some in zip(models, names, strict=True)
    ]
    for found in _map(on_batch, rows, workers):
        for total, seen in zip(totals, found, strict=True):
            for name, value in seen.items():
                total[name] += value
    return [{name: value / len(rows) for name, value in total.items()} for total in totals]


def _statistics(blueprint: Blueprint) -> list[str]:
    """Return the names of the running statistics of all batch normalisations."""
    return [n for site in blueprint.norms for n in (site.mean, site.variance) if n is not None]


def batches(data: Data, size: int = EVALUATION_BATCH) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches (x, y) of at most `size`, shuffled in a fixed way and of nearly equal length.

    They are shuffled and equal because batch statistics come from the batch: a sorted test set or a
    last batch of one sample would be normalised with the wrong ones.
    """
    for rows in _rows(len(data), size, data.x.device):
        yield data.x[rows], data.y[rows]


@lru_cache(maxsize=256)
def _rows(count: int, size: int, where: torch.device) -> tuple[Tensor, ...]:
    """Return the rows of each batch of so many samples."""
    if not count:
        return ()
    everything = torch.ones(count, dtype=torch.bool)
    order = rng.permutation(rng.root(0, "evaluate"), everything).to(where)
    return torch.tensor_split(order, -(-count // size))


def _batch_size(task: Task, models: Sequence[TestedModel], data: Data) -> int:
    """Return how many samples go through models at once.

    A processor gains nothing by larger batches. An accelerator does, where samples stay apart.
    """
    if data.x.device.type == "cpu" or unpaddable(task):
        return EVALUATION_BATCH
    return LARGE_BATCH if all(map(_stay_apart, models)) else EVALUATION_BATCH


def _stay_apart(model: TestedModel) -> bool:
    """Return whether what a model makes of a sample depends on no other sample, nor on a draw."""
    blueprint = model.blueprint
    by_batch = model.mode.statistics == "batch"
    normalised = any(by_batch or site.mean is None for site in blueprint.norms)
    return not normalised and not _drawn_or_mixed(blueprint)


def _drawn_or_mixed(blueprint: Blueprint) -> bool:
    """Return whether a model draws in a test, or samples meet elsewhere than in statistics."""
    drawn = any(node.always for node in blueprint.evaluated.nodes)
    return drawn or bool(mixed_rows(blueprint, evaluating=True))


_Result = TypeVar("_Result")


def _map(
    function: Callable[[Tensor], _Result], rows: Sequence[Tensor], workers: int
) -> list[_Result]:
    """Return what a function that needs no gradients makes of every batch, in their order.

    Threads are for a processor alone: each has a stream of an accelerator of its own, on which
    models may not be ready yet, and from which nobody would wait for results.
    """
    if any(some.device.type != "cpu" for some in rows):
        workers = 1

    def plainly(some: Tensor) -> _Result:
        with torch.no_grad():  # a thread has a switch of its own
            return function(some)

    workers = min(workers, len(rows))
    if workers < 2:
        return [plainly(some) for some in rows]
    # One thread each inside an operator: a new thread would take all cores.
    threads = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,))
    with threads as pool:
        return list(pool.map(plainly, rows))


# --- many devices, each with its own model and data ----------------------------------------------


class _Batch(NamedTuple):
    """One batch of each of some devices, padded to the largest of them."""

    devices: Tensor  # who have such a batch: places in the stack
    x: Tensor  # [devices, samples, …]
    y: Tensor  # of the samples that are not padding, one device after the other
    valid: Tensor  # bool [devices, samples]
    places: Tensor  # of `y` among all samples of `x`


def stackable(task: Task, blueprint: Blueprint) -> bool:
    """Return whether devices can be measured as one stack, whose batches are padded."""
    return not unpaddable(task) and not _drawn_or_mixed(blueprint)


@torch.no_grad()
def measure_stack(
    task: Task,
    blueprint: Blueprint,
    params: Params,
    buffers: Params,
    data: Sequence[Data],
    mode: Mode,
) -> dict[str, Floats]:
    """Return what `measure` returns, for devices whose models are stacked: [devices].

    Their batches are the same; losses differ in the last bits.
    """
    names = ("loss", *task.metrics)
    where = data[0].x.device
    totals = torch.zeros(len(names), len(data), dtype=torch.float64, device=where)
    for batch in _padded_batches(data):
        outputs, _ = _apply_stack(blueprint, params, buffers, batch, mode)
        output = outputs.flatten(0, 1)[batch.places]
        values = [losses(task, output, batch.y)]
        values += [scores(task, name, output, batch.y) for name in task.metrics]
        spread = totals.new_zeros(len(names), batch.valid.numel())
        spread[:, batch.places] = torch.stack([each.double() for each in values])
        totals[:, batch.devices] += spread.view(len(names), *batch.valid.shape).sum(-1)
    counts = np.array([len(each) for each in data], dtype=np.float64)
    counts[counts == 0] = np.nan
    return dict(zip(names, totals.cpu().numpy() / counts, strict=True))


@torch.no_grad()
def calibrate_stack(
    blueprint: Blueprint, params: Params, buffers: Params, data: Sequence[Data]
) -> dict[str, Tensor]:
    """Return what `calibrate` returns, for devices whose models are stacked: [devices, …].

    A device without data keeps the statistics it has.
    """
    names = _statistics(blueprint)
    totals = {name: torch.zeros_like(buffers[name]) for name in names}
    if not names:
        return {}
    for batch in _padded_batches(data):
        _, seen = _apply_stack(blueprint, params, buffers, batch, COLLECT)
        for name in names:
            totals[name][batch.devices] += seen[name]
    counts = np.array([-(-len(each) // EVALUATION_BATCH) for each in data])
    divisor = torch.from_numpy(np.maximum(counts, 1))
    for device in np.flatnonzero(counts == 0).tolist():
        for name in names:
            totals[name][device] = buffers[name][device]
    return {n: v / divisor.to(v).view(-1, *[1] * (v.ndim - 1)) for n, v in totals.items()}


def _apply_stack(
    blueprint: Blueprint, params: Params, buffers: Params, batch: _Batch, mode: Mode
) -> tuple[Tensor, dict[str, Tensor]]:
    """Run the models of the devices of a batch, and return outputs and buffers, stacked."""

    def alone(
        params: Params, buffers: Params, x: Tensor, valid: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return apply(blueprint, params, buffers, x, mode, valid=valid)

    def some(tree: Params) -> Params:
        everyone = all(len(batch.devices) == len(value) for value in tree.values())
        return tree if everyone else {n: value[batch.devices] for n, value in tree.items()}

    found: tuple[Tensor, dict[str, Tensor]] = torch.func.vmap(alone)(
        some(params), some(buffers), batch.x, batch.valid
    )
    return found


def _padded_batches(data: Sequence[Data]) -> Iterator[_Batch]:
    """Yield the first batch of every device, then the second of those that have one, and so on."""
    stored = [_Store(each.x, each.y) for each in data]
    owned = [_rows(len(each), EVALUATION_BATCH, each.x.device) for each in stored]
    for number in range(max(map(len, owned), default=0)):
        devices = [device for device, rows in enumerate(owned) if len(rows) > number]
        rows = [owned[device][number] for device in devices]
        where, most = rows[0].device, max(map(len, rows))
        # Padding repeats a row of the device: zeros may be no valid sample.
        padded = [torch.cat([each, each[:1].expand(most - len(each))]) for each in rows]
        pairs = list(zip(devices, rows, padded, strict=True))
        lengths = torch.tensor([len(each) for each in rows])
        valid = torch.arange(most) < lengths[:, None]
        yield _Batch(
            torch.tensor(devices).to(where),
            torch.stack([stored[device].x[whole] for device, _, whole in pairs]),
            torch.cat([stored[device].y[some] for device, some, _ in pairs]),
            valid.to(where),
            valid.flatten().nonzero().squeeze(1).to(where),
        )


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
