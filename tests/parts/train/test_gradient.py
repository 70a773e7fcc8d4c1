"""Plain local training, against torch modules trained the ordinary way."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils._pytree import tree_leaves

from anyfleet import rng
from anyfleet.core import local_training as local_training
from anyfleet.core.local_training import Extent, Inputs, as_tensors, extent, lifted
from anyfleet.core.messages import Params
from anyfleet.core.slots import Minibatch, TrainingContext, TrainingStart, TrainingState
from anyfleet.elastic import Priced, Slice, cost, cut, trace
from anyfleet.methods import fedavg
from anyfleet.parts.norm import BatchStatistics, Tracked
from anyfleet.parts.train import AdamW, Decaying, Gradient, Sgd
from anyfleet.parts.train.gradient import MinibatchGradient, differentiated, row_masks, scaled
from anyfleet.tasks import Data, Split, Task
from tests.helpers import small


def site(task: Task, trainer: Gradient, slice_: Slice | None = None) -> TrainingContext:
    method = replace(fedavg(), train=trainer, norm=BatchStatistics())
    return local_training.training_context(task, method.norm, slice_ or Slice())


def inputs(task: Task, device: int, trainer: Gradient, start: Params) -> tuple[Inputs, Extent]:
    data = task.data(device)
    numbers = trainer.hyperparameters(0, np.array([len(data)]))
    like = next(iter(start.values()))
    values = {n: v[0] for n, v in as_tensors(numbers, [len(data)], like).items()}
    valid = torch.ones(len(data), dtype=torch.bool)
    seen, key = task.labels(device), rng.root(1, "device")
    given = Inputs(start, task.buffers, data.x, data.y, valid, seen, key, values)
    return given, extent(numbers, [len(data)])


def trained(task: Task, trainer: Gradient, device: int = 0) -> Params:
    given, bounds = inputs(task, device, trainer, task.params)
    where = site(task, trainer)
    return local_training.train(trainer, where, given, bounds, lift=lifted(1), cohort_key=0).params


def by_hand(task: Task, trainer: Gradient, device: int = 0) -> dict[str, Tensor]:
    """The same minibatches through nn.Module, autograd and torch.optim."""
    module = small.net(dropout=0.0).to(next(iter(task.params.values())).dtype).train()
    optimiser = torch.optim.SGD(
        module.parameters(),
        lr=trainer.lr(0),
        momentum=trainer.optimiser.momentum,  # type: ignore[attr-defined]
        weight_decay=trainer.optimiser.weight_decay,  # type: ignore[attr-defined]
    )
    data, size = task.data(device), trainer.batch_size
    key = rng.fold(rng.root(1, "device"), "order")
    for epoch in range(trainer.epochs):
        order = rng.permutation(rng.fold(key, epoch), torch.ones(len(data), dtype=torch.bool))
        for rows in torch.split(order, size):
            optimiser.zero_grad()
            nn.functional.cross_entropy(module(data.x[rows]), data.y[rows]).backward()  # type: ignore[no-untyped-call]
            for name, value in module.named_parameters():
                assert value.grad is not None
                value.grad += trainer.proximal * (value.detach() - task.params[name])
            if trainer.clip is not None:
                nn.utils.clip_grad_norm_(module.parameters(), trainer.clip)
            optimiser.step()
    return {name: value.detach() for name, value in module.named_parameters()}


@pytest.mark.parametrize(
    "trainer",
    [
        Gradient(Decaying(0.1), batch_size=8),
        Gradient(Decaying(0.05), Sgd(momentum=0.9, weight_decay=1e-3), epochs=3, batch_size=16),
        Gradient(Decaying(0.1), batch_size=10, clip=0.5),
        Gradient(Decaying(0.1), batch_size=8, proximal=0.5),
    ],
    ids=["plain", "momentum", "clipped", "proximal"],
)
def test_training_equals_a_torch_loop(trainer: Gradient) -> None:
    task = small.task(dropout=0.0, dtype=torch.float64)
    ours, theirs = trained(task, trainer), by_hand(task, trainer)
    assert small.distance(theirs, ours) < 1e-12
    assert small.distance(task.params, ours) > 1e-3


class Looks(Gradient):
    """A trainer that looks back at the state before its step."""

    def descend(
        self,
        context: TrainingContext,
        state: TrainingState,
        found: MinibatchGradient,
        batch: Minibatch,
        hyperparameters: Mapping[str, Tensor],
    ) -> TrainingState:
        before = {name: value.clone() for name, value in state["params"].items()}
        new = super().descend(context, state, found, batch, hyperparameters)
        assert all(torch.equal(state["params"][name], value) for name, value in before.items())
        return new


@pytest.mark.parametrize("trainer", [Gradient(batch_size=8), Looks(batch_size=8)])
def test_only_what_training_made_is_written_over(trainer: Gradient) -> None:
    task = small.task(dropout=0.0, dtype=torch.float64)
    before = {name: value.clone() for name, value in task.params.items()}
    first, second = trained(task, trainer), trained(task, trainer)
    assert all(torch.equal(task.params[name], value) for name, value in before.items())
    assert all(torch.equal(second[name], value) for name, value in first.items())


def test_1_2_fedprox_example() -> None:
    """§1.2: w=(1,2), w^t=(0,0), gradient (.5,-.5), eta=.1, mu=.1 gives (.94, 2.03)."""

    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.w

    data = Data(torch.tensor([[0.5, -0.5]] * 4), torch.zeros(4))
    task = Task.of(
        Scores(),
        data,
        data,
        loss=lambda out, y: out.sum(-1),
        split=Split(devices=1, test_share=0),
    )
    trainer = Gradient(Decaying(0.1), proximal=0.1)
    where = site(task, trainer)
    state = trainer.start(where, TrainingStart(task.params, {}, task.labels(0)))
    state = {**state, "params": {"w": torch.tensor([1.0, 2.0])}}
    batch = Minibatch(data.x, data.y, torch.ones(4, dtype=torch.bool), torch.tensor(0))
    new = trainer.step(where, state, batch, {"lr": torch.tensor(0.1)}, None)
    torch.testing.assert_close(new["params"]["w"], torch.tensor([0.94, 2.03]))


def test_fixed_iterations_and_epochs_count_their_steps() -> None:
    sizes = np.array([37, 5, 0])
    by_epoch = Gradient(epochs=2, batch_size=10).hyperparameters(0, sizes)
    assert local_training.local_steps(by_epoch, sizes.tolist()) == [8, 2, 0]
    by_step = Gradient(local_steps=7, batch_size=10).hyperparameters(0, sizes)
    assert local_training.local_steps(by_step, sizes.tolist()) == [7, 7, 0]
    some = replace(by_epoch, local_steps=np.array([3, 3, 3]))
    assert local_training.local_steps(some, sizes.tolist()) == [3, 2, 0]


@pytest.mark.parametrize(
    ("limit", "samples", "batch", "expected"),
    [
        (8, 37, 10, 74),
        (4, 37, 10, 37),
        (5, 37, 10, 47),
        (3, 37, 10, 30),
        (0, 37, 10, 0),
        (7, 5, 10, 35),
    ],
)
def test_samples_processed(limit: int, samples: int, batch: int, expected: int) -> None:
    assert local_training.samples_processed(limit, samples, batch) == expected


def test_a_device_without_data_returns_what_it_got() -> None:
    task = small.task()
    empty = replace(task, train_rows=(torch.zeros(0, dtype=torch.long), *task.train_rows[1:]))
    trainer = Gradient(optimiser=Sgd(weight_decay=0.1))
    assert small.identical(trained(empty, trainer), task.params)


def test_1_5_masked_logits_are_zero_not_excluded_and_get_no_gradient() -> None:
    task = small.task(dropout=0.0)
    trainer = Gradient(masked=True)
    where = site(task, trainer)
    seen = torch.arange(10) < 3
    data = task.data(0)
    y = data.y % 3
    batch = Minibatch(data.x, y, torch.ones(len(y), dtype=torch.bool), torch.tensor(0))
    state = trainer.start(where, TrainingStart(task.params, task.buffers, seen))

    def loss(params: Params) -> Tensor:
        return trainer.loss(where, params, state, batch)[0]

    gradient = grad(loss)(dict(task.params))
    assert torch.equal(gradient["10.weight"][3:], torch.zeros(7, 16))
    assert gradient["10.weight"][:3].abs().sum() > 0
    logits = functional_call(small.net(dropout=0.0).train(), dict(task.params), (data.x,))
    zeroed = torch.cat([logits[:, :3], torch.zeros(len(y), 7)], dim=1)
    torch.testing.assert_close(loss(task.params), nn.functional.cross_entropy(zeroed, y))


def test_1_5_label_rows_mask_absent_classes() -> None:
    task = small.task()
    seen = torch.arange(10) % 2 == 0
    masks = row_masks(site(task, Gradient(label_rows=True)), seen)
    assert set(masks) == {"10.weight", "10.bias"}
    assert masks["10.weight"].shape == (10, 16)
    assert torch.equal(masks["10.weight"][:, 0] > 0, seen)
    assert torch.equal(masks["10.bias"] > 0, seen)


def test_1_5_scaler_divides_the_output_of_normalised_layers_only() -> None:
    task = small.task()
    half = task.blueprint.prefix(0.5)
    local = task.blueprint.local(half)
    params = cut(task.params, half, task.blueprint)
    changed = scaled(params, local)
    torch.testing.assert_close(changed["0.weight"], params["0.weight"] * 2)
    torch.testing.assert_close(changed["0.bias"], params["0.bias"] * 2)
    same = [name for name in params if not name.startswith("0.")]
    assert all(torch.equal(changed[name], params[name]) for name in same)
    assert small.identical(scaled(task.params, task.blueprint), task.params)


def test_frozen_parameters_stay_and_only_trained_layers_change() -> None:
    module = small.net(dropout=0.0)
    for parameter in module[0].parameters():
        parameter.requires_grad_(False)
    split = Split(devices=2, test_share=0.1)
    task = Task.of(module, small.patterns(60, 1), small.patterns(30, 2), split=split)
    new = trained(task, Gradient(Decaying(0.1)))
    assert torch.equal(new["0.weight"], task.params["0.weight"])
    assert not torch.equal(new["4.weight"], task.params["4.weight"])


def test_layers_before_the_first_trained_one_keep_weights_and_statistics() -> None:
    task = small.task()
    trainer = Gradient(Decaying(0.1))
    given, bounds = inputs(task, 0, trainer, task.params)
    where = replace(site(task, trainer, Slice(first_trained_layer=2)))
    where = replace(where, norm=Tracked())
    result = local_training.train(trainer, where, given, bounds, lift=lifted(1), cohort_key=0)
    early = [name for name in task.params if name.startswith(("0.", "1.", "4."))]
    assert all(torch.equal(result.params[name], task.params[name]) for name in early)
    assert not torch.equal(result.params["8.weight"], task.params["8.weight"])
    assert small.identical(result.buffers, task.buffers)


def test_augmentation_is_keyed_by_device_and_step() -> None:
    def noisy(x: Tensor, key: Tensor) -> Tensor:
        noise = rng.normal(key, x.numel(), x.dtype)
        return x + noise.reshape(x.shape)

    task = replace(small.task(), augment=noisy)
    trainer = Gradient(Decaying(0.1))
    one = trained(task, trainer)
    assert small.identical(one, trained(task, trainer))
    assert small.distance(trained(small.task(), trainer), one) > 1e-4


def test_pixels_with_classes_train_with_every_part_on() -> None:
    module = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 1))
    x = torch.randn(20, 1, 5, 5)
    task = Task.of(
        module,
        Data(x, (x[:, 0] > 0).long()),
        loss=lambda out, y: nn.functional.cross_entropy(out, y, reduction="none").mean((1, 2)),
        split=Split(devices=2),
    )
    trainer = Gradient(Decaying(0.5), epochs=3, masked=True, label_rows=True)
    assert small.distance(task.params, trained(task, trainer)) > 0.01


def test_token_models_train() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(7, 8)
            self.head = nn.Linear(8, 7)

        def forward(self, tokens: Tensor) -> Tensor:
            scores: Tensor = self.head(self.embed(tokens))
            return scores

    text = torch.arange(40 * 6).reshape(40, 6) % 7
    task = Task.of(
        Tokens(),
        Data(text, (text + 1) % 7),
        Data(text, (text + 1) % 7),
        split=Split(devices=2),
    )
    assert trace(Tokens(), (text[:2],)).output_rows
    trainer = Gradient(Decaying(1.0), epochs=5, masked=True, label_rows=True)
    assert small.distance(task.params, trained(task, trainer)) > 0.1


def test_work_counts_the_update_of_the_model_besides_the_passes() -> None:
    task = small.task()
    suffix = Slice((), 2)
    priced = Priced(task.blueprint, suffix, 8)
    sample, batch = (cost(task.blueprint, suffix, size) for size in (1, 8))
    assert (priced.sample, priced.batch) == (sample, batch)
    plain = Gradient(batch_size=8).work(priced, processed=20, local_steps=3)
    assert plain.flops == 20 * sample.flops
    assert plain.calls == 3 * batch.calls
    updated = 5 * 4 * sample.sent_params
    assert plain.moved == 3 * (batch.moved + updated)
    heavy = Gradient(optimiser=Sgd(momentum=0.9), batch_size=8).work(priced, 20, 3)
    assert heavy.moved == plain.moved + 3 * 5 * 4 * sample.sent_params


def test_memory_is_the_worse_of_the_passes_and_the_update() -> None:
    blueprint = small.task().blueprint
    sample = cost(blueprint, Slice((), 2))
    trained = 4 * sample.sent_params

    def needed(trainer: Gradient, batch: int) -> float:
        return float(trainer.work(Priced(blueprint, Slice((), 2), batch), 0, 0).memory)

    plain, heavy = Gradient(), Gradient(optimiser=AdamW())
    updating = sample.nbytes + 3 * trained + 2 * sample.largest_bytes + sample.input_bytes
    assert needed(plain, 1) == updating
    # An optimiser's state is there all the time, and in the update twice.
    assert needed(heavy, 1) == updating + 2 * 2 * trained
    large = cost(blueprint, Slice((), 2), 512).pass_bytes
    assert needed(plain, 512) == sample.nbytes + trained + large
    assert needed(heavy, 512) == sample.nbytes + 3 * trained + large


def test_gradients_are_the_same_alone_and_in_a_stack() -> None:
    task = small.task(dtype=torch.float64)
    trainer = Gradient()
    where, data = site(task, trainer, Slice((), 2)), task.data(0)
    state = trainer.start(where, TrainingStart(task.params, task.buffers, task.labels(0)))
    batch = Minibatch(data.x, data.y, torch.ones(len(data), dtype=torch.bool), torch.tensor(5))

    def found(scale: Tensor) -> tuple[Params, Tensor, Params]:
        at = {name: scale * state["params"][name] for name in where.trained}
        besides = {"unused": scale * torch.ones(3, dtype=torch.float64)}

        def objective(values: Params) -> tuple[Tensor, Params]:
            loss, _ = trainer.loss(where, {**state["params"], **values}, state, batch)
            return loss, {"twice": 2 * values[where.trained[0]]}

        return differentiated(objective, {**at, **besides})

    alone = found(torch.tensor(1.5, dtype=torch.float64))
    stacked = vmap(found)(torch.tensor([0.5, 1.5], dtype=torch.float64))
    for one, many in zip(tree_leaves(alone), tree_leaves(stacked), strict=True):
        torch.testing.assert_close(many[1], one, rtol=1e-10, atol=1e-12)
        assert not one.requires_grad
    assert not alone[0]["unused"].any()
    assert set(alone[0]) == {"8.weight", "8.bias", "10.weight", "10.bias", "unused"}


def test_an_objective_that_nothing_moves_has_no_slope() -> None:
    at = {"w": torch.ones(2)}
    gradients, value, _ = differentiated(lambda values: (torch.tensor(3.0), {}), at)
    assert value == 3.0
    assert gradients["w"].tolist() == [0.0, 0.0]
