"""Public data sets, read from files.

The files are in the folder that the environment variable ANYFLEET_DATA names, otherwise in
`~/.cache/anyfleet/data`. Each data set has its own folder there:

    mnist/{train,t10k}-{images-idx3,labels-idx1}-ubyte[.gz]
    fashion-mnist/                the same four files
    cifar-10-batches-bin/data_batch_{1..5}.bin, test_batch.bin
    har/windows.npz               x float32 [n, 128, 6], y uint8 0..5, user uint8
    shakespeare/clients.jsonl     one {"client": ..., "text": ...} per line
"""

import json
import os
import zipfile
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from anyfleet.errors import MissingData
from anyfleet.tasks.idx import read_idx

FOLDER_VARIABLE = "ANYFLEET_DATA"
DEFAULT_FOLDER = Path("~/.cache/anyfleet/data")
_CIFAR_ROW = 1 + 3 * 32 * 32
_HAR_ORIGIN = (
    "'Smartphone-Based Recognition of Human Activities and Postural Transitions' by Reyes-Ortiz, "
    "Oneto, Ghio, Samà, Anguita and Parra, in the UCI Machine Learning Repository, cut into "
    "windows of 128 readings of one activity, step 64"
)
_SOURCES: dict[str, tuple[str, str]] = {
    "mnist": (
        "the four IDX files {train,t10k}-{images-idx3,labels-idx1}-ubyte, plain or .gz",
        "the original MNIST database by LeCun, Cortes and Burges, or any mirror of its four files",
    ),
    "fashion-mnist": (
        "the four IDX files {train,t10k}-{images-idx3,labels-idx1}-ubyte, plain or .gz",
        "Fashion-MNIST by Zalando Research, or any mirror; the task Embedded needs no files",
    ),
    "cifar-10-batches-bin": (
        "data_batch_1.bin … data_batch_5.bin and test_batch.bin",
        "CIFAR-10 by Krizhevsky, Nair and Hinton (University of Toronto), the binary version",
    ),
    "har": (
        "windows.npz with x float32 [n, 128, 6] (accelerometer, gyroscope), y uint8 0 … 5, user",
        _HAR_ORIGIN,
    ),
    "shakespeare": (
        'clients.jsonl with a line {"client": "PLAY/SPEAKER", "text": "…"} for each speaker',
        "the plays at Project Gutenberg, with each speaker's lines joined",
    ),
}


@dataclass(frozen=True, eq=False)
class Joined:
    """Arrays one after the other, as if they were one; only the rows that are asked for are read.

    Of 10,000 images that saves most of the time that all 50,000 take.
    """

    parts: tuple[NDArray[np.uint8], ...]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __getitem__(self, rows: NDArray[np.integer]) -> NDArray[np.uint8]:
        """Return copies of the given rows, which ascend."""
        ends = np.cumsum([len(part) for part in self.parts])
        whose = np.split(rows, np.searchsorted(rows, ends[:-1]))
        starts = (0, *ends[:-1])
        found = zip(self.parts, whose, starts, strict=True)
        return np.concatenate([part[own - start] for part, own, start in found])


class Images(NamedTuple):
    """Images as bytes [n, channels, height, width] with their classes."""

    train_x: NDArray[np.uint8] | Joined
    train_y: NDArray[np.uint8] | Joined
    test_x: NDArray[np.uint8]
    test_y: NDArray[np.uint8]


class Windows(NamedTuple):
    """Sensor windows [n, channels, time], their activity, and the person who wore the sensor."""

    x: NDArray[np.float32]
    y: NDArray[np.uint8]
    user: NDArray[np.uint8]


class Speech(NamedTuple):
    """The lines of one speaker."""

    client: str
    text: str


def data_folder() -> Path:
    """Return the folder that holds the data sets."""
    return Path(os.environ.get(FOLDER_VARIABLE) or DEFAULT_FOLDER).expanduser()


def embedded_images() -> Images:
    """Return the Fashion-MNIST subset inside the package: 12,000 + 2,000 images, balanced."""
    return _idx_images(files("anyfleet.tasks") / "embedded")


def idx_images(name: str) -> Images:
    """Return MNIST (`name="mnist"`) or Fashion-MNIST (`name="fashion-mnist"`)."""
    try:
        return _idx_images(data_folder() / name)
    except MissingData as error:
        raise _missing(name) from error


def cifar10_images() -> Images:
    """Return CIFAR-10 from its official binary version."""
    name = "cifar-10-batches-bin"
    folder = data_folder() / name
    batches = [folder / f"data_batch_{number}.bin" for number in range(1, 6)]
    if not all(file.is_file() for file in (*batches, folder / "test_batch.bin")):
        raise _missing(name)
    train, test = [_cifar_batch(file) for file in batches], _cifar_batch(folder / "test_batch.bin")
    return Images(
        Joined(tuple(_pixels(batch) for batch in train)),
        Joined(tuple(batch[:, 0] for batch in train)),
        _pixels(test),
        test[:, 0],
    )


def har_windows() -> Windows:
    """Return the windows of human activities as [n, channels, time]."""
    file = data_folder() / "har" / "windows.npz"
    if not file.is_file():
        raise _missing("har")
    try:
        with np.load(file, allow_pickle=False) as arrays:
            x, y, user = arrays["x"], arrays["y"], arrays["user"]
    except (KeyError, ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"{file} is damaged ({error}). It should hold {_SOURCES['har'][0]}."
        ) from error
    if x.ndim != 3 or y.shape != (len(x),) or user.shape != y.shape:
        raise ValueError(
            f"{file} has shapes {x.shape}, {y.shape}, {user.shape}; x is [n, time, 6]."
        )
    return Windows(np.ascontiguousarray(x.transpose(0, 2, 1), dtype=np.float32), y, user)


def shakespeare_speeches() -> tuple[Speech, ...]:
    """Return the lines of all speakers, in file order."""
    file = data_folder() / "shakespeare" / "clients.jsonl"
    if not file.is_file():
        raise _missing("shakespeare")
    speeches = []
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                entry = json.loads(line)
                speeches.append(Speech(str(entry["client"]), str(entry["text"])))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f'{file}, line {number}: not of the form {{"client": …, "text": …}} ({error}).'
                ) from error
    return tuple(speeches)


def _idx_images(folder: Traversable) -> Images:
    def pair(split: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        images = read_idx(folder, f"{split}-images-idx3-ubyte")
        labels = read_idx(folder, f"{split}-labels-idx1-ubyte")
        if images.ndim != 3 or labels.shape != (len(images),):
            raise ValueError(
                f"{folder}: {split} images {images.shape} and labels {labels.shape} do not fit."
            )
        return images[:, None], labels

    return Images(*pair("train"), *pair("t10k"))


def _cifar_batch(file: Path) -> NDArray[np.uint8]:
    """Return the rows of a file, which is mapped into memory: only what is used is read."""
    size = file.stat().st_size
    if not size or size % _CIFAR_ROW:
        raise ValueError(
            f"{file} has {size} bytes, not a multiple of {_CIFAR_ROW}: fetch it again."
        )
    return np.memmap(file, np.uint8, "r").reshape(-1, _CIFAR_ROW)


def _pixels(rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return rows[:, 1:].reshape(-1, 3, 32, 32)


def _missing(name: str) -> MissingData:
    contents, source = _SOURCES[name]
    return MissingData(
        f"{data_folder() / name} lacks {contents}. Get them from {source}; to keep data elsewhere, "
        f"set {FOLDER_VARIABLE} to the folder that holds {name}."
    )
