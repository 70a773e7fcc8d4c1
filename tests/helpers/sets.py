"""Tiny data sets: files in the public formats, and one with owners."""

import gzip
import json
from pathlib import Path

import numpy as np
import torch
from tools.embed import encode_idx
from torch import Tensor
from torch.utils.data import Dataset


def write_idx(folder: Path, *, train: int = 60, test: int = 20, side: int = 28) -> None:
    """Write images and labels in the IDX format, as MNIST has them."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for split, count in (("train", train), ("t10k", test)):
        images = rng.integers(0, 256, (count, side, side), dtype=np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        images_file = folder / f"{split}-images-idx3-ubyte.gz"
        images_file.write_bytes(gzip.compress(encode_idx(images)))
        (folder / f"{split}-labels-idx1-ubyte").write_bytes(encode_idx(labels))


def write_cifar(folder: Path, *, rows: int = 10) -> None:
    """Write images in the binary format of CIFAR-10."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name in (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"):
        batch = rng.integers(0, 256, (rows, 3073), dtype=np.uint8)
        batch[:, 0] = np.arange(rows) % 10
        (folder / f"{name}.bin").write_bytes(batch.tobytes())


def write_har(folder: Path, *, users: int = 30, windows: int = 8) -> None:
    """Write sensor windows as the task Har reads them."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    count = users * windows
    np.savez(
        folder / "windows.npz",
        x=(3 * rng.standard_normal((count, 128, 6)) + 5).astype(np.float32),
        y=(np.arange(count) % 6).astype(np.uint8),
        user=np.repeat(np.arange(1, users + 1), windows).astype(np.uint8),
    )


def write_shakespeare(folder: Path, *, speakers: int = 5, length: int = 200) -> None:
    """Write speeches as the task Shakespeare reads them."""
    folder.mkdir(parents=True)
    lines = [
        json.dumps({"client": f"play/{n}", "text": ("abcdefg \n"[n:] * length)[:length]})
        for n in range(speakers)
    ]
    (folder / "clients.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


NAMES = ("zoe", "ada", "bob", "alf")


class Owned(Dataset[tuple[Tensor, int, str]]):
    """Twenty samples of each of three owners; the first input says whose they are."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> tuple[Tensor, int, str]:
        owner = 1 + index % 3
        return torch.full((6,), float(owner)), index // 3 % 3, NAMES[owner]
