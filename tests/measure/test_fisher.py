"""Fisher information on the device: the right number, beside any trainer, at its price."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from anyfleet import rng
from anyfleet.core.local_training import training_context
from anyfleet.core.method import Method
from anyfleet.core.slots import Minibatch, TrainingContext, TrainingStart
from anyfleet.elastic import EVALUATE, OBSERVE, Priced, Slice, apply, cut
from anyfleet.errors import CompositionError
from anyfleet.formulas.reference.whale import cheap_fisher_trace, fisher_trace
from anyfleet.measure.fisher import Fisher, Observed, by_channel, drawn_labels
from anyfleet.methods import fedavg, fedprox, whale
from anyfleet.parts.choose import FisherUtility
from anyfleet.parts.plan import WidthMenu
from anyfleet.runtime import Stacked, Threads
from anyfleet.tasks import Task
from anyfleet.world import levels
from tests.helpers import small

KEY = rng.root(3, "test")


def where(task: Task, slice_: Slice | None = None) -> TrainingContext:
    return training_context(task, fedavg().norm, slice_ or Slice())


def batch(task: Task, size: int = 7, valid: int | None = None) -> Minibatch:
    data = task.data(0)
    real = torch.arange(size) < (size if valid is None else valid)
    return Minibatch(data.x[:size], data.y[:size], real, KEY)


def by_hand(task: Task, given: Minibatch) -> tuple[np.ndarray, Tensor]:
    """The gradient of every sample with autograd, one by one, and the labels drawn."""
    buffers = dict(task.buffers)
    if task.blueprint.norms:
        # As training normalises: by the mean and the biased variance of the batch.
        _, buffers = apply(task.blueprint, task.params, buffers, given.x, OBSERVE)
    values = {n: v.clone().requires_grad_() for n, v in task.params.items()}
    draws = rng.uniform(rng.fold(KEY, "fisher"), len(given.x), dtype=torch.float64)
    output, _ = apply(task.blueprint, values, buffers, given.x, EVALUATE)
    labels = drawn_labels(output.detach(), draws)
    losses = task.loss(output, labels)
    rows = []
    for loss in losses:
        found = torch.autograd.grad(loss, list(values.values()), retain_graph=True)
        rows.append(torch.cat([g.flatten() for g in found]).numpy())
    return np.array(rows), labels


@pytest.mark.parametrize("norm", [False, True])
def test_1_10_the_trace_is_the_mean_squared_gradient_of_single_samples(norm: bool) -> None:
    task = small.task(norm=norm, dtype=torch.float64)
    given = batch(task)
    gradients, _ = by_hand(task, given)
    found = Fisher()(where(task), task.params, task.buffers, given)
    assert float(found.trace) == pytest.approx(fisher_trace(gradients), rel=1e-9)


def test_1_10_the_cheap_variant_is_the_squared_mean_gradient_times_the_batch() -> None:
    task = small.task(norm=False, dtype=torch.float64)
    given = batch(task)
    gradients, _ = by_hand(task, given)
    found = Fisher(estimate="mean")(where(task), task.params, task.buffers, given)
    expected = cheap_fisher_trace(gradients.mean(axis=0), len(gradients))
    assert float(found.trace) == pytest.approx(expected, rel=1e-9)
    assert expected != pytest.approx(fisher_trace(gradients), rel=0.05)


def test_1_10_labels_come_from_the_models_own_prediction() -> None:
    task = small.task(norm=False, dtype=torch.float64)
    given = batch(task)
    other = given._replace(y=(given.y + 3) % 10)
    one, two = (Fisher()(where(task), task.params, task.buffers, b).trace for b in (given, other))
    assert torch.equal(one, two)
    probabilities = torch.tensor([[0.1, 0.0, 0.6, 0.3]])
    draws = rng.uniform(KEY, 20_000)
    labels = drawn_labels(probabilities.log().expand(20_000, 4), draws)
    shares = torch.bincount(labels, minlength=4) / 20_000
    torch.testing.assert_close(shares, probabilities[0], atol=0.015, rtol=0)
    assert shares[1] == 0


def test_1_10_over_many_draws_the_trace_is_the_expectation_over_labels() -> None:
    task = small.task(norm=False, dtype=torch.float64)
    given = batch(task, 3)
    values = {n: v.clone().requires_grad_() for n, v in task.params.items()}
    output, _ = apply(task.blueprint, values, task.buffers, given.x, EVALUATE)
    expected = 0.0
    for row in range(3):
        for label, weight in enumerate(output[row].softmax(0).tolist()):
            loss = task.loss(output, torch.full((3,), label))[row]
            found = torch.autograd.grad(loss, list(values.values()), retain_graph=True)
            expected += weight * sum(float(g.square().sum()) for g in found) / 3
    draws = [given._replace(key=rng.fold(KEY, i)) for i in range(300)]
    traces = [float(Fisher()(where(task), task.params, {}, each).trace) for each in draws]
    assert np.mean(traces) == pytest.approx(expected, abs=4 * np.std(traces) / np.sqrt(300))


@pytest.mark.parametrize("estimate", ["samples", "mean"])
def test_padding_does_not_count_and_samples_take_the_first(estimate: str) -> None:
    task = small.task(norm=False, dtype=torch.float64)
    fisher = Fisher(estimate=estimate)  # type: ignore[arg-type]

    def trace(fisher: Fisher, given: Minibatch) -> float:
        return float(fisher(where(task), task.params, {}, given).trace)

    assert trace(fisher, batch(task, 7, valid=4)) == pytest.approx(trace(fisher, batch(task, 4)))
    assert trace(replace(fisher, samples=4), batch(task, 7)) == pytest.approx(
        trace(fisher, batch(task, 4))
    )
    assert trace(fisher, batch(task, 7)) != pytest.approx(trace(fisher, batch(task, 4)))


def test_1_11_every_coordinate_counts_once_with_its_output_channel() -> None:
    task = small.task(dtype=torch.float64)
    found = Fisher()(where(task), task.params, task.buffers, batch(task))
    gradients, _ = by_hand(task, batch(task))
    squares = dict(
        zip(
            task.params,
            np.split(
                (gradients**2).mean(axis=0),
                np.cumsum([v.numel() for v in task.params.values()])[:-1],
            ),
            strict=True,
        )
    )
    hidden = sum(v.sum() for n, v in squares.items() if not n.startswith("10."))
    total = sum(float(v.sum()) for v in found.channels.values())
    assert total == pytest.approx(hidden, rel=1e-9)
    rows = {n: torch.tensor(v).reshape(len(task.params[n]), -1).sum(1) for n, v in squares.items()}
    expected = by_channel(rows, task.blueprint)
    first = rows["0.weight"] + rows["0.bias"] + rows["1.weight"] + rows["1.bias"]
    axis = next(a for a, v in expected.items() if len(v) == 6)
    torch.testing.assert_close(found.channels[axis], first)


def test_a_cut_model_has_the_trace_of_the_small_model() -> None:
    task = small.task(norm=False, dtype=torch.float64)
    half = task.blueprint.prefix(0.5)
    local = where(task, half)
    params = cut(task.params, half, task.blueprint)
    whole = Fisher()(where(task), task.params, {}, batch(task)).trace
    part = Fisher()(local, params, {}, batch(task)).trace
    assert 0 < part != whole


INFORMED = replace(
    fedavg(count=4, lr=0.1, batch_size=8),
    plan=WidthMenu((1.0,)),
    choose=FisherUtility(levels=1, target=1.0),
)


@pytest.mark.parametrize("engine", [None, Threads(), Stacked()], ids=str)
def test_measuring_changes_nothing_in_training(engine: Threads | Stacked | None) -> None:
    task = small.task()
    plain = small.steps(fedavg(count=4, lr=0.1, batch_size=8), task, 2, engine=engine)
    watched = small.steps(INFORMED, task, 2, engine=engine)
    if engine == Stacked():
        assert small.distance(plain[-1].params, watched[-1].params) < 1e-6
    else:
        assert small.identical(plain[-1].params, watched[-1].params)


def test_a_fisher_chooser_gets_fisher_whatever_the_trainer_and_keeps_it_to_itself() -> None:
    task = small.task()
    method = replace(INFORMED, train=fedprox(mu=0.1).train)
    assert isinstance(method.trainer, Observed)
    utilities = [row.utility for row in small.rows(small.steps(method, task, 3)[-1])]
    assert any(0 < each <= 1 for each in utilities)
    row = small.rows(small.steps(method, task, 1)[0])[0]
    # A number that nobody asked for would be refused, and the update with it.
    assert row.failure == ""
    assert np.isnan(row.fisher)
    bits = small.rows(small.steps(fedavg(count=4), task, 1)[0])[0].bits_up
    assert row.bits_up == bits + 32  # of which the choice from the menu


def test_what_a_policy_asks_for_is_reported_and_charged() -> None:
    task = small.task()
    method = whale(widths=(1.0, 0.5), regions=4, lr=0.1, batch_size=8)
    assert method.job().report == ("channels",)
    plain = whale(widths=(1.0, 0.5), lr=0.1, batch_size=8)
    one, two = (small.rows(small.steps(m, task, 1)[0])[0] for m in (method, plain))
    assert one.bits_up == two.bits_up + 32 * (6 + 8 + 16)


def cost(method: Method, step: int = 0) -> float:
    fleet = levels(speeds=(1e9,), mortality=0.0)
    return float(
        small.rows(small.steps(method, small.task(), step + 1, fleet=fleet)[step])[0].flops
    )


def measuring(method: Method, fisher: Fisher) -> Method:
    """The method, with another way of measuring."""
    assert isinstance(method.choose, FisherUtility)
    return replace(method, choose=replace(method.choose, fisher=fisher))


def test_its_cost_is_charged_and_can_be_lowered() -> None:
    # Everybody takes part, so that step 1 is everybody's second order.
    base = replace(INFORMED, select=whale().select)
    plain = cost(replace(base, choose=fedavg().choose), 1)
    full = cost(base, 1)
    assert cost(measuring(base, Fisher(every=5)), 1) - plain < 0.35 * (full - plain)
    assert cost(measuring(base, Fisher(samples=2)), 1) < full
    # One pass over every sample, and a forward pass over each batch for its statistics.
    sample = Priced(small.task().blueprint, Slice(), 8).sample
    once = sample.flops + sample.forward_flops
    assert full == pytest.approx(plain + small.task().size(0) * once)
    # The first order also measures the initial model, on one mini-batch.
    assert cost(base, 0) == pytest.approx(full + 8 * once)


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"Fisher\.every"):
        Fisher(every=0)
    with pytest.raises(ValueError, match=r"Fisher.samples"):
        Fisher(samples=0)
    with pytest.raises(ValueError, match=r"Fisher.estimate"):
        Fisher(estimate="guess")  # type: ignore[arg-type]
    with pytest.raises(CompositionError, match=r"target.*use plan=TargetSeconds"):
        replace(fedavg(), plan=WidthMenu(), choose=FisherUtility())


@pytest.mark.parametrize(
    ("fisher", "batch_size", "measured"),
    [
        (Fisher(), 16, 30),
        (Fisher(every=10), 16, 16),
        (Fisher(samples=4), 16, 8),
        (Fisher(every=2, samples=4), 8, 8),
        (Fisher(samples=16), 64, 16),
    ],
    ids=str,
)
def test_what_is_charged_is_what_is_measured(
    fisher: Fisher, batch_size: int, measured: int
) -> None:
    """Of 30 samples; without normalisation, which has a pass of its own."""
    priced = Priced(small.task(norm=False).blueprint, Slice(), batch_size)
    steps = -(-30 // batch_size)
    assert fisher.work(priced, 30, steps).flops == measured * priced.sample.flops


def test_a_sample_alone_in_its_batch_says_nothing_where_batches_are_normalised() -> None:
    task = small.task(dtype=torch.float64)
    found = Observed(fedavg().train, Fisher())
    where_ = training_context(task, fedavg().norm, Slice())
    state = found.start(where_, TrainingStart(task.params, task.buffers, task.labels(0)))
    numbers = {"lr": torch.tensor(0.1).double()}
    alone = found.step(where_, state, batch(task, 3, valid=1), numbers, None)
    assert alone["measured"] == 0
    two = found.step(where_, state, batch(task, 3, valid=2), numbers, None)
    assert two["measured"] == 1
    assert torch.isnan(found.finish(where_, alone).report["fisher"])


def test_who_trained_nothing_reports_no_channels() -> None:
    task = small.task()
    found = Observed(fedavg().train, Fisher(), channels=True)
    where_ = training_context(task, fedavg().norm, Slice())
    state = found.start(where_, TrainingStart(task.params, task.buffers, task.labels(0)))
    assert torch.isnan(found.finish(where_, state).report["channels"]).all()
