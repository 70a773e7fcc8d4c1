import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from anyfleet.elastic import EVALUATE, apply
from anyfleet.tasks import (
    Data,
    Flip,
    Given,
    Iid,
    Split,
    Task,
    XClass,
    accuracy,
    pooled,
    squared_error,
    zoo,
)

SPLIT = Split(4, Iid(), test_share=0.25, server=8)


def flat(rows: int = 88, *, seed: int = 0) -> Data:
    generator = torch.Generator().manual_seed(seed)
    return Data(torch.randn(rows, 6, generator=generator), torch.arange(rows) % 3)


def net(outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, outputs))


def test_a_task_has_data_for_devices_server_and_test() -> None:
    train, test = flat(), flat(20, seed=1)
    task = Task.of(net(), train, test, split=SPLIT)
    assert task.devices == 4
    assert task.classes == 3
    assert [len(task.data(k)) for k in range(4)] == [15] * 4
    assert [task.size(k) for k in range(4)] == [15] * 4
    assert [len(task.own_test(k)) for k in range(4)] == [5] * 4
    assert len(task.server) == 8
    assert task.test is test
    assert torch.equal(task.data(2).x, train.x[task.train_rows[2]])
    assert torch.equal(task.own_test(2).y, train.y[task.test_rows[2]])
    assert list(task.metrics) == ["accuracy"]


def test_first_weights_are_copies_of_the_modules() -> None:
    module = net()
    task = Task.of(module, flat(), split=SPLIT)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    assert set(task.params) == {name for name, _ in module.named_parameters()}
    assert set(task.buffers) == {name for name, _ in module.named_buffers()}
    assert list(task.params) == list(task.blueprint.params)
    for name, tensor in {**task.params, **task.buffers}.items():
        assert torch.equal(tensor, before[name])
        assert not tensor.requires_grad
    with torch.no_grad():
        module[0].weight.zero_()  # type: ignore[index]
    assert task.params["0.weight"].abs().sum() > 0


def test_blueprint_and_weights_compute_what_the_module_does() -> None:
    module = net().eval()
    task = Task.of(module, flat(), split=SPLIT)
    output, _ = apply(task.blueprint, task.params, task.buffers, task.test.x, EVALUATE)
    assert torch.allclose(output, module(task.test.x), atol=1e-6)


def test_a_state_dict_is_the_start_and_the_users_module_stays() -> None:
    module, other = net(), net()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    task = Task.of(module, flat(), split=SPLIT, state=other.state_dict())
    assert torch.equal(task.params["0.weight"], other.state_dict()["0.weight"])
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert module.training


def test_a_state_that_does_not_fit_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"missing: 0\.weight, .*3\.bias; unexpected: weight, bias"
    ):
        Task.of(net(), flat(), split=SPLIT, state=nn.Linear(6, 3).state_dict())
    whole = net().state_dict()
    partial = {name: tensor for name, tensor in whole.items() if name != "3.bias"}
    with pytest.raises(ValueError, match=r"missing: 3\.bias\. To start from a part"):
        Task.of(net(), flat(), split=SPLIT, state=partial)
    with pytest.raises(ValueError, match=r"another shape: 3\.bias \[4\] instead of \[3\]"):
        Task.of(net(), flat(), split=SPLIT, state={**whole, "3.bias": torch.zeros(4)})


def test_frozen_parameters_are_kept_frozen() -> None:
    module = net()
    module[0].requires_grad_(False)  # type: ignore[index]
    task = Task.of(module, flat(), split=SPLIT)
    assert set(task.blueprint.frozen) == {"0.weight", "0.bias"}
    assert "0.weight" in task.params


def test_labels_are_those_of_the_training_rows() -> None:
    rows = ((0, 3, 6, 9), (1, 2, 4, 5))
    task = Task.of(net(), flat(), flat(9), split=Split(2, Given(rows), test_share=0))
    assert task.labels(0).tolist() == [True, False, False]
    assert task.labels(1).tolist() == [False, True, True]


def test_numbers_have_no_classes_to_miss() -> None:
    data = Data(torch.randn(40, 6), torch.randn(40, 2))
    task = Task.of(net(2), data, split=Split(4), loss=squared_error)
    assert task.labels(0).tolist() == [True, True]
    assert task.metrics == {}


