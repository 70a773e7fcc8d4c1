"""Calibration of codecs: before a run, some see an update such as devices will send."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from anyfleet import rng
from anyfleet.core.layout import MessageLayout, tensor_layouts
from anyfleet.core.local_training import Inputs, as_tensors, extent, lifted, train, training_context
from anyfleet.core.method import Job, Method
from anyfleet.core.objectives import Task
from anyfleet.elastic import WHOLE

SAMPLES = 16  # of the server (specification §1.12.2)


def calibrated(method: Method, task: Task, seed: int) -> Method:
    """Return the method with a calibrated uplink; unchanged if the server has no samples.

    The initial model is trained on some samples of the server, as devices will train it. The result
    is the same for the same seed, so that a resumed run has the codec it began with.
    """
    if not method.uplink.calibrates or not len(task.server):
        return method
    key = rng.root(seed, "calibration")
    update = sample_update(method.job(), task, key)
    like = next(iter(task.params.values()))
    layout = MessageLayout(
        tensor_layouts(tuple(update), WHOLE, (1, 1.0), task.blueprint), like.dtype, key[None]
    )
    # Once, and on one row: wherever the model lives, the host is quick enough.
    there = {name: value.cpu() for name, value in update.items()}
    return replace(method, uplink=method.uplink.calibrated(layout.flattened(there), layout))


def sample_update(job: Job, task: Task, key: Tensor) -> dict[str, Tensor]:
    """Return what a device with the whole model would send, as a stack of one.

    It has some of the server's samples, which `key` draws.
    """
    rows = rng.sample(key, len(task.server), min(SAMPLES, len(task.server)))
    x = task.server.x[rows]
    like = next(iter(task.params.values()))
    hyperparameters = job.train.hyperparameters(0, np.array([len(rows)]))
    given = {
        name: value[0] for name, value in as_tensors(hyperparameters, [len(rows)], like).items()
    }
    inputs = Inputs(
        params=dict(task.params),
        buffers=dict(task.buffers),
        x=x,
        y=task.server.y[rows],
        valid=torch.ones(len(rows), dtype=torch.bool, device=x.device),
        seen=torch.ones(task.classes, dtype=torch.bool, device=x.device),
        key=key.to(like.device),
        hyperparameters=given,
    )
    context = training_context(task, job.norm, WHOLE)
    bounds = extent(hyperparameters, [len(rows)])
    result = train(job.train, context, inputs, bounds, lift=lifted(1), cohort_key=0)
    stays = job.norm.stays(task.blueprint)
    sent = [name for name in context.trained if name not in stays]
    change = {name: result.params[name] - inputs.params[name] for name in sent}
    return {
        n: (v * result.mask[n].to(v) if n in result.mask else v)[None] for n, v in change.items()
    }
