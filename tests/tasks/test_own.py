from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from anyfleet import config
from anyfleet.names import Factory
from anyfleet.tasks import Data, Dirichlet, Own, squared_error


class Net(nn.Module):
    def __init__(self, hidden: int = 4) -> None:
        super().__init__()
        self.one = nn.Linear(3, hidden)
        self.two = nn.Linear(hidden, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.two(self.one(x).relu())
        return out


def single(rows: int = 60) -> Data:
    return Data(torch.randn(rows, 3), torch.arange(rows) % 2)


def pair(rows: int = 60) -> tuple[Data, Data]:
    return single(rows), single(10)


def triple() -> tuple[Data, Data, Data]:
    return single(), single(), single()


def margin(output: Tensor, target: Tensor) -> Tensor:
    return output.gather(1, target[:, None]).squeeze(1)


def factory(function: object, **options: int) -> Factory:
    name = function.__name__  # type: ignore[attr-defined]
    return Factory(f"{__name__}:{name}", options)


def test_model_and_data_come_by_name() -> None:
    task = Own(factory(Net, hidden=6), factory(pair, rows=80), devices=4, server=8).build(0)
    assert task.blueprint.shape("one.weight") == (6, 3)
    assert len(task.train) == 80
    assert len(task.test) == 10
    assert len(task.server) == 8
    assert list(task.metrics) == ["accuracy"]


def test_one_data_set_is_tested_on_held_out_rows() -> None:
    task = Own(factory(Net), factory(single), devices=4, test_share=0.2).build(0)
    assert len(task.test) == 12


def test_own_loss_metrics_and_starting_state(tmp_path: Path) -> None:
    start = Net()
    save_file(start.state_dict(), tmp_path / "start.safetensors")
    spec = Own(
        factory(Net),
        factory(pair),
        loss=margin,
        metrics={"margin": margin},
        state=str(tmp_path / "start.safetensors"),
        devices=3,
        partition=Dirichlet(5.0),
    )
    task = spec.build(0)
    assert task.loss is margin
    assert list(task.metrics) == ["margin"]
    assert torch.equal(task.params["one.weight"], start.one.weight)


def test_written_down_and_read_back_it_is_the_same() -> None:
    spec = Own(factory(Net, hidden=6), factory(pair), loss=squared_error, devices=3)
    package = __name__.partition(".")[0]
    assert config.load(config.dump(spec), allow=(package,)) == spec


def test_other_things_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\(training, test\)"):
        Own(factory(Net), factory(triple)).build(0)
    with pytest.raises(ValueError, match="devices"):
        Own(factory(Net), factory(pair), devices=0)
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(b"nothing")
    for state in (damaged, tmp_path / "absent.safetensors"):
        with pytest.raises(ValueError, match="safetensors"):
            Own(factory(Net), factory(pair), state=str(state)).build(0)