def test_token_sequences() -> None:
    tokens = torch.arange(40 * 9).reshape(40, 9) % 7
    net = zoo.Transformer(7, layers=1, width=8, heads=2, hidden=8, length=8)
    task = Task.of(net, Data(tokens[:, :-1], tokens[:, 1:]), split=Split(4))
    assert task.classes == 7
    output, _ = apply(task.blueprint, task.params, task.buffers, task.test.x, EVALUATE)
    loss = task.loss(output, task.test.y)
    assert loss.shape == (len(task.test),)
    assert float(loss.mean()) == pytest.approx(math.log(7), abs=1.0)
    assert task.labels(0).all()


def test_without_a_test_set_the_held_out_rows_of_all_devices_serve() -> None:
    task = Task.of(net(), flat(), split=SPLIT)
    together = torch.cat([task.own_test(k).x for k in range(4)])
    assert len(task.test) == 20
    assert {tuple(row.tolist()) for row in task.test.x} == {tuple(r.tolist()) for r in together}
    with pytest.raises(ValueError, match="no test data"):
        Task.of(net(), flat(), split=replace(SPLIT, test_share=0))


def test_any_data_set_and_own_functions() -> None:
    def hinge(output: Tensor, target: Tensor) -> Tensor:
        return (1 - output.gather(1, target[:, None]).squeeze(1)).relu()

    data = flat()
    task = Task.of(
        net(),
        TensorDataset(data.x, data.y),
        TensorDataset(data.x[:9], data.y[:9]),
        split=SPLIT,
        loss=hinge,
        metrics={"hinge": hinge, "right": accuracy},
    )
    assert task.loss is hinge
    assert list(task.metrics) == ["hinge", "right"]
    assert len(task.test) == 9


def test_a_loss_that_averages_the_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="one value per sample"):
        Task.of(net(), flat(), split=SPLIT, loss=lambda output, target: output.mean())
    with pytest.raises(ValueError, match="bad must give one value"):
        Task.of(net(), flat(), split=SPLIT, metrics={"bad": lambda output, target: output})


def test_targets_outside_the_outputs_are_refused() -> None:
    with pytest.raises(ValueError, match="from 0 to 2, but the model has 2 outputs"):
        Task.of(net(2), flat(), split=SPLIT)
    data = flat()
    with pytest.raises(ValueError, match="from -1 to 1"):
        Task.of(net(), Data(data.x, data.y - 1), split=SPLIT)


def test_a_model_with_two_outputs_is_refused() -> None:
    class Two(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return x, x

    with pytest.raises(ValueError, match="one tensor"):
        Task.of(Two(6, 3), flat(), split=SPLIT)


def test_precision_can_be_changed() -> None:
    task = replace(Task.of(net(), flat(), split=SPLIT), augment=Flip())
    double = task.to(torch.float64)
    assert double.params["0.weight"].dtype == torch.float64
    assert double.buffers["1.running_mean"].dtype == torch.float64
    assert double.buffers["1.num_batches_tracked"].dtype == torch.int64
    assert {d.x.dtype for d in (double.train, double.test, double.server)} == {torch.float64}
    assert double.train.y.dtype == torch.int64
    assert double.augment == task.augment
    assert task.params["0.weight"].dtype == torch.float32


def test_tokens_stay_whole_numbers_in_another_precision() -> None:
    tokens = torch.arange(40 * 8).reshape(40, 8) % 7
    net = zoo.Transformer(7, layers=1, width=8, heads=2, hidden=8, length=8)
    double = Task.of(net, Data(tokens, tokens), split=Split(4)).to(torch.float64)
    assert double.train.x.dtype == torch.int64


def test_pooled_puts_all_device_data_on_one_device() -> None:
    task = Task.of(net(), flat(), split=Split(6, XClass(2, samples=20), test_share=0.2, server=8))
    one = pooled(task)
    assert one.devices == 1
    assert set(one.train_rows[0].tolist()) == set(torch.cat(task.train_rows).tolist())
    assert len(one.train_rows[0]) == len(set(one.train_rows[0].tolist()))
    assert set(one.test_rows[0].tolist()) == set(torch.cat(task.test_rows).tolist())
    assert one.test is task.test
    assert one.params is task.params
