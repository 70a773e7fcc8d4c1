from pathlib import Path

import numpy as np
import pytest
import torch

from anyfleet.names import Factory
from anyfleet.tasks import DigitsFive, Domains, digits, zoo
from anyfleet.tasks import dataset_files as files
from anyfleet.tasks.digits import DOMAINS, digit_data
from tests.helpers.sets import write_idx

SMALL = Factory.of(zoo.logistic, features=3 * 28 * 28)
HALF = Domains(users=2, share=0.5)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ANYFLEET_DATA", str(tmp_path))
    write_idx(tmp_path / "mnist", train=200, test=50)
    return tmp_path


def test_two_devices_of_each_domain_divide_its_share() -> None:
    task = DigitsFive(SMALL, partition=HALF).build(0)
    assert task.train.x.shape == (200, 3, 28, 28)
    assert task.owners == tuple(name for name in DOMAINS for _ in range(2))
    assert [task.size(device) for device in range(10)] == [10] * 10
    assert len(task.test) == 50


def test_a_domain_without_changes_is_mnist_and_the_others_say_that_they_are_not() -> None:
    assert [name for name in DOMAINS if "stand-in" not in name] == ["mnist"]
    images = files.idx_images("mnist")
    found = digits._domains(images.test_x, images.test_y, "test", None, 0)
    assert found.owners is not None
    ours = found.x[found.owners == DOMAINS.index("mnist")]
    theirs = {image.tobytes() for image in images.test_x[np.arange(50)]}
    assert all(image[0].numpy().tobytes() in theirs for image in ours)
    assert torch.equal(ours[:, 0], ours[:, 2])


def test_no_two_domains_have_the_same_image_of_mnist(monkeypatch: pytest.MonkeyPatch) -> None:
    same = dict.fromkeys(DOMAINS, digits._mnist)
    monkeypatch.setattr(digits, "_CHANGES", same)
    train, _ = digit_data(None, 0)
    assert len(torch.unique(train.x.flatten(1), dim=0)) == len(train) == 200


def test_images_of_every_domain_differ_from_mnist_and_keep_their_classes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changed, _ = digit_data(None, 0)
    monkeypatch.setattr(digits, "_CHANGES", dict.fromkeys(DOMAINS, digits._mnist))
    plain, _ = digit_data(None, 0)
    assert torch.equal(changed.y, plain.y)
    assert changed.owners is not None
    for number, name in enumerate(DOMAINS):
        rows = changed.owners == number
        grey = changed.x[rows]
        coloured = bool((grey[:, 0] - grey[:, 1]).abs().mean() > 0.2)
        assert coloured == (name not in ("mnist", "usps (stand-in)"))


def test_the_domains_do_not_depend_on_the_seed() -> None:
    one, two = (digit_data(None, seed)[0] for seed in (0, 1))
    assert torch.equal(one.x, two.x)
    limited = [digit_data(50, seed)[0] for seed in (0, 1)]
    assert [len(each) for each in limited] == [50, 50]
    assert not torch.equal(limited[0].x, limited[1].x)


def test_tested_and_trained_name_domains() -> None:
    usps = DOMAINS.index("usps (stand-in)")
    task = DigitsFive(SMALL, partition=HALF, tested="usps (stand-in)").build(0)
    assert task.test.owners is not None
    assert set(task.test.owners.tolist()) == {usps}
    assert len(task.train) == 200
    one = Domains(users=1, share=1.0)
    alone = DigitsFive(
        SMALL, devices=1, partition=one, trained=("tested",), tested="usps (stand-in)"
    ).build(0)
    assert alone.owners == ("usps (stand-in)",)
    pair = DigitsFive(SMALL, devices=2, partition=one, trained=("synthetic (stand-in)", "mnist"))
    assert pair.build(0).owners == ("mnist", "synthetic (stand-in)")


@pytest.mark.parametrize("fields", [{"tested": "svhn"}, {"trained": ("usps",)}, {"trained": ()}])
def test_unknown_domains_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="stand-in"):
        DigitsFive(SMALL, **fields)  # type: ignore[arg-type]


def test_too_few_images_are_refused(folder: Path) -> None:
    write_idx(folder / "few" / "mnist", train=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ANYFLEET_DATA", str(folder / "few"))
        with pytest.raises(ValueError, match="needs 5 train images"):
            digit_data(None, 0)
