"""Training prefixes of a model: losses, their gradients, and reference steps of a linear model.

The reference steps do what the trainers do, one batch at a time and without automatic
differentiation, for the most general linear model: logits are a design times a vector of
coordinates, and a sub-model holds the coordinates whose `first` ratio it reaches.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from anyfleet.arrays import Flags, Floats, Ints

Buffers = Literal["final", "masked", "literal"]


# --- losses ---------------------------------------------------------------------------------------


def softmax(logits: Floats) -> Floats:
    """Probabilities of the classes, along the last axis (specification §1.7)."""
    shifted = np.exp(logits - np.max(logits, axis=-1, keepdims=True))
    probabilities: Floats = shifted / shifted.sum(axis=-1, keepdims=True)
    return probabilities


def cross_entropy(logits: Floats, labels: Ints) -> float:
    """The batch mean of `-log p(label)` (specification §1.7)."""
    shifted = logits - np.max(logits, axis=-1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return float(-logs[np.arange(len(labels)), labels].mean())


def cross_entropy_gradient(logits: Floats, labels: Ints) -> Floats:
    """Its gradient with respect to the logits, `(p - y) / samples` (specification §1.7)."""
    probabilities = softmax(logits)
    truth = np.eye(probabilities.shape[-1])[labels]
    gradient: Floats = (probabilities - truth) / len(labels)
    return gradient


def divergence_from_teacher(teacher: Floats, student: Floats) -> float:
    """`KL[teacher ‖ student]` of probabilities, the batch mean (specification §1.7).

    A class that the teacher excludes adds nothing; one that only the student excludes makes it
    infinite.
    """
    says = teacher > 0
    with np.errstate(divide="ignore"):
        ratio = np.log(np.where(says, teacher, 1.0)) - np.log(np.where(says, student, 1.0))
    return float((teacher * ratio).sum(axis=-1).mean())


def divergence_gradient(teacher: Floats, logits: Floats) -> Floats:
    """Gradient of the divergence with respect to the student's logits (specification §1.7).

    The teacher's probabilities do not move: `(p - q) / samples`.
    """
    gradient: Floats = (softmax(logits) - teacher) / len(teacher)
    return gradient


# --- reference steps ------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class LinearBatch:
    """A batch for a linear model.

    design: samples × classes × coordinates. first: of each coordinate, the smallest ratio whose
    sub-model holds it (0 for one that belongs to all, as an output bias).
    """

    design: Floats
    labels: Ints
    first: Floats

    def held(self, ratio: float) -> Flags:
        """The coordinates of a sub-model."""
        return self.first <= ratio + 1e-9

    def logits(self, theta: Floats, ratio: float) -> Floats:
        seen: Floats = self.design @ np.where(self.held(ratio), theta, 0.0)
        return seen

    def gradient(self, theta: Floats, ratio: float, labels: float, teacher: Floats) -> Floats:
        """Of `labels × cross-entropy + divergence`; an empty teacher says nothing."""
        logits = self.logits(theta, ratio)
        slope = labels * cross_entropy_gradient(logits, self.labels)
        if teacher.size:
            slope = slope + divergence_gradient(teacher, logits)
        return np.where(self.held(ratio), np.einsum("sc,scd->d", slope, self.design), 0.0)


@dataclass(frozen=True)
class Descent:
    """Stochastic gradient descent, and what becomes of its buffer in the progressive steps.

    "final": they are plain, and momentum acts in the last step of the whole model. "masked": one
    buffer, used and updated where a step moves something. "literal": only gradients are masked,
    so that momentum and decay go on moving what should rest.
    """

    rate: float
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
    """One step of the masked coordinates; all others and their buffers rest (specification §1.7)."""
    slope = gradient + descent.decay * model.theta
    buffer = descent.momentum * model.buffer + slope
    ahead = slope + descent.momentum * buffer if descent.nesterov else buffer
    return Moved(
        np.where(mask, model.theta - descent.rate * ahead, model.theta),
        np.where(mask, buffer, model.buffer),
    )


def fedslim_step(
    model: Moved, batch: LinearBatch, ratios: Floats, descent: Descent, *, capacity: float = 1.0
) -> Moved:
    """FedSlim: labels teach the model, the model its sub-models, in one step (specification §1.7)."""
    return _summed(model, batch, ratios, descent, capacity=capacity, labels=0.0)


def fjord_step(
    model: Moved, batch: LinearBatch, ratios: Floats, descent: Descent, *, capacity: float = 1.0
) -> Moved:
    """FjORD: labels and the model teach its sub-models, in one step (specification §1.7)."""
    return _summed(model, batch, ratios, descent, capacity=capacity, labels=1.0)


def fedrescue_step(
    model: Moved, batch: LinearBatch, ratios: Floats, descent: Descent, *, capacity: float = 1.0
) -> Moved:
    """FedResCuE: from narrow to wide, each step moves its new columns only (specification §1.7)."""
    rule = _Progress(freeze=True, teach_below=capacity)
    return _progressive(model, batch, ratios, descent, capacity=capacity, rule=rule)


def fedseq_step(
    model: Moved, batch: LinearBatch, ratios: Floats, descent: Descent, *, capacity: float = 1.0
) -> Moved:
    """FedSeq: FedResCuE without distillation (specification §1.7)."""
    rule = _Progress(freeze=True, teach_below=0.0)
    return _progressive(model, batch, ratios, descent, capacity=capacity, rule=rule)


def fedrush_step(
    model: Moved,
    batch: LinearBatch,
    ratios: Floats,
    descent: Descent,
    *,
    capacity: float = 1.0,
    gated: bool = True,
) -> Moved:
    """FedRush: FedResCuE without freezing, each step moves its whole sub-model (specification §1.7).

    `gated=False` is the printed algorithm, which distils into the whole model too.
    """
    rule = _Progress(freeze=False, teach_below=capacity if gated else np.inf)
    return _progressive(model, batch, ratios, descent, capacity=capacity, rule=rule)


def _summed(
    model: Moved,
    batch: LinearBatch,
    ratios: Floats,
    descent: Descent,
    *,
    capacity: float,
    labels: float,
) -> Moved:
    teacher = softmax(batch.logits(model.theta, capacity))
    gradient = batch.gradient(model.theta, capacity, 1.0, _NOBODY)
    for ratio in ratios:
        gradient = gradient + batch.gradient(model.theta, float(ratio), labels, teacher)
    return descended(model, gradient, batch.held(capacity), descent)


@dataclass(frozen=True)
class _Progress:
    """Whether a step spares the columns of those before it; below which ratio it is taught."""

    freeze: bool
    teach_below: float


def _progressive(
    model: Moved,
    batch: LinearBatch,
    ratios: Floats,
    descent: Descent,
    *,
    capacity: float,
    rule: _Progress,
) -> Moved:
    teacher = softmax(batch.logits(model.theta, capacity))
    whole, before = batch.held(capacity), np.zeros(len(model.theta), dtype=np.bool_)
    for ratio in map(float, ratios):
        lesson = teacher if ratio < rule.teach_below - 1e-9 else _NOBODY
        gradient = batch.gradient(model.theta, ratio, 1.0, lesson)
        held = batch.held(ratio)
        mask = held & ~before if rule.freeze else held
        model = _one(model, np.where(mask, gradient, 0.0), mask, whole, descent)
        before = held
    return descended(model, batch.gradient(model.theta, capacity, 1.0, _NOBODY), whole, descent)


def _one(model: Moved, gradient: Floats, mask: Flags, whole: Flags, descent: Descent) -> Moved:
    """A progressive step under the rule for the buffer."""
    if descent.buffers == "final":
        plain = Descent(descent.rate, decay=descent.decay)
        return Moved(descended(model, gradient, mask, plain).theta, model.buffer)
    return descended(model, gradient, mask if descent.buffers == "masked" else whole, descent)
