"""Padding of minibatches: only right where no sample sees another.

The program of a network tells whether its samples do (`elastic.mixed_rows`); a loss has to be tried
on values.
"""

from itertools import chain

import torch
from torch import Tensor

from anyfleet import rng
from anyfleet.core.objectives import Task, losses
from anyfleet.core.once_per_task import OncePerTask
from anyfleet.elastic import mixed_rows
from anyfleet.elastic.program import BATCH, length

_ROWS = 4  # of the test data, on which the loss is tried: few, as a device has to hold them
_CLOSE = 1e-4  # relative; a sample more or less would change a loss by far more


@OncePerTask
def unpaddable(task: Task) -> str:
    """Return why the minibatches of a task must not be padded, or "".

    It names where samples see each other while a model is trained.
    """
    calls = mixed_rows(task.blueprint)
    if calls:
        return calls[0]
    return "the loss of a sample depends on the others of its minibatch" if _in_loss(task) else ""


@torch.no_grad()
def _in_loss(task: Task) -> bool:
    """Return whether the loss of the first samples changes with those that come after them.

    A loss that cannot be tried counts as one that does: training without padding is always right.
    """
    y = _targets(task)
    output = _outputs(task, y)
    half = len(y) // 2
    if output is None or not half:
        return False
    try:
        together, alone = losses(task, output, y)[:half], losses(task, output[:half], y[:half])
    except (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError):
        return True
    return not torch.allclose(together, alone, rtol=_CLOSE, atol=_CLOSE, equal_nan=True)


def _targets(task: Task) -> Tensor:
    """Return the targets of some samples: of the test data, or of the first device with two."""
    owned = (task.data(device).y for device in range(task.devices))
    found = (y for y in chain((task.test.y,), owned) if len(y) > 1)
    return next(found, task.test.y)[:_ROWS]


def _outputs(task: Task, y: Tensor) -> Tensor | None:
    """Return numbers in (0, 1) in the shape of the model's output; None if that is not known.

    They also do for a loss that takes probabilities.
    """
    program, sizes = task.blueprint.program, {**task.blueprint.sizes, BATCH: len(y)}
    found = [n.dims for n in program.nodes if n.name == program.output and n.dims is not None]
    if not found:
        return None
    shape = [length(dim, sizes) for dim in found[0]]
    like = next(iter(task.params.values()))
    drawn = rng.uniform(rng.root(0, "padding"), int(torch.Size(shape).numel()))
    return (0.05 + 0.9 * drawn).reshape(shape).to(like)
