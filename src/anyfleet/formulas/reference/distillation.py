"""Training prefixes of a model: losses, their gradients, and reference steps of a linear model.

The reference steps do what the trainers do, one batch at a time and without automatic
differentiation, for the most general linear model: logits are a design times a vector of
coordinates, and a sub-model holds the coordinates whose `first` width it reaches.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from anyfleet.arrays import Flags, Floats, Ints

Buffers = Literal["final", "masked", "literal"]


# --- losses ---------------------------------------------------------------------------------------


def softmax(logits: Floats) -> Floats:
    """Return the probabilities of the classes, along the last axis (specification §1.7)."""
    shifted = np.exp(logits - np.max(logits, axis=-1, keepdims=True))
    probabilities: Floats = shifted / shifted.sum(axis=-1, keepdims=True)
    return probabilities


def cross_entropy(logits: Floats, labels: Ints) -> float:
    """Return the batch mean of `-log p(label)` (specification §1.7)."""
    shifted = logits - np.max(logits, axis=-1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return float(-logs[np.arange(len(labels)), labels].mean())


def cross_entropy_gradient(logits: Floats, labels: Ints) -> Floats:
    """Return the gradient of the cross-entropy with respect to the logits (specification §1.7).

    It is `(p - y) / samples`.
    """
    probabilities = softmax(logits)
    truth = np.eye(probabilities.shape[-1])[labels]
    gradient: Floats = (probabilities - truth) / len(labels)
    return gradient


def divergence_from_teacher(teacher: Floats, student: Floats) -> float:
    """Return the batch mean of `KL[teacher ‖ student]` of probabilities (specification §1.7).

    A class that the teacher excludes adds nothing; one that only the student excludes makes it
    infinite.
    """
    says = teacher > 0
    with np.errstate(divide="ignore"):
        ratio = np.log(np.where(says, teacher, 1.0)) - np.log(np.where(says, student, 1.0))
    return float((teacher * ratio).sum(axis=-1).mean())


def divergence_gradient(teacher: Floats, logits: Floats) -> Floats:
    """Return the gradient of the divergence in the student's logits (specification §1.7).

    The teacher's probabilities do not move: `(p - q) / samples`.
    """
    gradient: Floats = (softmax(logits) - teacher) / len(teacher)
    return gradient


# --- reference steps ------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class LinearBatch:
    """A batch for a linear model.

    design: samples × classes × coordinates. first: of each coordinate, the smallest width whose
    sub-model holds it (0 for one that belongs to all, as an output bias).
    """

    design: Floats
    labels: Ints
    first: Floats

    def held(self, width: float) -> Flags:
        """Return which coordinates a sub-model holds."""
        return self.first <= width + 1e-9

    def logits(self, theta: Floats, width: float) -> Floats:
        """Return the logits of a sub-model."""
        seen: Floats = self.design @ np.where(self.held(width), theta, 0.0)
        return seen

    def gradient(self, theta: Floats, width: float, labels: float, teacher: Floats) -> Floats:
        """Return the gradient of `labels × cross-entropy + divergence`.

        An empty teacher adds no divergence.
        """
        logits = self.logits(theta, width)
        slope = labels * cross_entropy_gradient(logits, self.labels)
        if teacher.size:
            slope = slope + divergence_gradient(teacher, logits)
        return np.where(self.held(width), np.einsum("sc,scd->d", slope, self.design), 0.0)


@dataclass(frozen=True)
class Descent:
    """Stochastic gradient descent, and what becomes of its buffer in the progressive steps.

    "final": they are plain, and momentum acts in the last step of the whole model. "masked": one
    buffer, used and updated where a step moves something. "literal": only gradients are masked,
    so that momentum and decay go on moving what should rest.
    """

    lr: float
    momentum: float = 0.0
    nesterov: bool = True
    decay: float = 0.0
    buffers: Buffers = "final"


class Moved(NamedTuple):
    """A model and its momentum buffer."""

    theta: Floats
    buffer: Floats


_NOBODY = np.zeros(0)


def descended(model: Moved, gradient: Floats, mask: Flags, descent: Descent) -> Moved:
    """Return the model after one step of the masked coordinates (specification §1.7).

    All other coordinates and their buffers rest.
    """
    slope = gradient + descent.decay * model.theta
    buffer = descent.momentum * model.buffer + slope
    ahead = slope + descent.momentum * buffer if descent.nesterov else buffer
    return Moved(
        np.where(mask, model.theta - descent.lr * ahead, model.theta),
        np.where(mask, buffer, model.buffer),
    )


def fedslim_step(
    model: Moved, batch: LinearBatch, widths: Floats, descent: Descent, *, capacity: float = 1.0
) -> Moved:
    """Return the model after a step of FedSlim (specification §1.7).

    Labels teach the model, the model its sub-models, in one step.
    """
    return _summed(model, batch, widths, descent, capacity=capacity, labels=0.0)


def fjord_step(
    model: Moved, batch: LinearBatch, widths: Floats, descent: Descent, *, capacity: float = 1.0
) -> Moved:
    """Return the model after a step of FjORD (specification §1.7).

    Labels and the model teach its sub-models, in one step.
    """
    return _summed(model, batch, widths, descent, capacity=capacity, labels=1.0)


def fedrescue_step(
    model: Moved, batch: LinearBatch, widths: Floats, descent: Descent, *, capacity: float = 1.0
) -> Moved:
    """Return the model after the steps of FedResCuE (specification §1.7).

    They go from narrow to wide, and each moves its new columns only.
    """
    rule = _Progress(freeze=True, teach_below=capacity)
    return _progressive(model, batch, widths, descent, capacity=capacity, rule=rule)


def fedseq_step(
    model: Moved, batch: LinearBatch, widths: Floats, descent: Descent, *, capacity: float = 1.0
) -> Moved:
    """Return the model after the steps of FedSeq: FedResCuE, not distilled (specification §1.7)."""
    rule = _Progress(freeze=True, teach_below=0.0)
    return _progressive(model, batch, widths, descent, capacity=capacity, rule=rule)


def fedrush_step(
    model: Moved,
    batch: LinearBatch,
    widths: Floats,
    descent: Descent,
    *,
    capacity: float = 1.0,
    gated: bool = True,
) -> Moved:
    """Return the model after the steps of FedRush: FedResCuE, not frozen (specification §1.7).

    Each step moves its whole sub-model. `gated=False` is the printed algorithm, which distils into
    the whole model too.
    """
    rule = _Progress(freeze=False, teach_below=capacity if gated else np.inf)
    return _progressive(model, batch, widths, descent, capacity=capacity, rule=rule)


def _summed(
    model: Moved,
    batch: LinearBatch,
    widths: Floats,
    descent: Descent,
    *,
    capacity: float,
    labels: float,
) -> Moved:
    teacher = softmax(batch.logits(model.theta, capacity))
    gradient = batch.gradient(model.theta, capacity, 1.0, _NOBODY)
    for width in widths:
        gradient = gradient + batch.gradient(model.theta, float(width), labels, teacher)
    return descended(model, gradient, batch.held(capacity), descent)


@dataclass(frozen=True)
class _Progress:
    """The rule of progressive steps: whether they freeze earlier columns, and who is taught.

    Sub-models narrower than `teach_below` learn from the whole model.
    """

    freeze: bool
    teach_below: float


def _progressive(
    model: Moved,
    batch: LinearBatch,
    widths: Floats,
    descent: Descent,
    *,
    capacity: float,
    rule: _Progress,
) -> Moved:
    teacher = softmax(batch.logits(model.theta, capacity))
    whole, before = batch.held(capacity), np.zeros(len(model.theta), dtype=np.bool_)
    for width in map(float, widths):
        lesson = teacher if width < rule.teach_below - 1e-9 else _NOBODY
        gradient = batch.gradient(model.theta, width, 1.0, lesson)
        held = batch.held(width)
        mask = held & ~before if rule.freeze else held
        model = _one(model, np.where(mask, gradient, 0.0), mask, whole, descent)
        before = held
    return descended(model, batch.gradient(model.theta, capacity, 1.0, _NOBODY), whole, descent)


def _one(model: Moved, gradient: Floats, mask: Flags, whole: Flags, descent: Descent) -> Moved:
    """Return the model after a progressive step under the rule for the buffer."""
    if descent.buffers == "final":
        plain = Descent(descent.lr, decay=descent.decay)
        return Moved(descended(model, gradient, mask, plain).theta, model.buffer)
    return descended(model, gradient, mask if descent.buffers == "masked" else whole, descent)
