"""Probes: seconds and memory that this machine needs to train real slices.

A probe does what a device does: `client.work` carries out an order of a few local steps, so the
seconds contain what our own code adds to the arithmetic. They are processor seconds on one thread,
of the quickest of some repetitions, so that other work of the machine does not count. On several
threads they are seconds of the clock.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from anyfleet import rng
from anyfleet.core import client
from anyfleet.core.device_state import DeviceState
from anyfleet.core.local_training import samples_processed
from anyfleet.core.messages import Kind
from anyfleet.core.objectives import Task
from anyfleet.core.orders import Cohort
from anyfleet.core.planning import load_models
from anyfleet.core.time_and_energy import Amount, Demand, training
from anyfleet.elastic import WHOLE, Slice, width
from anyfleet.elastic.cost.memory import Live
from anyfleet.methods import fedavg
from anyfleet.names import Factory
from anyfleet.parts.train import Gradient
from anyfleet.tasks import Data, Split, zoo
from anyfleet.tasks import Task as Built
from anyfleet.tasks.data_loading import fresh_model

STEPS = 2  # local steps of a measured order
_PLAIN = Gradient()
_ENOUGH = 1.0  # seconds after which a slice is not measured again
_REPEATS = 40  # at most
_NETS: Mapping[str, Callable[..., nn.Module]] = {
    "C.3": zoo.cnn_cifar,
    "C.8": zoo.vgg9,
    "C.11": zoo.resnet18,
}


@dataclass(frozen=True)
class Sample:
    """One order that was measured: its work, and its seconds."""

    net: str
    width: float
    first_trained_layer: int
    local_steps: float
    calls: float
    flops: float
    moved: float
    seconds: float


@dataclass(frozen=True)
class Peak:
    """The peak memory of an order in bytes: measured, and as planners compute it."""

    net: str
    measured: float
    predicted: float


def standard(batch: int = 16) -> Mapping[str, Task]:
    """Return tasks of three networks (specification §C) on random images, by name."""
    count, shape = STEPS * batch, (3, 32, 32)
    images = rng.normal(rng.root(0, "images"), count * 3 * 32 * 32).float().view(count, *shape)
    data = Data(images, torch.arange(count) % 10)
    nets = {name: fresh_model(Factory.of(make), 0) for name, make in _NETS.items()}
    alone = Split(devices=1, test_share=0.0)
    return {name: Built.of(net, data, data, split=alone) for name, net in nets.items()}


def measure(
    net: str,
    task: Task,
    slice_: Slice,
    batch: int,
    *,
    steps: int = STEPS,
    threads: int = 1,
    enough: float = _ENOUGH,
) -> Sample:
    """Return how long this machine trains a slice, as the first device of the task.

    It is not measured again once all repetitions together have taken `enough` seconds.
    """
    order, once = (
        _order(task, slice_, Gradient(local_steps=n, batch_size=batch)) for n in (steps, 1)
    )
    effort = _demand(order, task).effort
    with _threads(threads):
        client.work(once, (DeviceState(),), task)  # what happens only the first time does not count
        seconds = _quickest(lambda: client.work(order, (DeviceState(),), task), threads, enough)
    return Sample(
        net=net,
        width=_channel_share(task, slice_),
        first_trained_layer=slice_.first_trained_layer,
        local_steps=float(effort.local_steps[0]),
        calls=float(effort.calls[0]),
        flops=float(effort.flops[0]),
        moved=float(effort.moved[0]),
        seconds=seconds,
    )


def weigh(
    net: str, task: Task, batch: int, *, slice_: Slice = WHOLE, train: Gradient = _PLAIN
) -> Peak:
    """Return the peak memory of training a slice with `train` on a few batches of `batch` samples.

    The model and all tensors that operators make during an order count as long as they are held.
    The data of the device do not count: they are there before the order, and need not be in memory
    all at once. Neither does what libraries use inside, nor Python itself.
    """
    order = _order(task, slice_, replace(train, local_steps=STEPS, batch_size=batch))
    with _threads(1), Live() as live:
        client.work(order, (DeviceState(),), task)
    received = sum(v.nbytes for tree in order.trees_of(0).values() for v in tree.values())
    return Peak(net, float(live.peak + received), float(_demand(order, task).memory[0]))


def _order(task: Task, slice_: Slice, train: Gradient) -> Cohort:
    """Return the order that a server would send to the first device."""
    samples, none = task.size(0), np.array([-1])
    method = replace(fedavg(), train=replace(train, batch_size=min(train.batch_size, samples)))
    first = np.zeros(1, dtype=np.int64)
    order = Cohort(
        id=first,
        device=first,
        visit=first,
        key=rng.fold(rng.root(0, "order"), torch.zeros(1, dtype=torch.int64)),
        slice_index=first,
        width=np.array([width(slice_, task.blueprint)]),
        menu_index=none,
        choice=none,
        utility=np.array([np.nan]),
        hyperparameters=method.train.hyperparameters(0, np.array([samples])),
        download_index=none,
        bits=np.zeros(1),
        delivered_width=np.ones(1),
        column_width=np.ones(1),
        acknowledged=none,
        held_order=none,
        kind=Kind.TRAIN,
        round_index=0,
        cohort_key=0,
        job=method.job(),
        slices=(slice_,),
        menus=(),
        downloads=(),
    )
    return load_models(order, method=method, task=task, params=task.params, buffers=task.buffers)


def _demand(order: Cohort, task: Task) -> Demand:
    steps, batch = (
        int(order.hyperparameters.local_steps[0]),
        int(order.hyperparameters.batch_size[0]),
    )
    count = samples_processed(steps, task.size(0), batch)
    slice_ = order.slice_of(0)
    train = order.job.trainer
    return training(train, task.blueprint, slice_, Amount(batch, count, steps), "flops")


def _channel_share(task: Task, slice_: Slice) -> float:
    """Return the kept share of the channels that can be sliced."""
    whole, kept = (task.blueprint.local(s).sizes for s in (WHOLE, slice_))
    axes = task.blueprint.counts(1.0)
    return sum(kept[axis] for axis in axes) / max(1, sum(whole[axis] for axis in axes))


def _quickest(work: Callable[[], Any], threads: int, enough: float) -> float:
    """Return the seconds of the quickest of some repetitions, as if there were no other work.

    Threads that wait for each other count as working.
    """
    found: list[float] = []
    while not found or (len(found) < _REPEATS and sum(found) < enough):
        begin = time.process_time()
        work()
        found.append((time.process_time() - begin) / threads)
    return min(found)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
