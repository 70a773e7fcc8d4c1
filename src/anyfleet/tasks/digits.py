"""Five kinds of digit images as in FedResCuE's DigitsFive: MNIST, and four stand-ins made from it.

SVHN, Synthetic Digits, USPS and MNIST-M are separate data sets. The images here that are called
after them are images of MNIST, changed in a fixed way so that they differ from MNIST and from each
other in the same respects: colour, background, resolution, neighbours. Their names say so.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as nnf

from anyfleet.tasks import dataset_files as files
from anyfleet.tasks.data import Data
from anyfleet.tasks.data_loading import chosen_rows, standardised
from anyfleet.tasks.partition import IntArray
from anyfleet.tasks.split import number

SIDE = 28
TRAINING_IMAGES = 7438  # of a domain; 10 % of them are the 743 samples of FedResCuE's Table 7


def digit_data(limit: int | None, seed: int) -> tuple[Data, Data]:
    """Return training and test images of all domains, standardised by the former.

    Owners are the domains, in the order of `DOMAINS`. No two domains share an image of MNIST.
    `limit` bounds the training and the test images of all domains together; `seed` draws them.
    """
    images = files.idx_images("mnist")
    train = _domains(images.train_x, images.train_y, "train", limit, seed)
    test = _domains(images.test_x, images.test_y, "test", limit, seed)
    return standardised(train, test)


def _domains(
    x: NDArray[np.uint8] | files.Joined,
    y: NDArray[np.uint8] | files.Joined,
    split: str,
    limit: int | None,
    seed: int,
) -> Data:
    """Return the images of all domains as bytes."""
    count = min(TRAINING_IMAGES, len(y) // len(DOMAINS))
    if not count:
        raise ValueError(f"DigitsFive needs {len(DOMAINS)} {split} images of MNIST, got {len(y)}.")
    most = None if limit is None else max(1, limit // len(DOMAINS))
    kept = chosen_rows(count, most, number(seed, f"limit {split}"))
    order = np.random.default_rng(number(0, f"digits {split}")).permutation(len(y))
    found, classes = [], []
    for place, (name, change) in enumerate(_CHANGES.items()):
        rows = order[place * count : (place + 1) * count][kept]
        grey = torch.from_numpy(_picked(x, rows)).float() / 255
        changed = change(grey, np.random.default_rng(number(0, f"{name} {split}")))
        found.append((changed.clamp(0, 1) * 255).round().byte())
        classes.append(_picked(y, rows))
    owners = torch.arange(len(DOMAINS)).repeat_interleave(len(kept))
    labels = torch.from_numpy(np.concatenate(classes)).long()
    return Data(torch.cat(found), labels, owners, DOMAINS)


def _picked(values: NDArray[np.uint8] | files.Joined, rows: IntArray) -> NDArray[np.uint8]:
    """Return the given rows in the given order."""
    ascending, places = np.unique(rows, return_inverse=True)
    return values[ascending][places]


def _mnist(grey: Tensor, _: np.random.Generator) -> Tensor:
    """Return the images of MNIST as they are, three times for three colours."""
    return grey.expand(-1, 3, -1, -1)


def _usps(grey: Tensor, _: np.random.Generator) -> Tensor:
    """Return digits that fill the image, at 16 x 16 pixels, with strokes brighter and softer."""
    box = grey[:, :, 4:24, 4:24]  # MNIST keeps its digits in 20 x 20 pixels
    coarse = nnf.interpolate(box, size=16, mode="bilinear", antialias=True)
    fine = nnf.interpolate(coarse, size=SIDE, mode="bilinear", antialias=True)
    return fine.clamp(0, 1).pow(0.7).expand(-1, 3, -1, -1)


def _synthetic(grey: Tensor, rng: np.random.Generator) -> Tensor:
    """Return digits turned by up to 30 degrees, scaled, moved, coloured, before a noisy colour."""
    digit = _moved(grey, rng, degrees=30.0, scales=(0.7, 1.1), pixels=3.0)
    noise = _uniform(rng, -0.15, 0.15, len(grey), 3, SIDE, SIDE)
    return _painted(digit, rng) + noise


def _mnist_m(grey: Tensor, rng: np.random.Generator) -> Tensor:
    """Return the absolute difference between digits and coloured textures."""
    return (_textures(len(grey), rng) - grey).abs()


def _svhn(grey: Tensor, rng: np.random.Generator) -> Tensor:
    """Return coloured, blurred digits with neighbours that are cut off at the sides."""
    digit = _moved(grey, rng, degrees=10.0, scales=(0.9, 1.3), pixels=2.0)
    left, right = (torch.roll(digit, places, dims=0) for places in (1, 2))
    shift = 17  # pixels from a digit to the next
    row = digit.clone()
    row[..., : SIDE - shift] = torch.maximum(row[..., : SIDE - shift], left[..., shift:])
    row[..., shift:] = torch.maximum(row[..., shift:], right[..., : SIDE - shift])
    light = nnf.interpolate(_uniform(rng, -0.2, 0.2, len(grey), 1, 2, 2), SIDE, mode="bilinear")
    return nnf.avg_pool2d(_painted(row, rng) + light, 3, 1, 1, count_include_pad=False)


def _moved(
    grey: Tensor,
    rng: np.random.Generator,
    *,
    degrees: float,
    scales: tuple[float, float],
    pixels: float,
) -> Tensor:
    """Return images turned, scaled and moved at random."""
    count = len(grey)
    angle = _uniform(rng, -degrees, degrees, count) * (math.pi / 180)
    size = _uniform(rng, *scales, count)
    cosine, sine = angle.cos() / size, angle.sin() / size
    places = _uniform(rng, -pixels, pixels, count, 2) * (2 / SIDE)
    turn = torch.stack([cosine, -sine, sine, cosine], dim=1).view(-1, 2, 2)
    grid = nnf.affine_grid(
        torch.cat([turn, places[:, :, None]], dim=2), [*grey.shape], align_corners=False
    )
    return nnf.grid_sample(grey, grid, align_corners=False)


def _painted(digit: Tensor, rng: np.random.Generator) -> Tensor:
    """Return digits in a random colour before another one that is clearly lighter or darker."""
    count = len(digit)
    back = _uniform(rng, 0.0, 1.0, count, 3)
    contrast = _uniform(rng, 0.4, 0.8, count, 1)
    lighter = back.mean(1, keepdim=True) < 0.5
    tint = _uniform(rng, -0.15, 0.15, count, 3)
    front = back + torch.where(lighter, contrast, -contrast) + tint
    back, front = (each.clamp(0, 1)[:, :, None, None] for each in (back, front))
    return back + digit * (front - back)


def _textures(count: int, rng: np.random.Generator) -> Tensor:
    """Return coloured patterns of coarse and fine spots [n, 3, 28, 28] in 0 … 1."""
    coarse = nnf.interpolate(_uniform(rng, 0.0, 1.0, count, 3, 3, 3), SIDE, mode="bilinear")
    fine = nnf.interpolate(_uniform(rng, -0.5, 0.5, count, 1, 9, 9), SIDE, mode="bilinear")
    return (coarse + fine).clamp(0, 1)


def _uniform(rng: np.random.Generator, low: float, high: float, *shape: int) -> Tensor:
    return torch.from_numpy(rng.uniform(low, high, shape).astype(np.float32))


_CHANGES: dict[str, Callable[[Tensor, np.random.Generator], Tensor]] = {
    "mnist": _mnist,
    "svhn (stand-in)": _svhn,
    "usps (stand-in)": _usps,
    "synthetic (stand-in)": _synthetic,
    "mnist-m (stand-in)": _mnist_m,
}
DOMAINS = tuple(_CHANGES)  # owners of the images, by number
