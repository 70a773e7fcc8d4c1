from pathlib import Path

import pytest
import torch

from anyfleet import config
from anyfleet.names import Factory
from anyfleet.tasks import (
    BalancedClasses,
    Cifar10,
    DigitsFive,
    Domains,
    Embedded,
    FashionMnist,
    Flip,
    Generator,
    Har,
    Iid,
    InTurn,
    Mnist,
    Shakespeare,
    Synthetic,
    Task,
    TaskSpec,
    zoo,
)
from tests.helpers.sets import write_cifar, write_har, write_idx, write_shakespeare

SMALL = Factory.of(zoo.logistic)
SMALL_HAR = Factory.of(zoo.logistic, features=768, classes=6)
TINY_TEXT = Factory.of(zoo.Transformer, layers=1, width=8, heads=2, hidden=8)
SPECS: dict[str, TaskSpec] = {
    "Embedded": Embedded(SMALL, devices=5, limit=300, server=50),
    "FashionMnist": FashionMnist(SMALL, devices=5, server=10),
    "Mnist": Mnist(SMALL, devices=5, server=10, augment=InTurn()),
    "Cifar10": Cifar10(Factory.of(zoo.logistic, features=3072), devices=5, server=10),
    "DigitsFive": DigitsFive(
        Factory.of(zoo.logistic, features=3 * 784),
        partition=Domains(share=1.0),
        test_share=0.2,
        server=10,
    ),
    "Har": Har(SMALL_HAR, server=10),
    "Shakespeare": Shakespeare(TINY_TEXT, devices=4, server=5, length=8),
    "Synthetic": Synthetic(data=Generator(devices=4, samples=50), server=10),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ANYFLEET_DATA", str(tmp_path))
    write_idx(tmp_path / "fashion-mnist", train=100)
    write_idx(tmp_path / "mnist", train=100)
    write_cifar(tmp_path / "cifar-10-batches-bin", rows=20)
    write_har(tmp_path / "har")
    write_shakespeare(tmp_path / "shakespeare")
    return tmp_path


def rows_in(task: Task) -> list[list[int]]:
    return [rows.tolist() for rows in (*task.train_rows, *task.test_rows)]


@pytest.mark.parametrize("name", SPECS)
def test_every_task_builds_the_same_from_the_same_seed(folder: Path, name: str) -> None:
    state = torch.random.get_rng_state()
    one = SPECS[name].build(3)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(99)
    two, other = SPECS[name].build(3), SPECS[name].build(4)
    assert rows_in(one) == rows_in(two)
    for key, tensor in one.params.items():
        assert torch.equal(tensor, two.params[key])
    assert any(not torch.equal(tensor, other.params[key]) for key, tensor in one.params.items())
    if name != "Synthetic":  # its rows are the same, its numbers are not
        assert rows_in(one) != rows_in(other)


@pytest.mark.parametrize("name", SPECS)
def test_every_task_has_all_its_parts(folder: Path, name: str) -> None:
    task = SPECS[name].build(0)
    assert task.name
    assert len(task.test) > 0
    assert len(task.server) > 0
    for device in range(task.devices):
        assert len(task.data(device)) > 0
        assert len(task.own_test(device)) > 0
    assert task.loss(torch.zeros(len(task.test), *_output(task)), task.test.y).ndim == 1


def _output(task: Task) -> tuple[int, ...]:
    return (*task.test.y.shape[1:], task.classes)


@pytest.mark.parametrize("name", SPECS)
def test_written_down_and_read_back_it_is_the_same(name: str) -> None:
    assert config.load(config.dump(SPECS[name])) == SPECS[name]


def test_inputs_are_standardised_by_the_training_images(folder: Path) -> None:
    task = Cifar10(Factory.of(zoo.logistic, features=3072), devices=2, server=0).build(0)
    assert task.train.x.shape == (100, 3, 32, 32)
    assert torch.allclose(task.train.x.mean((0, 2, 3)), torch.zeros(3), atol=1e-5)
    assert torch.allclose(task.train.x.std((0, 2, 3)), torch.ones(3), atol=1e-3)
    # The test images use the same numbers, so they come out near, not equal.
    assert 1e-6 < float(task.test.x.mean().abs()) < 0.1


def test_a_fixed_split_seed_keeps_the_data_while_weights_change(folder: Path) -> None:
    spec = Embedded(SMALL, devices=5, limit=300, server=50, split_seed=7)
    one, two = spec.build(1), spec.build(2)
    assert torch.equal(one.train.x, two.train.x)
    assert rows_in(one) == rows_in(two)
    assert not torch.equal(one.params["1.weight"], two.params["1.weight"])


def test_embedded_default_is_the_demo_task() -> None:
    task = Embedded().build(0)
    assert task.blueprint.numel() == 37_610
    assert task.devices == 20
    assert {len(task.data(k)) + len(task.own_test(k)) for k in range(20)} == {575}
    assert (len(task.test), len(task.server)) == (2000, 500)


def test_options_reach_the_task(folder: Path) -> None:
    task = Mnist(
        SMALL, devices=5, partition=BalancedClasses(2), test_share=0, server=0, augment=Flip()
    ).build(0)
    assert all(int(task.labels(device).sum()) == 2 for device in range(5))
    assert task.augment == Flip()
    assert sum(map(len, task.train_rows)) == 100


def test_limit_bounds_training_and_test_samples(folder: Path) -> None:
    task = Mnist(SMALL, devices=2, server=0, limit=15).build(0)
    assert (len(task.train), len(task.test)) == (15, 15)


def test_har_tests_on_other_people(folder: Path) -> None:
    task = Har(SMALL_HAR, server=10).build(0)
    assert task.devices == 21
    assert task.test.owners is not None
    assert task.train.owners is not None
    assert set(task.test.owners.tolist()) == {2, 4, 9, 10, 12, 13, 18, 20, 24}
    assert not set(task.train.owners.tolist()) & set(task.test.owners.tolist())
    for device in range(21):
        assert len(set(task.train.owners[task.train_rows[device]].tolist())) == 1
    everybody = Har(SMALL_HAR, devices=30, server=0, test_users=()).build(0)
    assert len(everybody.test) == sum(map(len, everybody.test_rows))


def test_default_networks_fit_their_data(folder: Path) -> None:
    har = Har(server=0).build(0)
    assert har.classes == 6
    cifar = Cifar10(devices=5, server=0).build(0)
    assert cifar.blueprint.numel() == 567_858
    assert Synthetic(data=Generator(devices=2, samples=10)).build(0).blueprint.numel() == 610


def test_text_models_get_vocabulary_and_length(folder: Path) -> None:
    task = Shakespeare(TINY_TEXT, devices=4, server=5, length=8).build(0)
    assert task.classes == len(set("abcdefg \n"))
    assert task.blueprint.shape("positions.weight") == (8, 8)
    assert task.train.owners is not None
    owners = [set(task.train.owners[rows].tolist()) for rows in task.train_rows]
    assert all(len(owner) == 1 for owner in owners)
    wider = Factory.of(zoo.Transformer, layers=1, width=8, heads=2, hidden=8, vocabulary=50)
    assert Shakespeare(wider, devices=4, server=5, length=8).build(0).classes == 50


@pytest.mark.parametrize(
    "kind", [Embedded, FashionMnist, Mnist, Cifar10, DigitsFive, Har, Shakespeare]
)
def test_impossible_fields_are_refused(kind: type[Embedded]) -> None:
    for fields in ({"devices": 0}, {"test_share": 1.0}, {"server": -1}, {"limit": 0}):
        with pytest.raises(ValueError, match=next(iter(fields))):
            kind(**fields)


def test_more_impossible_fields() -> None:
    with pytest.raises(ValueError, match="length"):
        Shakespeare(length=0)
    with pytest.raises(ValueError, match="test_share"):
        Synthetic(test_share=0)
    with pytest.raises(ValueError, match="server"):
        Synthetic(server=-1)


def test_a_model_that_is_no_module_is_refused() -> None:
    with pytest.raises(ValueError, match="not a torch module"):
        Embedded(Factory.of(Iid), limit=100, server=0).build(0)
