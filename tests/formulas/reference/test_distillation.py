"""Losses and reference steps on prefixes, with the numbers of the specification."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anyfleet.arrays import Floats
from anyfleet.formulas.reference.distillation import (
    Buffers,
    Descent,
    LinearBatch,
    Moved,
    cross_entropy,
    cross_entropy_gradient,
    descended,
    divergence_from_teacher,
    divergence_gradient,
    fedrescue_step,
    fedrush_step,
    fedseq_step,
    fedslim_step,
    fjord_step,
    softmax,
)
from anyfleet.formulas.sub_models import progressive_widths, sampled_widths

# One input, two columns; the second class has logit 0, so the first has a sigmoid.
EXAMPLE = LinearBatch(np.array([[[1.0, 1.0], [0.0, 0.0]]]), np.array([0]), np.array([0.5, 1.0]))
START = Moved(np.array([0.2, 0.4]), np.zeros(2))
HALF = Descent(0.5)
GRID = np.arange(2, 21) / 20

Step = Callable[[Moved, LinearBatch, Floats, Descent], Moved]


def literal_rush(model: Moved, batch: LinearBatch, ratios: Floats, descent: Descent) -> Moved:
    return fedrush_step(model, batch, ratios, descent, gated=False)


PROGRESSIVE: Sequence[Step] = (fedrescue_step, fedseq_step, fedrush_step, literal_rush)
ALL: Sequence[Step] = (fedslim_step, fjord_step, *PROGRESSIVE)


# --- losses -----------------------------------------------------------------------------------


def test_1_7_probabilities_of_the_example() -> None:
    whole, narrow = (softmax(EXAMPLE.logits(START.theta, ratio)) for ratio in (1.0, 0.5))
    assert whole[0, 0] == pytest.approx(0.645656, abs=1e-6)
    assert narrow[0, 0] == pytest.approx(0.549834, abs=1e-6)
    assert divergence_from_teacher(whole, narrow) == pytest.approx(0.018913, abs=1e-6)
    # The teacher stands first: the other way round is another number.
    assert divergence_from_teacher(narrow, whole) == pytest.approx(0.019415, abs=1e-6)


def test_1_7_gradients_are_those_of_automatic_differentiation() -> None:
    draw = np.random.default_rng(0)
    values, labels = draw.normal(size=(5, 4)), draw.integers(0, 4, 5)
    teacher = softmax(draw.normal(size=(5, 4)))
    logits = torch.tensor(values, requires_grad=True)
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(labels))
    (gradient,) = torch.autograd.grad(loss, logits)
    assert cross_entropy(values, labels) == pytest.approx(loss.item())
    assert cross_entropy_gradient(values, labels) == pytest.approx(gradient.numpy())
    student = torch.log_softmax(logits, dim=1)
    loss = torch.nn.functional.kl_div(student, torch.tensor(teacher), reduction="batchmean")
    (gradient,) = torch.autograd.grad(loss, logits)
    assert divergence_from_teacher(teacher, softmax(values)) == pytest.approx(loss.item())
    assert divergence_gradient(teacher, values) == pytest.approx(gradient.numpy())


def test_1_7_losses_at_the_ends() -> None:
    assert softmax(np.array([[1e4, 0.0]])).tolist() == [[1.0, 0.0]]
    assert cross_entropy(np.array([[1e4, 0.0]]), np.array([1])) == pytest.approx(1e4)
    sure, torn = np.array([[1.0, 0.0]]), np.array([[0.5, 0.5]])
    assert divergence_from_teacher(sure, torn) == pytest.approx(np.log(2))
    assert divergence_from_teacher(torn, sure) == np.inf
    assert divergence_from_teacher(sure, sure) == 0


# --- the worked example -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "ratios", "result"),
    [
        (fedslim_step, [0.5], [0.425083, 0.577172]),
        (fjord_step, [0.5], [0.650166, 0.577172]),
        (fedrescue_step, [0.5, 1.0], [0.605478, 0.679799]),
        (fedseq_step, [0.5, 1.0], [0.561784, 0.689044]),
        (fedrush_step, [0.5, 1.0], [0.738952, 0.665958]),
        (literal_rush, [0.5, 1.0], [0.714584, 0.641590]),
    ],
)
def test_1_7_example(step: Step, ratios: list[float], result: list[float]) -> None:
    found = step(START, EXAMPLE, np.array(ratios), HALF)
    assert found.theta == pytest.approx(result, abs=1e-6)
    assert START.theta.tolist() == [0.2, 0.4]


@pytest.mark.parametrize("step", ALL)
def test_1_7_without_ratios_it_is_a_step_of_fedavg(step: Step) -> None:
    plain = descended(
        START, EXAMPLE.gradient(START.theta, 1.0, 1.0, np.zeros(0)), np.ones(2, bool), HALF
    )
    found = step(START, EXAMPLE, np.zeros(0), HALF)
    assert found.theta.tolist() == plain.theta.tolist()


def test_1_7_a_sub_model_as_wide_as_the_model_teaches_itself_nothing() -> None:
    found = fedslim_step(START, EXAMPLE, np.array([1.0]), HALF)
    assert found.theta == pytest.approx(
        fedslim_step(START, EXAMPLE, np.zeros(0), HALF).theta, abs=1e-15
    )


@pytest.mark.parametrize("step", [fedrescue_step, fedseq_step, fedrush_step])
def test_1_7_a_weak_device_leaves_what_it_does_not_hold(step: Callable[..., Moved]) -> None:
    design = np.zeros((1, 2, 3))
    design[0, 0] = 1.0
    batch = LinearBatch(design, np.array([0]), np.array([0.25, 0.5, 1.0]))
    start = Moved(np.array([0.2, 0.4, 0.7]), np.zeros(3))
    found = step(start, batch, np.array([0.25, 0.5]), HALF, capacity=0.5)
    assert found.theta[2] == 0.7
    # Up to its capacity it is the model of two columns.
    small = LinearBatch(design[:, :, :2], np.array([0]), np.array([0.5, 1.0]))
    same = step(START, small, np.array([0.5, 1.0]), HALF)
    assert found.theta[:2] == pytest.approx(same.theta)


# --- momentum ---------------------------------------------------------------------------------


def test_1_7_descent_is_that_of_torch() -> None:
    draw = np.random.default_rng(1)
    start = draw.normal(size=3)
    for nesterov in (True, False):
        parameter = torch.nn.Parameter(torch.tensor(start))
        theirs = torch.optim.SGD(
            [parameter], lr=0.1, momentum=0.9, nesterov=nesterov, weight_decay=0.05
        )
        ours = Moved(start, np.zeros(3))
        for gradient in draw.normal(size=(4, 3)):
            parameter.grad = torch.tensor(gradient)
            theirs.step()
            descent = Descent(0.1, momentum=0.9, nesterov=nesterov, decay=0.05)
            ours = descended(ours, gradient, np.ones(3, dtype=np.bool_), descent)
        assert ours.theta == pytest.approx(parameter.detach().numpy())


def two_batches(buffers: Buffers, momentum: float = 0.9, decay: float = 0.1) -> Moved:
    descent = Descent(0.5, momentum=momentum, decay=decay, buffers=buffers)
    ratios = np.array([0.5, 1.0])
    once = fedrescue_step(START, EXAMPLE, ratios, descent)
    return fedrescue_step(once, EXAMPLE, ratios, descent)


def sigmoid(z: float) -> float:
    return float(1 / (1 + np.exp(-z)))


def by_hand(buffers: Buffers) -> Floats:
    """The same two batches of the example, written out."""
    theta, buffer = START.theta.copy(), np.zeros(2)

    def move(places: list[int], slope: dict[int, float], momentum: float) -> None:
        for i in places:
            g = slope.get(i, 0.0) + 0.1 * theta[i]
            if momentum:
                buffer[i] = momentum * buffer[i] + g
                g += momentum * buffer[i]
            theta[i] -= 0.5 * g

    early = 0.0 if buffers == "final" else 0.9
    for _ in range(2):
        q = sigmoid(theta.sum())
        p = sigmoid(theta[0])
        everywhere = buffers == "literal"
        move([0, 1] if everywhere else [0], {0: p - 1 + p - q}, early)
        p = sigmoid(theta.sum())
        move([0, 1] if everywhere else [1], {1: p - 1}, early)
        p = sigmoid(theta.sum())
        move([0, 1], {0: p - 1, 1: p - 1}, 0.9)
    return theta


@pytest.mark.parametrize("buffers", ["final", "masked", "literal"])
def test_1_7_rules_for_the_buffer(buffers: Buffers) -> None:
    assert two_batches(buffers).theta == pytest.approx(by_hand(buffers))


def test_1_7_without_momentum_and_decay_the_rules_agree() -> None:
    results = [two_batches(rule, 0.0, 0.0).theta.tolist() for rule in ("final", "masked")]
    assert results[0] == results[1] == two_batches("literal", 0.0, 0.0).theta.tolist()


# --- ratios -----------------------------------------------------------------------------------


@given(st.integers(0, 2**31), st.integers(0, 8), st.sampled_from([0.05, 0.1, 0.2, 0.35, 1.0]))
def test_1_7_progressive_ratios(seed: int, count: int, capacity: float) -> None:
    u = np.random.default_rng(seed).uniform(size=len(GRID))
    found = progressive_widths(GRID, capacity, count, u)
    below = sum(ratio < capacity - 1e-9 for ratio in GRID)
    assert len(found) == (min(count - 1, below) + 1 if count else 0)
    assert np.all(np.diff(found) > 0)
    assert count == 0 or found[-1] == capacity
    assert {*found[:-1].tolist()} <= {*GRID.tolist()}


def test_1_7_ratios_are_drawn_evenly() -> None:
    u = np.random.default_rng(5).uniform(size=(4000, len(GRID)))
    below = [progressive_widths(GRID, 0.2, 2, row)[0] for row in u]
    assert {*below} == {GRID[0], GRID[1]}
    assert np.mean(np.array(below) == GRID[0]) == pytest.approx(0.5, abs=5 * 0.5 / np.sqrt(4000))
    drawn = sampled_widths(GRID, 0.2, u[0:1000, 0])
    assert {*drawn.tolist()} == {*GRID[:3].tolist()}
    assert np.mean(drawn == GRID[2]) == pytest.approx(1 / 3, abs=5 * np.sqrt(2 / 9 / 1000))
    assert sampled_widths(GRID, 0.05, np.array([0.0, 0.999])).tolist() == [0.05, 0.05]
