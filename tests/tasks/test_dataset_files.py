import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from anyfleet.errors import MissingData
from anyfleet.tasks import dataset_files as files
from tests.helpers.sets import write_cifar, write_har, write_idx, write_shakespeare


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ANYFLEET_DATA", str(tmp_path))
    return tmp_path


def test_embedded_subset_is_balanced_and_small() -> None:
    images = files.embedded_images()
    pixels, classes = (each[np.arange(12_000)] for each in images[:2])
    assert pixels.shape == (12_000, 1, 28, 28)
    assert len(images.train_x) == len(images.train_y) == 12_000
    assert images.test_x.shape == (2_000, 1, 28, 28)
    assert np.bincount(classes).tolist() == [1_200] * 10
    assert np.bincount(images.test_y).tolist() == [200] * 10
    # Published statistics of Fashion-MNIST: mean .2860, deviation .3530.
    assert pixels.mean() / 255 == pytest.approx(0.286, abs=0.002)
    assert pixels.std() / 255 == pytest.approx(0.353, abs=0.002)
    kept = Path(files.__file__).parent / "embedded"
    assert sum(file.stat().st_size for file in kept.iterdir()) <= 8_000_000


def test_idx_sets_are_read_from_the_folder(folder: Path) -> None:
    write_idx(folder / "mnist", train=60, test=20)
    images = files.idx_images("mnist")
    assert images.train_x[np.arange(60)].shape == (60, 1, 28, 28)
    assert len(images.train_x) == 60
    assert images.test_y.tolist() == [n % 10 for n in range(20)]


def test_cifar_rows_are_label_then_red_green_blue(folder: Path) -> None:
    write_cifar(folder / "cifar-10-batches-bin", rows=10)
    first = (folder / "cifar-10-batches-bin" / "data_batch_1.bin").read_bytes()
    images = files.cifar10_images()
    assert len(images.train_x) == len(images.train_y) == 50
    pixels = images.train_x[np.arange(50)]
    assert pixels.shape == (50, 3, 32, 32)
    assert images.test_x.shape == (10, 3, 32, 32)
    assert images.train_y[np.arange(10)].tolist() == list(range(10))
    assert pixels[0, 0, 0, 0] == first[1]
    assert pixels[0, 1, 0, 0] == first[1 + 1024]
    assert pixels[0, 2, 31, 31] == first[3072]


def test_joined_rows_are_those_of_all_parts() -> None:
    parts = tuple(np.arange(count, dtype=np.uint8) + 10 * count for count in (3, 1, 4))
    whole, joined = np.concatenate(parts), files.Joined(parts)
    assert len(joined) == len(whole)
    for rows in ([], [0], [2, 3], [3, 4, 7], [0, 2, 3, 5, 6], list(range(8))):
        chosen = np.array(rows, dtype=np.int64)
        assert joined[chosen].tolist() == whole[chosen].tolist()


def test_har_windows_become_channels_first(folder: Path) -> None:
    write_har(folder / "har")
    with np.load(folder / "har" / "windows.npz") as raw:
        windows = files.har_windows()
        assert windows.x.shape == (240, 6, 128)
        assert np.array_equal(windows.x[3, 2], raw["x"][3, :, 2])
    assert set(windows.user.tolist()) == set(range(1, 31))


def test_speeches_keep_file_order(folder: Path) -> None:
    write_shakespeare(folder / "shakespeare")
    speeches = files.shakespeare_speeches()
    assert [speech.client for speech in speeches] == [f"play/{n}" for n in range(5)]
    assert speeches[1].text.startswith("bcdefg \n")


LOADERS: dict[str, Callable[[], object]] = {
    "mnist": lambda: files.idx_images("mnist"),
    "fashion-mnist": lambda: files.idx_images("fashion-mnist"),
    "cifar-10-batches-bin": files.cifar10_images,
    "har": files.har_windows,
    "shakespeare": files.shakespeare_speeches,
}


@pytest.mark.parametrize("name", LOADERS)
def test_a_missing_set_says_what_belongs_where_and_whence(folder: Path, name: str) -> None:
    with pytest.raises(MissingData) as caught:
        LOADERS[name]()
    message = str(caught.value)
    assert str(folder / name) in message
    assert "ANYFLEET_DATA" in message
    assert "Get them from" in message
    # Authors and projects last; addresses do not.
    assert not re.search(r"www\.|\.(com|org|edu)\b", message)


def test_a_set_with_one_file_missing_is_missing(folder: Path) -> None:
    write_cifar(folder / "cifar-10-batches-bin")
    (folder / "cifar-10-batches-bin" / "data_batch_3.bin").unlink()
    with pytest.raises(MissingData):
        files.cifar10_images()
    write_idx(folder / "mnist")
    (folder / "mnist" / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(MissingData, match="LeCun, Cortes and Burges"):
        files.idx_images("mnist")


def test_without_the_variable_the_documented_folder_is_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("ANYFLEET_DATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert files.data_folder() == tmp_path / ".cache" / "anyfleet" / "data"


def test_damaged_sets_are_refused(folder: Path) -> None:
    write_cifar(folder / "cifar-10-batches-bin")
    (folder / "cifar-10-batches-bin" / "test_batch.bin").write_bytes(b"short")
    with pytest.raises(ValueError, match="5 bytes"):
        files.cifar10_images()

    write_idx(folder / "mnist", train=60)
    labels = (folder / "mnist" / "t10k-labels-idx1-ubyte").read_bytes()
    (folder / "mnist" / "train-labels-idx1-ubyte").write_bytes(labels)
    with pytest.raises(ValueError, match="do not fit"):
        files.idx_images("mnist")

    write_shakespeare(folder / "shakespeare")
    with (folder / "shakespeare" / "clients.jsonl").open("a") as file:
        file.write('{"client": "x"}\n')
    with pytest.raises(ValueError, match="line 6"):
        files.shakespeare_speeches()


def test_damaged_windows_are_refused_and_never_unpickled(folder: Path) -> None:
    (folder / "har").mkdir()
    file = folder / "har" / "windows.npz"
    file.write_bytes(b"PK no zip")
    with pytest.raises(ValueError, match="damaged"):
        files.har_windows()
    np.savez(file, x=np.zeros((2, 128, 6)), y=np.zeros(2))
    with pytest.raises(ValueError, match="damaged"):
        files.har_windows()
    np.savez(file, x=np.zeros((2, 128, 6)), y=np.zeros(3), user=np.zeros(2))
    with pytest.raises(ValueError, match="shapes"):
        files.har_windows()
    np.savez(file, x=np.array([{"a": 1}], dtype=object), y=np.zeros(1), user=np.zeros(1))
    with pytest.raises(ValueError, match="damaged"):
        files.har_windows()
